"""States whose options, step count or plan the user changes between two steps, on all ranks or on one."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks.default_hooks import CastState, bf16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits
from tests.support.features import FEATURES, Parts
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import Ledger
from tests.support.training import SMALLEST, WRAPPERS, build, error_of, own_batches, sent_bytes, train_steps, wrapped
from tests.support.zoo import Probe


def int4(**options):
    return QuantizationState(**options), quantization_hook


def power_sgd():
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook


def with_options(**options):
    return lambda state: setattr(state, "options", replace(state.options, **options))


def with_entry(mapping, name, value):
    """Changes a dictionary in place."""

    def change(state):
        owner = state if hasattr(state, mapping) else state.options
        getattr(owner, mapping)[name] = value

    return change


# How to make state and hook, and a change.
CHANGES = {
    "wire": (int4, with_options(wire="int8", block_size=32)),
    "wires in place": (int4, with_entry("wires", "*.2.weight", "int8")),
    "feedback": (int4, with_options(use_error_feedback=False)),
    "rank": (power_sgd, lambda state: setattr(state, "matrix_approximation_rank", 2)),
    "ranks in place": (power_sgd, with_entry("ranks", "*.2.weight", 2)),
    "accumulate": (lambda: (CastState(), bf16_compress_hook), lambda state: setattr(state, "accumulate", "fp32")),
    "scaling": (
        lambda: (ScaledCastState(), scaled_cast_hook),
        lambda state: setattr(state, "options", replace(state.options, margin=9, dtype=torch.bfloat16)),
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2)
def test_changed_option_applies_from_the_next_step_on(name, wrapper):
    make, change = CHANGES[name]

    def bytes_of_last_step(ddp, steps):
        train_steps(ddp, steps - 1)
        before = sent_bytes()
        train_steps(ddp)
        return sent_bytes() - before

    hooks = [make() for _ in range(2)]
    changed, from_the_start = (wrapped(wrapper, hook=hook, bucket_cap_mb=SMALLEST) for hook in hooks)
    before = bytes_of_last_step(changed, 4)
    for state, _ in hooks:
        change(state)
    after = bytes_of_last_step(changed, 2)
    assert after == bytes_of_last_step(from_the_start, 4)
    if name not in ("feedback", "scaling", "accumulate"):
        assert after != before
    first, second = from_all_ranks((before, after))
    assert first == second


def load(state):
    memory = state.__getstate__()  # of this rank alone; a call of state_dict() is collective
    state.load_state_dict(memory["memory" if isinstance(state, PowerSGDState) else "state"])


ON_ONE_RANK = CHANGES | {
    **{f"iter of {make.__name__}": (make, lambda state: setattr(state, "iter", 0)) for make in (int4, power_sgd)},
    "load of powersgd": (power_sgd, load),
    "load of scaled": (CHANGES["scaling"][0], load),
}
QUICK = ("wire", "load of scaled")


@pytest.mark.parametrize(  # a rank waits for half the timeout
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ON_ONE_RANK]
)
@on_ranks(2, limit=90)
def test_state_changed_on_one_rank_raises_on_every_rank(name):
    make, change = ON_ONE_RANK[name]
    group, (state, hook) = dist.new_group(timeout=timedelta(seconds=10)), make()
    state.process_group = group
    ddp = wrapped(hook=(state, hook), group=group)
    train_steps(ddp, 4)
    if dist.get_rank() == 1:
        change(state)
    errors = [error_of(train_steps, ddp) for _ in range(2)]
    for error in errors:
        assert error is not None and error[0] == "RuntimeError", errors
    assert "was loaded, or an option was changed, on this rank but not on rank 0" in errors[0][1]


@pytest.mark.parametrize(
    "options", [{"wire": "int8", "block_size": 32, "use_error_feedback": True}, {"block_size": 128}], ids=str
)
@on_ranks(2)
def test_law1_holds_over_a_change_of_options(options):
    state, hook = int4(start_iter=0)
    ddp, local, generator = wrapped(hook=(state, hook)), build("mlp"), own_batches()
    ledger = Ledger(local)
    for step in range(6):
        if step == 3:
            state.options = replace(state.options, **options)
        ledger.step(ddp, local, local.batch(generator))
    assert ledger.close(state) == []


# Steps whose first or last bucket is skipped.
SKIPPED = {
    "int4": lambda: int4(exempt=()),
    "powersgd": power_sgd,
    "scaled": lambda: (ScaledCastState(), scaled_cast_hook),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("layers", [(1, 2, 3, 4), (0, 1, 2, 3), (1, 2, 3)], ids=["last", "first", "both"])
@pytest.mark.parametrize("hook", SKIPPED)
@on_ranks(2)
def test_steps_with_skipped_buckets_are_counted_and_compressed(hook, layers, wrapper):
    torch.manual_seed(0)
    state, function = SKIPPED[hook]()
    ddp = wrapped(wrapper, Parts(), hook=(state, function), bucket_cap_mb=SMALLEST, **FEATURES["skip-unused"])
    state.observe(every=1)
    generator = own_batches()
    for step in range(8):
        ddp.zero_grad()
        before = sent_bytes()
        x = torch.randn(3, 4, generator=generator)
        if step == 3:
            x[0, 0] = torch.inf
        ddp(x, layers).backward()
    state.stop_observing()
    # On PyTorch's DDP the last step is counted when the next one begins.
    is_late = wrapper == "pytorch" and 0 not in layers
    assert getattr(state, "iter", None) in (None, 8 - is_late)
    assert getattr(state, "skipped_steps", None) in (None, 1)
    assert sent_bytes() - before != 4 * 20 * len(layers)


@pytest.mark.parametrize("make", [int4, power_sgd])
@on_ranks(1)
def test_checkpoint_with_errors_beyond_fp32_is_refused(make):
    state, hook = make()
    ddp = wrapped(hook=(state, hook))  # which the state holds weakly
    train_steps(ddp, 4)
    saved = state.state_dict()
    before, (name, error) = dict(saved["errors"]), next(iter(saved["errors"].items()))
    damaged = saved | {"errors": before | {name: error.double().fill_(1e300)}}
    known = error_of(state.load_state_dict, damaged)
    assert_same_bits(state.state_dict()["errors"], before)
    later, hook = make()  # which learns the names at its first step
    unknown = error_of(later.load_state_dict, damaged) or error_of(train_steps, wrapped("pytorch", hook=(later, hook)))
    for kind, message in (known, unknown):
        assert kind == "ValueError"
        assert "1e+300" in message


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["int2", "powersgd"])
@on_ranks(1)
def test_law1_memory_follows_a_change_of_the_memory_format(wrapper, hook):
    # Large: the kernels then read the gradient and the errors in memory order.
    module = Probe((96, 1024, 3, 3))
    gradient = torch.randn(module.weights[0].shape, generator=torch.Generator().manual_seed(0))
    if hook == "int2":
        state, function = QuantizationState(wire="int2", start_iter=0), quantization_hook
    else:
        state, function = PowerSGDState(None, 1, 2, min_compression_rate=0.1), powerSGD_hook
    applied = torch.zeros_like(gradient)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        module.to(memory_format=memory_format)
        gradient = gradient.contiguous(memory_format=memory_format)
        ddp = WRAPPERS[wrapper](module)
        ddp.register_comm_hook(state, function)
        for _ in range(4):
            ddp.zero_grad()
            ddp(gradient).backward()
            applied += module.weights[0].grad
    kept = applied + state.memory.tensors("errors")["weights.0"]
    torch.testing.assert_close(kept, 8 * gradient, rtol=0, atol=2e-5)


@pytest.mark.parametrize("columns", [40, 41], ids=["equal-shapes", "other-shapes"])
@on_ranks(2)
def test_state_that_a_users_hook_passes_on_for_two_models_raises(columns):
    state = QuantizationState(start_iter=0)
    modules = [Probe((64, 40)), Probe((64, columns))]
    models = [WRAPPERS["gradwire"](module) for module in modules]
    for ddp in models:
        ddp.register_comm_hook(None, lambda _, bucket: quantization_hook(state, bucket))
    first, second = (ddp(torch.ones_like(module.weights[0])) for ddp, module in zip(models, modules, strict=True))
    first.backward()
    kind, text = error_of(second.backward)
    assert kind == "ValueError"
    assert "Two models have a parameter 'weights.0'" in text
