"""States whose options, step count or plan the user changes between two steps, on all ranks or on one."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.hooks import default_hooks
from gradwire.hooks._checkpoint import MAX_COUNT
from gradwire.hooks.auto_hook import AutoState, auto_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits
from tests.support.features import Parts
from tests.support.training import (
    SMALL,
    SMALLEST,
    WRAPPERS,
    build,
    error_of,
    gradients,
    plainly_named,
    register,
    sent_bytes,
)


def power_sgd(**options):
    return PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1} | options), powerSGD_hook


def int8(state):
    state.options = replace(state.options, wire="int8", block_size=32)


def wires_in_place(state):
    state.options.wires["*.2.weight"] = "int8"


def without_feedback(state):
    state.options = replace(state.options, use_error_feedback=False)


def rank_two(state):
    state.matrix_approximation_rank = 2


def ranks_in_place(state):
    state.options.ranks["*.2.weight"] = 2


def sum_in_fp32(state):
    state.accumulate = "fp32"


def wider_margin(state):
    state.scaling = replace(state.scaling, margin=9, dtype=torch.bfloat16)


def plan_int8(state):
    state.plan = {"layers.2.weight": "int8"}


def plan_in_place(state):
    state.plan["layers.2.weight"] = "bf16"


# How to make state and hook, a change, and how to make the state that has it from the start.
CHANGES = {
    "wire": (lambda: (QuantizationState(), quantization_hook), int8),
    "wires in place": (lambda: (QuantizationState(), quantization_hook), wires_in_place),
    "feedback": (lambda: (QuantizationState(), quantization_hook), without_feedback),
    "rank": (power_sgd, rank_two),
    "ranks in place": (power_sgd, ranks_in_place),
    "accumulate": (lambda: (default_hooks.CastState(), default_hooks.bf16_compress_hook), sum_in_fp32),
    "scaling": (lambda: (ScaledCastState(), scaled_cast_hook), wider_margin),
    "plan": (lambda: (AutoState(plan={"layers.2.weight": "int4"}), auto_hook), plan_int8),
    "plan in place": (lambda: (AutoState(plan={"layers.2.weight": "int4"}), auto_hook), plan_in_place),
}


def train(ddp, generator, steps):
    seen = []
    for _ in range(steps):
        ddp.zero_grad()
        before = sent_bytes()
        ddp(*ddp.module.batch(generator)).backward()
        seen.append((sent_bytes() - before, gradients(ddp)))
    return seen


def bytes_before_and_after(name, wrapper):
    """Bytes of a step before and after the change, and of a step of a state that had it from the start."""
    make, change = CHANGES[name]
    results = []
    for is_first in (False, True):
        state, hook = make()
        ddp = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALLEST)
        register(ddp, (state, hook))
        generator = torch.Generator().manual_seed(dist.get_rank())
        if is_first:
            change(state)
        results.append(train(ddp, generator, 4)[-1][0])
        if not is_first:
            change(state)
            results.append(train(ddp, generator, 2)[-1][0])
    return results


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_option_applies_from_the_next_step_on(worlds, name, wrapper):
    results = worlds(2).run(bytes_before_and_after, name=name, wrapper=wrapper)
    assert results[0] == results[1]
    before, after, from_the_start = results[0]
    assert after == from_the_start
    if name not in ("feedback", "scaling", "accumulate"):
        assert after != before


def change_on_one_rank(name):
    """The errors of the step after a change on rank 1 and of the next one."""
    make, change = ON_ONE_RANK[name]
    group = dist.new_group(timeout=timedelta(seconds=10))
    state, hook = make()
    state.process_group = group
    ddp = gradwire.DistributedDataParallel(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    register(ddp, (state, hook))
    batch = ddp.module.batch(torch.Generator())
    for _ in range(4):
        ddp(*batch).backward()
    if dist.get_rank() == 1:
        change(state)
    return [error_of(lambda: ddp(*batch).backward()) for _ in range(2)]


def forget_steps(state):
    state.iter = 0


ON_ONE_RANK = CHANGES | {
    "iter of int4": (CHANGES["wire"][0], forget_steps),
    "iter of powersgd": (power_sgd, forget_steps),
    "iter of auto": (CHANGES["plan"][0], forget_steps),
}


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_state_changed_on_one_rank_raises_on_every_rank(worlds, name):
    for errors in worlds(2).run(change_on_one_rank, name=name, limit=90):
        for error in errors:
            assert error is not None and error[0] == "RuntimeError", errors
        assert "was loaded, or an option was changed, on this rank but not on rank 0" in errors[0][1]


def keep_errors(use):
    """What is lost of the gradients in steps around a change of an option; summed over the ranks, in fp64."""
    state = QuantizationState(start_iter=0)
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, quantization_hook))
    generator = torch.Generator().manual_seed(dist.get_rank())
    applied, sent = {}, {}
    for step in range(6):
        if step == 3:
            use(state)
        ddp.zero_grad()
        local = build("mlp")
        batch = ddp.module.batch(generator)
        local(*batch).backward()
        ddp(*batch).backward()
        for name, parameter in ddp.module.named_parameters():
            applied[name] = applied.get(name, 0) + parameter.grad.double()
            sent[name] = sent.get(name, 0) + dict(local.named_parameters())[name].grad.double() / dist.get_world_size()
    errors = state.state_dict()["errors"]
    for name in sent:
        dist.all_reduce(sent[name])
    return {name: (applied[name] + errors[name].double() - sent[name]).abs().max().item() for name in errors}


def block_of_128(state):
    state.options = replace(state.options, block_size=128)


@pytest.mark.parametrize("use", [int8, block_of_128])
def test_law1_holds_over_a_change_of_options(worlds, use):
    for lost in worlds(2).run(keep_errors, use=use):
        assert max(lost.values()) < 1e-5


# Steps whose first or last bucket is skipped.

SKIP = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
HOOKS = {
    "int4": lambda: (QuantizationState(exempt=()), quantization_hook),
    "powersgd": power_sgd,
    "auto": lambda: (AutoState(candidates=("plain", "int8"), repeats=1, min_gain=1), auto_hook),
    "scaled": lambda: (ScaledCastState(), scaled_cast_hook),
}


def train_some_layers(wrapper, hook, layers):
    """Steps counted, bytes of the last step, skipped steps, telemetry's steps, and whether a choice was made."""
    torch.manual_seed(0)
    state, function = HOOKS[hook]()
    ddp = WRAPPERS[wrapper](Parts(), bucket_cap_mb=SMALLEST, **SKIP)
    ddp.register_comm_hook(state, plainly_named(function) if wrapper == "pytorch" else function)
    state.observe(every=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(8):
        ddp.zero_grad()
        before = sent_bytes()
        x = torch.randn(3, 4, generator=generator)
        if step == 3:
            x[0, 0] = torch.inf
        ddp(x, layers).backward()
        sent = sent_bytes() - before
    state.stop_observing()
    return getattr(state, "iter", None), sent, getattr(state, "skipped_steps", None), bool(getattr(state, "plan", True))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("layers", [(1, 2, 3, 4), (0, 1, 2, 3), (1, 2, 3)], ids=["last", "first", "both"])
@pytest.mark.parametrize("hook", HOOKS)
def test_steps_with_skipped_buckets_are_counted_and_compressed(worlds, hook, layers, wrapper):
    for steps, sent, skipped, has_chosen in worlds(2).run(train_some_layers, wrapper=wrapper, hook=hook, layers=layers):
        # On PyTorch's DDP the last step is counted when the next one begins.
        is_late = wrapper == "pytorch" and 0 not in layers
        assert steps in (None, 8 - is_late)
        assert skipped in (None, 1)
        assert has_chosen
        plain = 4 * 20 * len(layers)
        assert sent != plain or hook == "auto"


# Numbers near the ends of their ranges.


def test_step_count_near_its_limit_is_accepted_by_its_own_checkpoint(worlds):
    for accepted in worlds(1).run(count_near_the_limit):
        assert accepted == [True, True]


def count_near_the_limit():
    accepted = []
    for make in (lambda: (QuantizationState(), quantization_hook), power_sgd):
        state, hook = make()
        ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
        register(ddp, (state, hook))
        state.load_state_dict(state.state_dict() | {"iter": MAX_COUNT - 1})
        for _ in range(4):
            ddp(*ddp.module.batch(torch.Generator())).backward()
        saved = state.state_dict()
        state.load_state_dict(saved)
        accepted.append(saved["iter"] == MAX_COUNT)
    return accepted


def load_errors(change, hook):
    """The error of loading a changed checkpoint with names and, before them, at the first compressed step."""
    make = {"int4": CHANGES["wire"][0], "powersgd": power_sgd}[hook]
    state, function = make()
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    register(ddp, (state, function))
    batch = ddp.module.batch(torch.Generator())
    for _ in range(4):
        ddp(*batch).backward()
    saved = state.state_dict()
    errors = dict(saved["errors"])
    if change == "other names":
        errors = {name if i < 2 else f"other.{name}": error for i, (name, error) in enumerate(errors.items())}
    else:
        name = next(iter(errors))
        errors[name] = errors[name].double().fill_(1e300)
    before = {name: error.clone() for name, error in state.state_dict()["errors"].items()}
    known = error_of(state.load_state_dict, saved | {"errors": errors})
    assert_same_bits(state.state_dict()["errors"], before)
    later, _ = make()
    loaded = error_of(later.load_state_dict, saved | {"errors": errors})
    if loaded is None:
        other = WRAPPERS["pytorch"](build("mlp"), bucket_cap_mb=SMALL)
        other.register_comm_hook(later, plainly_named(function))
        loaded = error_of(lambda: [other(*batch).backward() for _ in range(3)])
    return known, loaded


@pytest.mark.parametrize("hook", ["int4", "powersgd"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("other names", "entries of the error memory belong to parameters that this model does not have"),
        ("too large", "1e+300"),
    ],
)
def test_checkpoint_with_dead_or_infinite_errors_is_refused(worlds, change, text, hook):
    ((known, later),) = worlds(1).run(load_errors, change=change, hook=hook)
    for error in (known, later):
        assert error[0] == "ValueError"
        assert text in error[1]
