"""The handshake: ranks that would run different things raise, each with the same words; the others pay for it once."""

import inspect
from dataclasses import fields
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import store_collectives
from gradwire.comm.connections import executor_for
from gradwire.compress import DelayedScaling
from gradwire.exchange import handshake
from gradwire.exchange.hook_state import HookState
from gradwire.exchange.settings import settings_of
from gradwire.hooks import default_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    SMALLEST,
    WRAPPERS,
    build,
    message_of,
    own_batches,
    register,
    train_steps,
    wrapped,
)

TIMEOUT = timedelta(seconds=5)  # of the groups on which some rank waits in vain


def scaled(**options):
    return lambda group: (ScaledCastState(group, **options), scaled_cast_hook)


def quantized(**options):
    return lambda group: (QuantizationState(group, **options), quantization_hook)


def register_name(hook):
    return HOOKS[hook](None)[1].__name__


def power_sgd(hook=powerSGD_hook, prepare=None, **options):
    def make(group):
        state = PowerSGDState(group, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})
        if prepare is not None:
            prepare(state)
        return state, hook

    return make


def stateless(hook):
    return lambda group: (group, hook)


plain, fp16, bf16 = default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook


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


def cast(**options):
    return lambda group: (default_hooks.CastState(group, **options), fp16)


DIFFERENCES = {
    "accumulate": pair("accumulate", cast, "wire", "fp32"),
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
    "factor_wire": pair("factor_wire", power_sgd, None, "int8"),
    "alternating": pair("alternating", power_sgd, False, True),
    "precision": pair("precision", power_sgd, "tf32", "fp32"),
    "wire": pair("wire", quantized, "int4", "int8"),
    "block_size": pair("block_size", quantized, 64, 128),
    "start_iter": pair("start_iter", quantized, 2, 1),
    "steps": (power_sgd(), power_sgd(prepare=at_step_three), "iter: 0 on", "; 3 on"),
    "load": (power_sgd(), power_sgd(prepare=loaded(1.0)), "memory q: nothing on", "; 1, digest"),
    "factors": (power_sgd(prepare=loaded(1.0)), power_sgd(prepare=loaded(0.5)), "memory q: 1, digest", "; 1,"),
    "16 bit hooks": (stateless(fp16), stateless(bf16), "hook: fp16_compress_hook on", "; bf16_compress_hook on"),
    "plain and 16 bit": (stateless(plain), stateless(fp16), "hook: allreduce_hook on", "; fp16_compress_hook on"),
    "with and without state": (scaled(), stateless(fp16), "hook: scaled_cast_hook on", "; fp16_compress_hook on"),
    "batched": (power_sgd(), power_sgd(batched_powerSGD_hook), "hook: powerSGD_hook on", "; batched_powerSGD_hook on"),
    "wrappers": (
        power_sgd(default_hooks.fp16_compress_wrapper(powerSGD_hook)),
        power_sgd(default_hooks.bf16_compress_wrapper(powerSGD_hook)),
        "gradients: torch.float16 on cpu on",
        "; torch.bfloat16 on cpu on",
    ),
    "one wrapped": (
        stateless(plain),
        stateless(default_hooks.bf16_compress_wrapper(plain)),
        "gradients: torch.float32 on cpu on",
        "; torch.bfloat16 on cpu on",
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("difference", DIFFERENCES)
@on_ranks(2, 3)
def test_different_settings_raise_on_every_rank_and_change_nothing(difference, wrapper):
    # The last rank differs. The first backward raises with the settings of both sides, before anything is sent.
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()  # no exchange is possible on it any more, once one has failed
    ddp = wrapped(wrapper, group=group)
    *hooks, words, other_words = DIFFERENCES[difference]
    state, hook = hooks[rank == size - 1](group)
    counted = getattr(state, "iter", 0)
    if isinstance(state, HookState):
        state.bind(ddp)
    register(ddp, (state, hook))
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    transport = executor_for(group, torch.device("cpu")).transport
    sent = transport.payload_bytes
    message = message_of(ddp(torch.ones(2, 11)).backward)
    assert other_words in message
    (line,) = [line for line in message.splitlines() if words in line]
    assert f" on {'rank 0' if size == 2 else 'ranks 0, 1'};" in line
    assert line.endswith(f" on rank {size - 1}")
    assert_same_bits([parameter.detach() for parameter in ddp.parameters()], before)
    assert (getattr(state, "iter", 0), transport.payload_bytes) == (counted, sent)
    assert_same_on_all_ranks(from_all_ranks(message))


def test_settings_contain_every_option():
    # May differ between ranks.
    local = {"self", "process_group", "compression_stats_logging_frequency"}
    options = {each.name for each in fields(DelayedScaling)} | set(inspect.signature(PowerSGDState.__init__).parameters)
    assert options - local <= set(DIFFERENCES)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", sorted(set(HOOKS) - {"fp16_of_pytorch"}))
@on_ranks(2, 3)
def test_equal_settings_are_compared_once_and_never_again(hook, wrapper):
    ddp, generator = wrapped(wrapper, hook=hook), own_batches()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(5):
        with mock.patch.object(store_collectives, "gradwire_store", wraps=store_collectives.gradwire_store) as asked:
            train_steps(ddp, 1, generator, optimizer)
        assert asked.call_count <= (step == 0)  # none where a stateless hook ran on this group before
    assert_same_on_all_ranks(from_all_ranks(ddp.module.state_dict()))


@on_ranks(2, 3)
def test_load_or_changed_option_on_all_ranks_takes_one_handshake():
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp = wrapped(hook=(state, powerSGD_hook))
    meetings = []
    for step in range(6):
        if step == 2:
            state.load_state_dict(state.state_dict())
        if step == 4:
            state.ranks["*.0.weight"] = 3
        wrapped_function = store_collectives.differences_between_ranks
        with mock.patch.object(handshake, "differences_between_ranks", wraps=wrapped_function) as compare:
            train_steps(ddp)
        meetings.append(compare.call_count)
    assert meetings == [1, 0, 1, 0, 1, 0]


@on_ranks(2)
def test_rank_without_hook_is_named():
    group = dist.new_group(timeout=TIMEOUT)
    ddp = WRAPPERS["pytorch"](build("mlp"), process_group=group)
    if dist.get_rank() == 0:
        register(ddp, "fp16", group)
    with (
        mock.patch.object(store_collectives, "WARN_AFTER", timedelta(seconds=1)),
        mock.patch.object(store_collectives.logger, "warning") as warn,
    ):
        with_hook, without = from_all_ranks(message_of(ddp(torch.ones(2, 11)).backward))
    assert "This rank runs fp16_compress_hook, but no gradwire hook has started on rank 1" in with_hook
    assert without is not None
    if dist.get_rank() == 0:
        text = warn.call_args.args[0] % warn.call_args.args[1:]
        assert "still waiting for rank 1" in text and "as after `if rank == 0:`" in text


@pytest.mark.parametrize("hook", ["fp16", "int4"])
@pytest.mark.parametrize("with_hook", [0, 1])
@on_ranks(2, 3, limit=20)
def test_rank_without_hook_tells_the_others_at_once(hook, with_hook):
    # The groups' timeout is much longer than the limit of the test.
    ddp = wrapped(group=dist.new_group())
    if dist.get_rank() == with_hook:
        register(ddp, hook, ddp.process_group)
    message = message_of(ddp(torch.ones(2, 11)).backward)
    assert f"Rank {with_hook} has registered {register_name(hook)} for this model, and this rank has no" in message
    assert "Register the same hook on every rank" in message


@on_ranks(2)
def test_unequal_first_buckets_raise_on_every_rank():
    ddp = WRAPPERS["pytorch"](
        build("mlp"), bucket_cap_mb=(SMALL, SMALLEST)[dist.get_rank()], find_unused_parameters=True
    )
    register(ddp, "bf16")
    settings_of("bf16_compress_hook").handshake._agreed.clear()  # other tests have used the hook on this group
    message = message_of(ddp(torch.ones(2, 11)).backward)
    assert "parameters of the bucket: 3 on rank 0; 1 on rank 1" in message
    assert "shape of its parameter 2: (3,) on rank 0; nothing on rank 1" in message
