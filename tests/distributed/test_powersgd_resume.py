"""Training that resumes from a checkpoint of `PowerSGDState`, or with other buckets, equals an uninterrupted run."""

import gc

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.powersgd_checkpoints import (
    CUT,
    EARLY,
    TOLERANCE,
    TOTAL,
    VARIANTS,
    U,
    own_memory,
    relative_deviation,
    save_and_load,
)
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    SMALLEST,
    WRAPPERS,
    build,
    gradients,
    own_batches,
    register,
    train_steps,
    wrapped,
)
from tests.support.zoo import Probe

# --- resuming


BATCH = 12  # of all ranks together; 1, 2 and 3 divide it


def run(state, wrapper, steps, dtype, checkpoint=None, other_steps=(), **ddp_options):
    """Train, and return the gradients of each step, which depend on no number of ranks but by rounding.

    Args:
        state: state of the hook; loaded from the checkpoint, too.
        wrapper: a name of `WRAPPERS`.
        steps: their numbers, which give their batches.
        dtype: dtype of the model.
        checkpoint: checkpoint to resume from.
        other_steps: steps of another run, trained before the checkpoint is loaded.
        ddp_options: arguments of the wrapper's constructor.
    """
    module = build("mlp").to(dtype)
    ddp = WRAPPERS[wrapper](module, **ddp_options)
    register(ddp, (state, powerSGD_hook))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def train_on(i):
        batch = torch.randn(BATCH, 11, generator=torch.Generator().manual_seed(i)).to(dtype)
        optimizer.zero_grad()
        ddp(batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.step()
        return gradients(ddp)

    for i in other_steps:
        train_on(i)
    if checkpoint is not None:
        module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["powersgd"])
    seen = [train_on(i) for i in steps]
    return seen, {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def run_and_save(path, cut, total, wrapper, options, **case):
    """Rank 0 saves after ``cut`` steps; returns the later gradients of a run that is not interrupted."""
    uninterrupted, _ = run(PowerSGDState(None, **(EARLY | options)), wrapper, range(total), **case)
    state = PowerSGDState(None, **(EARLY | options))
    _, checkpoint = run(state, wrapper, range(cut), **case)
    checkpoint["powersgd"] = state.state_dict()
    checkpoint["errors of rank 0"] = own_memory(state)["errors"]
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()
    return uninterrupted[cut:]


# What a checkpoint could have done wrong.
CHANGES = {
    "nothing": lambda saved, checkpoint: saved,
    "no errors": lambda saved, checkpoint: saved | {"errors": {}},
    "errors of rank 0": lambda saved, checkpoint: saved | {"errors": checkpoint["errors of rank 0"]},
    "no factors": lambda saved, checkpoint: saved | {"q": {}, "p": {}},
    "no iter": lambda saved, checkpoint: saved | {"iter": 0},
}


def resume(path, cut, total, wrapper, options, change="nothing", **case):
    checkpoint = torch.load(path)
    checkpoint["powersgd"] = CHANGES[change](checkpoint["powersgd"], checkpoint)
    state = PowerSGDState(None, **(EARLY | options))
    seen, _ = run(state, wrapper, range(cut, total), checkpoint=checkpoint, **case)
    return seen


@pytest.fixture(scope="module")
def saved_run(worlds, tmp_path_factory):
    """Makes a checkpoint on two ranks, once for each of its arguments; returns its path and the uninterrupted run."""
    made = {}

    def make(wrapper="gradwire", cap=SMALLEST, dtype=torch.float32, **options):
        key = (wrapper, cap, dtype, *options.items())
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
            case = {"path": path, "cut": CUT, "total": TOTAL, "wrapper": wrapper, "bucket_cap_mb": cap, "dtype": dtype}
            made[key] = path, worlds(2).run(run_and_save, options=options, **case)[0]
        return made[key]

    return make


def deviations(
    world, saved, wrapper="gradwire", cap=SMALLEST, dtype=torch.float32, change="nothing", other_steps=(), **options
):
    path, uninterrupted = saved
    case = {"path": path, "cut": CUT, "total": TOTAL, "wrapper": wrapper, "bucket_cap_mb": cap, "dtype": dtype}
    results = world.run(resume, change=change, options=options, other_steps=other_steps, **case)
    assert_same_on_all_ranks(results)
    return relative_deviation(results[0], uninterrupted)


@pytest.mark.parametrize("dtype", U)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_law7_checkpoint_resumes_with_another_world_size(worlds, saved_run, ranks, dtype):
    # Measured: 0.02 of the tolerance.
    saved = saved_run(dtype=dtype)
    assert deviations(worlds(ranks), saved, dtype=dtype) <= TOLERANCE * U[dtype]


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "nothing"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_law7_checkpoint_without_an_entry_resumes_differently(worlds, saved_run, ranks, change):
    # The failing twin of the test above. Measured: 0.9 to 1.3, which is 5e11 times the tolerance.
    dtype = torch.float64
    deviation = deviations(worlds(ranks), saved_run(dtype=dtype), dtype=dtype, change=change)
    assert deviation > max(0.1, 1e6 * TOLERANCE * U[dtype])


BUCKETS = {"a bucket each": SMALLEST, "default": None}


@pytest.mark.parametrize("after", BUCKETS)
@pytest.mark.parametrize("before", BUCKETS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law7_checkpoint_resumes_with_other_buckets_on_other_ddp(worlds, saved_run, wrapper, before, after):
    saved = saved_run(wrapper, BUCKETS[before])
    for other in WRAPPERS:
        assert deviations(worlds(2), saved, other, BUCKETS[after]) <= TOLERANCE * U[torch.float32]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("other_steps", [1, 5], ids=["before-the-start", "after-the-start"])
def test_law7_checkpoint_loaded_in_mid_training_resumes_from_its_step(worlds, saved_run, wrapper, other_steps):
    saved, steps = saved_run(dtype=torch.float64), range(100, 100 + other_steps)
    deviation = deviations(worlds(2), saved, wrapper, dtype=torch.float64, other_steps=steps)
    assert deviation <= TOLERANCE * U[torch.float64]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "bf16 factors"])
def test_law7_checkpoint_of_every_variant_resumes(worlds, saved_run, variant, ranks):
    # Without bf16 factors, because the sum of shares that are rounded to bf16 depends on their number.
    options = VARIANTS[variant]
    saved = saved_run(dtype=torch.float64, **options)
    assert deviations(worlds(ranks), saved, dtype=torch.float64, **options) <= TOLERANCE * U[torch.float64]


@pytest.mark.parametrize("saved_before", [[0], [1, 2], [3, 4, 5]], ids=["at-first", "early", "later"])
@pytest.mark.parametrize("hook", ["powersgd", "int4"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_training_with_saves_equals_training_without(wrapper, hook, saved_before):
    runs = []
    for saves in (saved_before, []):
        (state, function), generator, seen = HOOKS[hook](None), own_batches(), []
        ddp = wrapped(wrapper, hook=(state, function))
        for i in range(6):
            if i in saves:
                state.state_dict()
            seen += train_steps(ddp, 1, generator)
        runs.append(seen)
    assert_same_bits(*runs)


def wrap_anew(wraps, steps_each):
    """One module, optimizer and state, in one DDP after another; the gradients of each step."""
    module, state, generator, seen = build("mlp"), PowerSGDState(None, **EARLY), own_batches(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for wrapper, cap in wraps:
        ddp = wrapped(wrapper, module, hook=(state, powerSGD_hook), bucket_cap_mb=cap)
        seen += train_steps(ddp, steps_each, generator, optimizer)
        del ddp
        gc.collect()  # its hooks watch the parameters as long as it lives
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_law7_training_with_rebuilt_buckets_equals_training_without(wrapper):
    # A new DDP begins with one bucket, in the order of the model, and rebuilds it after the first backward.
    anew = [(wrapper, 25), (wrapper, SMALLEST), ("gradwire", SMALL), (wrapper, 25), ("pytorch", SMALLEST)]
    many = wrap_anew(anew, TOTAL // 5)
    assert relative_deviation(many, wrap_anew([(wrapper, SMALL)], TOTAL)) <= TOLERANCE * U[torch.float32]
    assert_same_on_all_ranks(from_all_ranks(many))


def assert_nothing_lost(draw, stages, hook, restarted):
    """All gradients given to the ranks have come out or are in the mean error; returns the errors after each stage.

    Args:
        draw: makes the gradients of a step.
        stages: for each, the wrapper, its bucket size, and the dtype of the gradients or None; they have 6 steps.
        hook: name of the hook.
        restarted: whether a new state loads a checkpoint after each stage.
    """
    module, state, errors = Probe(), PowerSGDState(None, **EARLY), []
    module.weights = torch.nn.ParameterList(torch.zeros_like(tensor) for tensor in draw())
    left, largest = [torch.zeros_like(tensor, dtype=torch.complex128) for tensor in draw()], torch.zeros(())
    for wrapper, cap, dtype in stages:
        module.to(dtype)
        ddp = wrapped(wrapper, module, hook=(state, getattr(ours, hook)), bucket_cap_mb=cap)
        for _ in range(6):
            tensors = [tensor if dtype is None else tensor.to(dtype) for tensor in draw()]
            ddp.zero_grad()
            ddp(*tensors).real.backward()
            for rest, tensor, weight in zip(left, tensors, module.weights, strict=True):
                rest += tensor.conj().cdouble() - weight.grad.cdouble()
                largest = torch.maximum(largest, rest.abs().max())
        saved = save_and_load(state.state_dict())
        errors.append(saved["errors"])
        if restarted:
            state = PowerSGDState(None, **EARLY)
            state.load_state_dict(saved)
        del ddp
        gc.collect()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for i, rest in enumerate(left):
        dist.all_reduce(rest)
        kept = errors[-1].get(f"weights.{i}", torch.zeros(()))
        kept = torch.view_as_complex(kept) if module.weights[i].is_complex() and kept.dim() else kept
        # M = G + E and E = M - out round once each in every one of 12 steps, and their mean twice, twice over if it is
        # saved; M is at most twice what is left. Measured: 0.02 of this.
        assert (rest / dist.get_world_size() - kept).abs().max() <= (2 * 12 + 4) * U[torch.float32] * 2 * largest
    return errors


@pytest.mark.parametrize("restarted", [False, True], ids=["same-state", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@on_ranks(2)
def test_model_cast_in_training_keeps_its_errors(dtype, restarted):
    generator, stages = own_batches(), [("gradwire", 25, torch.float32), ("gradwire", 25, dtype)]
    errors = assert_nothing_lost(lambda: [torch.randn(24, 20, generator=generator)], stages, "powerSGD_hook", restarted)
    dtypes = [memory["weights.0"].dtype for memory in errors]
    assert dtypes == [torch.float32, torch.float64 if dtype == torch.float64 else torch.float32]


@pytest.mark.parametrize("restarted", [False, True], ids=["same-state", "checkpoint"])
@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_law7_restart_loses_no_gradient_in_any_layout(wrapper, hook, restarted):
    generator = own_batches()

    def draw():
        return [
            torch.randn(24, 20, generator=generator).t(),
            torch.randn(6, 3, 3, 5, generator=generator).permute(0, 3, 1, 2),  # channels last
            torch.randn(12, 10, generator=generator, dtype=torch.complex64),
            torch.randn(7, generator=generator),
        ]

    stages = [(wrapper, SMALLEST, None), ("gradwire", 25, None)]
    errors = assert_nothing_lost(draw, stages, hook, restarted)
    assert len(errors[-1]) == (3 if hook == "powerSGD_hook" else 4)
