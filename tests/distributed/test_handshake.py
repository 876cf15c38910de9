"""The handshake: ranks that would run different things raise, each with the same words; the others pay for it once."""

import gc
import inspect
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import store_collectives
from gradwire.comm.connections import executor_for
from gradwire.compress import DelayedScaling
from gradwire.hooks import _handshake, default_hooks
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks.hook_state import HookState
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_on_all_ranks
from tests.support.training import HOOKS, SMALL, SMALLEST, WRAPPERS, build, register, train

TIMEOUT = timedelta(seconds=5)  # of the groups on which some rank waits in vain


def error_of(action, *arguments):
    try:
        action(*arguments)
    except RuntimeError as error:
        return str(error)
    return None


def scaled(**options):
    return lambda group: (ScaledCastState(group, **options), scaled_cast_hook)


def power_sgd(hook=powerSGD_hook, prepare=None, **options):
    def make(group):
        state = PowerSGDState(group, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})
        if prepare is not None:
            prepare(state)
        return state, hook

    return make


def stateless(hook):
    return lambda group: (group, hook)


def at_step_three(state):
    state.iter = 3


def loaded(factor):
    """A state with one factor, loaded from a checkpoint."""

    def prepare(state):
        q = {"layers.0.weight": torch.full((1, 1, 11), factor)}
        state.load_state_dict({"iter": 2, "errors": {}, "q": q, "p": {}, "numel": [0, 0]})

    return prepare


def pair(name, make, first, second):
    """Two hooks that differ in one option, and the words by which the error tells it."""
    return make(**{name: first}), make(**{name: second}), f"{name}: {first} on", f"; {second} on"


DIFFERENCES = {
    "dtype": pair("dtype", scaled, torch.float16, torch.bfloat16),
    "margin": pair("margin", scaled, 4, 8),
    "growth": pair("growth", scaled, 1, 2),
    "backoff": pair("backoff", scaled, 4, 3),
    "matrix_approximation_rank": pair("matrix_approximation_rank", power_sgd, 1, 2),
    "start_powerSGD_iter": pair("start_powerSGD_iter", power_sgd, 2, 3),
    "min_compression_rate": pair("min_compression_rate", power_sgd, 1, 2),
    "use_error_feedback": pair("use_error_feedback", power_sgd, True, False),
    "warm_start": pair("warm_start", power_sgd, True, False),
    "orthogonalization_epsilon": pair("orthogonalization_epsilon", power_sgd, 0, 1e-8),
    "random_seed": pair("random_seed", power_sgd, 0, 1),
    "batch_tensors_with_same_shape": pair("batch_tensors_with_same_shape", power_sgd, False, True),
    "ranks": pair("ranks", power_sgd, {}, {"*.0.weight": 2}),
    "stacks": pair("stacks", power_sgd, {}, {"*.0.weight": 23}),
    "factor_dtype": pair("factor_dtype", power_sgd, None, torch.bfloat16),
    "alternating": pair("alternating", power_sgd, False, True),
    "precision": pair("precision", power_sgd, "tf32", "fp32"),
    "steps": (power_sgd(), power_sgd(prepare=at_step_three), "iter: 0 on", "; 3 on"),
    "load": (power_sgd(), power_sgd(prepare=loaded(1.0)), "memory q: nothing on", "; 1, digest"),
    "factors": (power_sgd(prepare=loaded(1.0)), power_sgd(prepare=loaded(0.5)), "memory q: 1, digest", "; 1,"),
    "16 bit hooks": (
        stateless(default_hooks.fp16_compress_hook),
        stateless(default_hooks.bf16_compress_hook),
        "hook: fp16_compress_hook on",
        "; bf16_compress_hook on",
    ),
    "plain and 16 bit": (
        stateless(default_hooks.allreduce_hook),
        stateless(default_hooks.fp16_compress_hook),
        "hook: allreduce_hook on",
        "; fp16_compress_hook on",
    ),
    "with and without state": (
        scaled(),
        stateless(default_hooks.fp16_compress_hook),
        "hook: scaled_cast_hook on",
        "; fp16_compress_hook on",
    ),
    "batched": (
        power_sgd(),
        power_sgd(batched_powerSGD_hook),
        "hook: powerSGD_hook on",
        "; batched_powerSGD_hook on",
    ),
    "wrappers": (
        power_sgd(default_hooks.fp16_compress_wrapper(powerSGD_hook)),
        power_sgd(default_hooks.bf16_compress_wrapper(powerSGD_hook)),
        "gradients: torch.float16 on cpu on",
        "; torch.bfloat16 on cpu on",
    ),
    "one wrapped": (
        stateless(default_hooks.allreduce_hook),
        stateless(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "gradients: torch.float32 on cpu on",
        "; torch.bfloat16 on cpu on",
    ),
}


def last_rank_differs(difference, wrapper):
    """The error of the first backward, whether parameters are as before, the steps counted, and the bytes sent."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    group = dist.new_group()  # no exchange is possible on it any more, once one has failed
    ddp = WRAPPERS[wrapper](build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    state, hook = DIFFERENCES[difference][is_last](group)
    counted = getattr(state, "iter", 0)
    if isinstance(state, HookState):
        state.bind(ddp)
    register(ddp, (state, hook))
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    transport = executor_for(group, torch.device("cpu")).transport
    sent = transport.payload_bytes
    message = error_of(ddp(torch.ones(2, 11)).backward)
    unchanged = all(torch.equal(*each) for each in zip(before, ddp.parameters(), strict=True))
    return message, unchanged, getattr(state, "iter", 0) - counted, transport.payload_bytes - sent


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_with_different_settings_raise_on_every_rank(worlds, difference, wrapper):
    world = worlds(2)
    results = world.run(last_rank_differs, difference=difference, wrapper=wrapper)
    assert_both_sides(results, difference, first="rank 0", last="rank 1")


@pytest.mark.parametrize("difference", ["margin", "matrix_approximation_rank", "16 bit hooks"])
def test_differing_rank_of_three_is_named(worlds, difference):
    results = worlds(3).run(last_rank_differs, difference=difference, wrapper="gradwire")
    assert_both_sides(results, difference, first="ranks 0, 1", last="rank 2")


def assert_both_sides(results, difference, first, last):
    _, _, mine, other = DIFFERENCES[difference]
    for message, unchanged, steps, sent in results:
        assert message is not None
        assert mine in message
        assert other in message
        (line,) = [line for line in message.splitlines() if mine in line]
        assert f" on {first};" in line
        assert line.endswith(f" on {last}")
        assert (unchanged, steps, sent) == (True, 0, 0)
    assert len({message for message, *_ in results}) == 1


def test_settings_contain_every_option():
    # May differ between ranks.
    local = {"self", "process_group", "compression_stats_logging_frequency", "cuda_graphs"}
    options = {each.name for each in fields(DelayedScaling)} | set(inspect.signature(PowerSGDState.__init__).parameters)
    assert options - local <= set(DIFFERENCES)


def store_accesses(hook, wrapper):
    """How often the store was asked for in each step, and the parameters at the end."""
    steps = []
    ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        with mock.patch.object(store_collectives, "gradwire_store", wraps=store_collectives.gradwire_store) as asked:
            optimizer.zero_grad()
            ddp(*ddp.module.batch(generator)).backward()
            optimizer.step()
        steps.append(asked.call_count)
    return steps, ddp.module.state_dict()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", sorted(set(HOOKS) - {"fp16_of_pytorch"}))
def test_equal_settings_are_compared_once_and_never_again(world, hook, wrapper):
    results = world.run(store_accesses, hook=hook, wrapper=wrapper)
    for steps, _ in results:
        assert steps[0] <= 1  # none where a stateless hook ran on this group before
        assert steps[1:] == [0] * 4
    assert_same_on_all_ranks([state for _, state in results])


def changing_on_all_ranks():
    """Meetings in each of six steps; the state is loaded before the third, an option changed before the fifth."""
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp = WRAPPERS["gradwire"](build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, powerSGD_hook))
    meetings = []
    for step in range(6):
        if step == 2:
            state.load_state_dict(state.state_dict())
        if step == 4:
            state.ranks["*.0.weight"] = 3
        with mock.patch.object(_handshake, "store_all_gather", wraps=store_collectives.store_all_gather) as gather:
            ddp(*ddp.module.batch(torch.Generator())).backward()
        meetings.append(gather.call_count)
    return meetings


def test_load_or_changed_option_on_all_ranks_takes_one_handshake(world):
    assert world.run(changing_on_all_ranks) == [[1, 0, 1, 0, 1, 0]] * world.size


def load(state):
    options_and_memory = state.__getstate__()  # of this rank alone; a call of state_dict() is collective
    state.load_state_dict(options_and_memory["memory" if isinstance(state, PowerSGDState) else "state"])


def change_option(state):
    if isinstance(state, PowerSGDState):
        state.matrix_approximation_rank = 2
    else:
        state.scaling = DelayedScaling(margin=8)


def changing_on_one_rank(change, kind):
    """The error of the step after ``change`` on rank 1."""
    group = dist.new_group(timeout=TIMEOUT)
    state, hook = {"scaled": scaled(), "powersgd": power_sgd()}[kind](group)
    ddp = WRAPPERS["gradwire"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    register(ddp, (state, hook))
    for _ in range(3):
        ddp(*ddp.module.batch(torch.Generator())).backward()
    if dist.get_rank() == 1:
        change(state)
    loss = ddp(*ddp.module.batch(torch.Generator()))
    return error_of(loss.backward)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (load, "powersgd"),
        (change_option, "scaled"),
        pytest.param(load, "scaled", marks=pytest.mark.slow),
        pytest.param(change_option, "powersgd", marks=pytest.mark.slow),
    ],
)
def test_load_or_changed_option_on_one_rank_raises_on_all(worlds, change, kind):
    others, changed = worlds(2).run(changing_on_one_rank, change=change, kind=kind)
    for message in (others, changed):
        assert "was loaded, or an option was changed, on this rank but not on rank 0 within 0:00:02" in message


def hook_on_one_rank():
    group = dist.new_group(timeout=TIMEOUT)
    ddp = WRAPPERS["pytorch"](build("mlp"), process_group=group)
    if dist.get_rank() == 0:
        register(ddp, "fp16", group)
    return error_of(ddp(torch.ones(2, 11)).backward)


def test_rank_without_hook_is_named(worlds):
    with_hook, without = worlds(2).run(hook_on_one_rank)
    assert "This rank runs fp16_compress_hook, but no gradwire hook has started on rank 1" in with_hook
    assert without is not None


def unequal_buckets():
    ddp = WRAPPERS["pytorch"](
        build("mlp"), bucket_cap_mb=(SMALL, SMALLEST)[dist.get_rank()], find_unused_parameters=True
    )
    register(ddp, "bf16")
    default_hooks._SETTINGS["bf16_compress_hook"]._agreed.clear()  # other tests have used the hook on this group
    return error_of(ddp(torch.ones(2, 11)).backward)


def test_unequal_first_buckets_raise_on_every_rank(worlds):
    for message in worlds(2).run(unequal_buckets):
        assert "parameters of the bucket: 3 on rank 0; 1 on rank 1" in message
        assert "shape of its parameter 2: (3,) on rank 0; nothing on rank 1" in message


def two_models_with_one_hook_each():
    train("gradwire", "mlp", hook="scaled_fp16")
    models = [WRAPPERS["gradwire"](build(name)) for name in ("mlp", "transformer")]
    for ddp, hook in zip(models, ("powersgd", "scaled_bf16"), strict=True):
        register(ddp, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        for ddp in reversed(models):
            ddp(*ddp.module.batch(generator)).backward()
    return [parameter.grad for ddp in models for parameter in ddp.parameters()]


def test_several_states_on_one_group_agree_separately(world):
    assert_same_on_all_ranks(world.run(two_models_with_one_hook_each))


def agree(settings, group):
    """A handshake at a bucket of one parameter."""
    parameter = torch.zeros(1)
    bucket = SimpleNamespace(
        index=lambda: 0, is_last=lambda: True, parameters=lambda: [parameter], buffer=lambda: parameter
    )
    settings.agree(bucket, group)


def agreements_after_the_end():
    settings = HookSettings("a hook")
    group = dist.new_group()
    agree(settings, group)
    before = len(settings._agreed)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return before, len(settings._agreed)


def test_agreement_of_destroyed_group_is_forgotten(world):
    assert world.run(agreements_after_the_end) == [(1, 0)] * world.size


def differing_in_a_subgroup():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    settings = HookSettings(f"hook of rank {dist.get_rank()}")
    return error_of(agree, settings, group)


def test_ranks_of_subgroup_are_named_by_global_rank(worlds):
    for message in worlds(3).run(differing_in_a_subgroup)[1:]:
        assert "hook: hook of rank 1 on rank 1; hook of rank 2 on rank 2" in message


def late_rank():
    """What rank 0 says in the log before rank 1, which waits for it, comes."""
    group = dist.distributed_c10d._get_default_group()
    store = store_collectives.gradwire_store(group)
    if dist.get_rank() == 1:
        store.wait(["rank 0 has warned"])
        return store_collectives.store_all_gather(group, "A test", "late")
    said = []

    def warning(text, *values):
        said.append(text % values)
        store.set("rank 0 has warned", "")

    with (
        mock.patch.object(store_collectives, "WARN_AFTER", timedelta(milliseconds=1)),
        mock.patch.object(store_collectives.logger, "warning", warning),
    ):
        return store_collectives.store_all_gather(group, "A test", "in time"), said


def test_late_rank_is_awaited_and_named_in_log(worlds):
    (values, said), of_late = worlds(2).run(late_rank)
    assert values == of_late == ["in time", "late"]
    assert said == ["A test: still waiting for rank 1 after 0:00:00.001000."]
