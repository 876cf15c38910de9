"""`PowerSGDState`: options, statistics, memory, checkpoints, resuming, and other models."""

import gc
import inspect
import re
import warnings
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import LowRankBucket, Step
from gradwire.compress.policy import MatrixShape
from gradwire.compress.powersgd import alternating_all_reduce, powersgd_all_reduce
from gradwire.exchange import hook_state
from gradwire.exchange.hook_state import StepCount
from gradwire.hooks import powerSGD_hook as ours
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import EARLY, Training, U
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    build,
    gradients,
    logged,
    message_of,
    own_batches,
    register,
    train,
    train_steps,
    wrapped,
)

CUT, TOTAL = 6, 10
# In half ulps. A gradient is sums over at most 31 units and 12 samples in each of 4 layers and back, and PowerSGD adds
# three products over at most 31 terms: about 8 * 31 + 3 * 31 < 400 roundings. A step adds its own to those that the
# parameters, the error and the factors bring from the step before, and a column of P loses |M| |q| / |M q| < 10 more.
TOLERANCE = 400 * 10 * (TOTAL - CUT)


def own_memory(state):
    """The memory of this rank: errors that are not averaged, and factors."""
    return state.__getstate__()["memory"]


def trained(wrapper, model="mlp", *, state=None, steps=5, hook=powerSGD_hook, options=None, **ddp_options):
    """A state after some steps, on this rank's own batches."""
    module = build(model)
    state = PowerSGDState(None, **(EARLY | (options or {}))) if state is None else state
    train(wrapper, module, hook=(state, hook), steps=steps, **ddp_options)
    return state, module


VARIANTS = {
    "plain": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "no feedback": {"use_error_feedback": False},
    "cold": {"warm_start": False},
    "alternating": {"alternating": True},
    "bf16 factors": {"factor_dtype": torch.bfloat16},
}


def relative_deviation(steps, expected):
    """Of all gradients of a step together, the largest of the steps."""
    worst = 0.0
    for step, other in zip(steps, expected, strict=True):
        flat = [torch.cat([gradient.double().flatten() for gradient in tree_leaves(s)]) for s in (step, other)]
        worst = max(worst, ((flat[0] - flat[1]).norm() / flat[1].norm()).item())
    return worst


# --- options


def test_state_signature_begins_like_pytorchs():
    theirs = list(inspect.signature(pytorchs.PowerSGDState).parameters.values())
    mine = list(inspect.signature(PowerSGDState).parameters.values())
    first, further = mine[: len(theirs)], mine[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in first] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in further)


@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_hooks_have_pytorchs_signature(name):
    theirs, mine = (inspect.signature(getattr(module, name)) for module in (pytorchs, ours))
    assert list(theirs.parameters) == list(mine.parameters)
    assert theirs.return_annotation == mine.return_annotation


@pytest.mark.parametrize("start", [-1, 0, 1, 2])
@pytest.mark.parametrize("warm_start", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("feedback", [False, True], ids=["forgets", "remembers"])
def test_early_start_raises_like_pytorch(start, warm_start, feedback):
    messages = []
    for module in (pytorchs, ours):
        try:
            module.PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm_start)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) in (0, 2)
    assert (len(messages) == 2) == (start < 2 and (warm_start or feedback))
    if messages:
        common = "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
        assert all(message.startswith(common) for message in messages)
        assert messages[1].endswith(f"got {start}.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alternating": True, "warm_start": False}, "alternating needs warm_start"),
        (
            {"factor_wire": "int8", "factor_dtype": torch.bfloat16},
            r"factor_wire is 'int8' and factor_dtype is torch\.bfloat16.*factor_dtype=None",
        ),
    ],
)
def test_options_that_exclude_each_other_raise(options, message):
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **options)


def test_assigned_option_applies_to_policy_and_settings():
    state = PowerSGDState(None, ranks={"a": 1})
    before = state._compared_options()
    state.matrix_approximation_rank = 5
    state.ranks["b"] = 3
    assert state.options.policy.rank == state.options.matrix_approximation_rank == 5
    assert state.options.policy.ranks == {"a": 1, "b": 3}
    assert state._compared_options() == before | {"matrix_approximation_rank": 5, "ranks": {"a": 1, "b": 3}}


@pytest.mark.parametrize(("name", "value"), [("matrix_approximation_rank", 0), ("warm_start", 1), ("ranks", {"a": -1})])
def test_assigned_option_out_of_range_raises_and_changes_nothing(name, value):
    state = PowerSGDState(None)
    before = state._compared_options()
    with pytest.raises(ValueError, match=name):
        setattr(state, name, value)
    assert state._compared_options() == before


# --- statistics


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "frozen"])
@on_ranks(1, 2)
def test_statistics_after_every_step_equal_pytorchs(model, rank):
    options = {"start_powerSGD_iter": 2, "min_compression_rate": (1, 1.25)[dist.get_world_size() - 1]}
    seen = []
    for module, wrapper in ((pytorchs, "pytorch"), (ours, "pytorch"), (ours, "gradwire")):
        state = module.PowerSGDState(None, rank, **options)
        ddp = wrapped(wrapper, model, hook=(state, module.powerSGD_hook), bucket_cap_mb=25)  # one bucket
        generator = own_batches()
        seen.append([(train_steps(ddp, 1, generator), state.compression_stats(), state.iter)[1:] for _ in range(5)])
    theirs, *ours_seen = seen
    assert ours_seen == [theirs] * 2
    assert [iteration for _, iteration in theirs] == [1, 2, 3, 4, 5]
    assert theirs[-1][0][0] >= 1


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [3, 4, 5, 6, 7, 8]), (2, [3, 5, 7]), (100, [3]), (0, [3, 4, 5, 6, 7, 8])]
)
@on_ranks(1)
def test_statistics_are_logged_at_given_frequency(frequency, expected):
    with logged(ours.__name__) as records:
        trained("gradwire", options={"compression_stats_logging_frequency": frequency}, steps=8, bucket_cap_mb=SMALL)
    text = "\n".join(record.getMessage() for record in records)
    assert [int(step) for step in re.findall(r"^Compression after (\d+) steps: rate", text, re.MULTILINE)] == expected


# --- memory


@pytest.mark.parametrize(
    ("hook", "model"),
    [
        *(("powerSGD_hook", name) for name in ("mlp", "transformer", "conv", "complex", "mixed", "brain", "half")),
        ("powerSGD_hook", "frozen"),
        ("batched_powerSGD_hook", "mlp"),
    ],
)
@pytest.mark.parametrize("feedback", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(1)
def test_error_memory_has_size_of_compressed_gradients_in_fp32(wrapper, hook, model, feedback):
    # In fp64 for fp64 gradients. The batched hook compresses all gradients.
    state = PowerSGDState(None, use_error_feedback=feedback, **EARLY)
    ddp, held = wrapped(wrapper, model, hook=(state, getattr(ours, hook))), []
    for _ in range(5):
        train_steps(ddp)
        held.append(state.error_memory_bytes)
    compressed, everything = 0, 0
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad:
            real = parameter.numel() * (2 if parameter.is_complex() else 1)
            nbytes = real * (8 if parameter.dtype == torch.float64 else 4)
            everything += nbytes
            compressed += nbytes if state.options.policy.matrix_shape(name, parameter) is not None else 0
    assert 0 < compressed < everything
    expected = feedback * (compressed if hook == "powerSGD_hook" else everything)
    assert held == [0, 0] + [expected] * 3
    storages = [error.untyped_storage() for error in own_memory(state)["errors"].values()]
    assert sum({each._cdata: each.nbytes() for each in storages}.values()) == expected, "what the tensors hold in fact"


class Allocations(TorchDispatchMode):
    """Notes the bytes of every storage that an operation makes, and keeps it, so that no other takes its place."""

    def __init__(self):
        super().__init__()
        self.nbytes = []
        self._kept = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._kept:
                    self._kept[storage._cdata] = storage
                    self.nbytes.append(storage.nbytes())
        return result


@pytest.mark.parametrize("kind", ["warm", "cold", "alternating"])
@pytest.mark.parametrize("feedback", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_allocates_no_tensor_of_gradient_size(dtype, feedback, kind):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator).to(dtype) for shape in ((1024, 1024), (2048, 512), (1000,))]
    shapes = [MatrixShape(1, 1024, 1024, 4), MatrixShape(2, 1024, 512, 4), None]
    alternating = kind == "alternating"
    bucket = LowRankBucket(sources, shapes, error_feedback=feedback, alternating=alternating)
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    with Allocations() as allocations:
        for i in range(4):
            if i == 2:
                allocations.nbytes = []
            if alternating:
                steps = alternating_all_reduce(Step.of(bucket, sources, sources, i, transport, workspace))
            else:
                step = Step.of(bucket, sources, sources, i, transport, workspace)
                steps = powersgd_all_reduce(step, warm_start=kind == "warm")
            run_algorithm(steps, transport)
    # All P of the bucket together, in fp64, are 3 * 4 * 1024 * 8 bytes: 1/21 of a matrix in 16 bit.
    assert allocations.nbytes, "the factors' small tensors are seen"
    assert max(allocations.nbytes) <= sources[0].nbytes / 20


# --- nothing to compress


class Adapters(nn.Module):
    """Low-rank adapters of a frozen matrix."""

    def __init__(self, rank=4, width=640):
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return (self.frozen(x) + self.lora_b(self.lora_a(x))).square().mean()


def warned(model, inputs, hook=powerSGD_hook, wrapper="gradwire", steps=5, **options):
    """After which steps there was a warning, and its message."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **options)
    ddp = WRAPPERS[wrapper](model)
    state.bind(model)
    register(ddp, (state, hook))
    found = []
    for i in range(steps):
        ddp.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(inputs).backward()
        found += [(i + 1, str(each.message)) for each in caught if "PowerSGD" in str(each.message)]
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"matrix_approximation_rank": 4},
            "4 x 640 elements; its factors of rank 4 have 2,576, a rate of 0.99. "
            "Lower matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 2, "min_compression_rate": 2},
            "4 x 640 elements; its factors of rank 2 have 1,288, a rate of 1.99. min_compression_rate=2 asks for a "
            "higher one: lower it, or matrix_approximation_rank: rank 1 has 3.98.",
        ),
        (
            {"matrix_approximation_rank": 1, "min_compression_rate": 5},
            "4 x 640 elements; its factors of rank 1 have 644, a rate of 3.98. min_compression_rate=5 asks for a "
            "higher one: lower it.",
        ),
        ({"ranks": {"*": 0}}, "ranks exempts every matrix."),
    ],
    ids=["rank", "rate or rank", "rate", "exempt"],
)
def test_powersgd_that_compresses_no_adapter_warns_once_with_reason(world_of_one, wrapper, options, reason):
    ((when, message),) = warned(Adapters(), torch.ones(2, 640), wrapper=wrapper, **options)
    assert when == 3, "the first compressed step"
    assert message.startswith("PowerSGD compresses nothing here: it sends all 5,120 elements. ")
    assert reason in message
    if "rank 4" in reason:
        assert "The largest matrix, lora_" in message


# --- which ranks call


def after_five_steps(wrapper="gradwire", kind="powersgd"):
    training = Training(kind, wrapper)
    training.run(5)
    return training


def soon(limit="STATE_DICT_TIMEOUT"):
    """Lets a call wait half a second for the other ranks."""
    return mock.patch.object(hook_state, limit, timedelta(seconds=0.5))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("callers", [[0], [1], [0, 2]], ids=str)
@on_ranks(3)
def test_save_on_some_ranks_only_raises_and_names_the_others(callers, wrapper):
    training, message = after_five_steps(wrapper), None
    if dist.get_rank() in callers:
        with soon():
            message = message_of(training.state.state_dict)
    dist.barrier()
    others = re.escape(str([rank for rank in range(3) if rank not in callers]))
    if dist.get_rank() in callers:
        assert re.match(
            rf"PowerSGDState\.state_dict\(\) is a collective call: ranks {others} have not .*on every rank\..*"
            r"call state\.prepare_checkpoint\(\) on every rank, then state\.state_dict\(\) where you save",
            str(message),
        )


def save_after_calls_of(callers):
    """The state and the gradients after calls that one rank made alone, one after another."""
    training = after_five_steps()
    with soon():
        for caller in callers:
            if dist.get_rank() == caller:
                assert "have not made it" in message_of(training.state.state_dict)
            dist.barrier()
    saved = training.state.state_dict()
    training.run(2)
    return saved, gradients(training.ddp)


@pytest.mark.parametrize("callers", [[0], [0, 0], [0, 1], [1, 0, 0]], ids=str)
@on_ranks(2)
def test_save_and_training_continue_after_calls_on_some_ranks_only(callers):
    after = save_after_calls_of(callers)
    assert_same_on_all_ranks(from_all_ranks(after))
    assert_same_bits(after, save_after_calls_of([]))


@pytest.mark.parametrize("saved_after", [0, 1, 3])
@on_ranks(2)
def test_checkpoint_before_the_first_compressed_step_changes_no_later_bit(saved_after):
    """It makes the random factors of that step."""
    results = []
    for saves in (False, True):
        state, generator = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4), own_batches()
        ddp = wrapped(hook=(state, powerSGD_hook))
        train_steps(ddp, saved_after, generator)
        if saves:
            state.state_dict()
        results.append(train_steps(ddp, 7 - saved_after, generator))
    assert_same_bits(*results)


def save_a_prepared_copy(kind, wrapper, saver):
    """The state and the gradients of all ranks, some steps after one rank has saved a prepared copy alone."""
    training = after_five_steps(wrapper, kind)
    expected, copies = training.state.state_dict(), []
    training.state.prepare_checkpoint()
    if dist.get_rank() == saver:
        with mock.patch.object(hook_state, "named_barrier", side_effect=AssertionError("a call to the other ranks")):
            copies += training.state.state_dict(), training.state.state_dict()
    training.run(2)
    for each in copies:  # training on has not changed them
        assert_same_bits(each, expected)
    return training.state.state_dict(), gradients(training.ddp)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["powersgd", "int4"])
@pytest.mark.parametrize("saver", [0, 1])
@on_ranks(2)
def test_one_rank_saves_alone_after_prepare_checkpoint(saver, kind, wrapper):
    assert_same_bits(save_a_prepared_copy(kind, wrapper, saver), save_a_prepared_copy(kind, wrapper, None))


@on_ranks(2)
def test_prepare_on_one_rank_raises_and_works_once_all_join():
    state = after_five_steps().state
    with soon("PREPARE_TIMEOUT"):
        message = message_of(state.prepare_checkpoint) if dist.get_rank() == 0 else None
        dist.barrier()
    state.prepare_checkpoint()
    (message, _), _ = results = from_all_ranks((message, state.state_dict()))
    assert re.match(r"PowerSGDState\.prepare_checkpoint\(\) is a coll.*ranks \[1\] have not made it", message)
    assert_same_on_all_ranks([saved for _, saved in results])


# --- other models


@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
@on_ranks(1)
def test_binding_second_model_raises(wrapper):
    first, second = (model if wrapper is None else WRAPPERS[wrapper](model) for model in (build("mlp"), build("conv")))
    state = PowerSGDState(None)
    state.bind(first)
    message = message_of(state.bind, second)
    assert re.match("This state belongs to another model, a Mlp; .* Create a new state for this ConvNet", message)
    state.bind(first)  # the first stays


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
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()
    return uninterrupted[cut:]


def resume(path, cut, total, wrapper, options, **case):
    checkpoint = torch.load(path)
    state = PowerSGDState(None, **(EARLY | options))
    seen, _ = run(state, wrapper, range(cut, total), checkpoint=checkpoint, **case)
    return seen


@pytest.fixture(scope="module")
def saved_run(worlds, tmp_path_factory):
    """Makes a checkpoint on two ranks, once for each of its arguments; returns its path and the uninterrupted run."""
    made = {}

    def make(wrapper, cap, dtype, **options):
        key = (wrapper, cap, dtype, *options.items())
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
            case = {"path": path, "cut": CUT, "total": TOTAL, "wrapper": wrapper, "bucket_cap_mb": cap, "dtype": dtype}
            made[key] = path, worlds(2).run(run_and_save, options=options, **case)[0]
        return made[key]

    return make


# World size, dtype, DDP and bucket size before and after, steps before the load, options. Without bf16 factors: the sum
# of shares that are rounded to bf16 depends on their number.
BUCKETS = {"a bucket each": SMALLEST, "default": None}
HERE = ("gradwire", SMALLEST)
RESUMPTIONS = {
    **{f"{dtype} on {size}": (size, dtype, HERE, HERE, 0, {}) for size in (1, 2, 3) for dtype in U},
    **{
        f"{name} on {size}": (size, torch.float64, HERE, HERE, 0, options)
        for size in (1, 2, 3)
        for name, options in VARIANTS.items()
        if name not in ("plain", "bf16 factors")
    },
    **{
        f"from {before} to {after}": (2, torch.float32, before, after, 0, {})
        for before in product(WRAPPERS, BUCKETS.values())
        for after in product(WRAPPERS, BUCKETS.values())
    },
    **{
        f"after {steps} steps on {wrapper}": (2, torch.float64, HERE, (wrapper, SMALLEST), steps, {})
        for steps in (1, 5)  # before and after the first compressed one
        for wrapper in WRAPPERS
    },
}


@pytest.mark.parametrize("case", RESUMPTIONS)
def test_law7_resumed_run_equals_uninterrupted_run_up_to_rounding(worlds, saved_run, case):
    size, dtype, before, (wrapper, cap), steps, options = RESUMPTIONS[case]
    path, uninterrupted = saved_run(*before, dtype, **options)
    arguments = {"path": path, "cut": CUT, "total": TOTAL, "dtype": dtype, "options": options}
    others = range(100, 100 + steps)
    results = worlds(size).run(resume, wrapper=wrapper, bucket_cap_mb=cap, other_steps=others, **arguments)
    assert_same_on_all_ranks(results)
    # Measured: 0.02 of the tolerance.
    assert relative_deviation(results[0], uninterrupted) <= TOLERANCE * U[dtype]


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


def test_step_may_start_after_the_place_where_the_last_one_ended():
    steps, begun = StepCount(), []
    for positions in ((0, 1, 2), (0,), (1,), (2,), (1, 2)):  # the other buckets are skipped
        for position in positions:
            begun.append(steps.begins(position))
            steps.is_open = True
        steps.end()
    assert begun == [True, False, False, True, True, True, True, False]
