"""`HookState.follow_scaler`: the error memory keeps the scale of the gradients."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import shared_facts
from gradwire.exchange.hook_state import HookState
from gradwire.hooks import quantization_hooks
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks, differences
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import Ledger, errors_of
from tests.support.training import (
    HOOKS,
    WRAPPERS,
    Scaler,
    build,
    error_of,
    gradients,
    own_batches,
    register,
    train_steps,
    wrapped,
)

WITH_ERRORS = ["powersgd", "powersgd_int8", "powersgd_alternating", "fp16_of_powersgd", "int4", "int4_on_nodes", "topk"]
CONSTANT = [1024.0] * 9
CHANGING = [1024.0] * 4 + [2048.0] * 2 + [512.0] * 3


def unscaled_gradients(hook, scales, *, wrapper="gradwire", follows=True, resumes_at=None):
    """The gradients divided by the scale, of a step at each of these scales, which change between two steps.

    Before step ``resumes_at``, once its scale is set, a new state loads the checkpoint of the old one. ``hook`` is a
    name, or a function that makes a pair of state and hook.
    """
    ddp, scaler, generator, seen = wrapped(wrapper), Scaler(), own_batches(), []
    state = register(ddp, hook() if callable(hook) else hook)
    for step, scale in enumerate(scales):
        scaler.scale = scale
        if step == resumes_at:
            saved = state.state_dict()
            ddp = wrapped(wrapper)
            state = register(ddp, hook() if callable(hook) else hook)
        if follows and step in (0, resumes_at):
            state.follow_scaler(scaler)
        if step == resumes_at:
            state.load_state_dict(saved)
        ddp.zero_grad()
        (ddp(*ddp.module.batch(generator)) * scale).backward()
        seen.append({name: gradient / scale for name, gradient in gradients(ddp).items()})
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", WITH_ERRORS)
@on_ranks(2)
def test_changes_of_the_scale_change_no_bits_of_the_unscaled_gradients(hook, wrapper):
    expected = unscaled_gradients(hook, CONSTANT, wrapper=wrapper)
    seen = unscaled_gradients(hook, CHANGING, wrapper=wrapper)
    assert_same_bits(seen, expected)
    assert_same_on_all_ranks(from_all_ranks(seen))
    assert differences(unscaled_gradients(hook, CHANGING, wrapper=wrapper, follows=False), expected)


@pytest.mark.parametrize("step", [6, 7], ids=["changed since the last step", "unchanged"])
@pytest.mark.parametrize("hook", WITH_ERRORS)
@on_ranks(2)
def test_checkpoint_has_the_scale_of_the_scaler(hook, step):
    assert_same_bits(
        unscaled_gradients(hook, CHANGING, resumes_at=step), unscaled_gradients(hook, CONSTANT, resumes_at=step)
    )


def saved_errors(state, factor=1.0):
    """The error memory in a checkpoint, times a power of two."""
    return {name: error * factor for name, error in errors_of(state.state_dict()).items()}


def trained_at(scale, hook):
    """A DDP, its state with errors, and the scaler that the state follows."""
    ddp, scaler = wrapped(), Scaler(scale)
    state = register(ddp, hook)
    state.follow_scaler(scaler)
    train_steps(ddp, 4)
    assert any(error.any() for error in saved_errors(state).values())
    return ddp, state, scaler


@pytest.mark.parametrize("hook", WITH_ERRORS)
@on_ranks(2)
def test_loaded_errors_are_in_the_scale_of_the_load_not_of_earlier_steps(hook):
    ddp, state, scaler = trained_at(65536.0, hook)
    saved, errors = state.state_dict(), saved_errors(state)
    scaler.scale = 1024.0  # of the checkpoint, which the user has loaded into the scaler
    state.load_state_dict(saved)
    assert_same_bits(saved_errors(state), errors)
    scaler.scale = 4096.0
    assert_same_bits(saved_errors(state), {name: 4 * error for name, error in errors.items()})
    if hook == "fp16_of_powersgd":  # the wrapper rounds first
        return
    ledger, batch = Ledger(ddp.module), ddp.module.batch(own_batches())
    for name, error in errors.items():
        ledger.lost[name] += 4 * error
    own = torch.autograd.grad(ddp.module(*batch), list(ddp.module.parameters()))
    ddp.zero_grad()
    ddp(*batch).backward()
    ledger.add(dict(zip(ledger.lost, own, strict=True)), gradients(ddp))
    assert ledger.close(state) == []


@pytest.mark.parametrize("hook", WITH_ERRORS)
@on_ranks(2)
def test_errors_of_earlier_buckets_are_rescaled(hook):
    # After a resynchronization there are no buckets, and the next step makes them anew.
    ddp, state, scaler = trained_at(1024.0, hook)
    expected = saved_errors(state, 0.25)
    ddp.resynchronize()
    scaler.scale = 256.0
    assert_same_bits(saved_errors(state), expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_errors_of_a_frozen_layer_are_rescaled_while_the_bucket_of_the_others_lives(wrapper):
    def trained(scales):
        module, scaler, generator, seen = build("mlp"), Scaler(), own_batches(), []
        state, hook = HOOKS["int4"](None)
        for number, scale in enumerate(scales):
            scaler.scale = scale
            if number == 0:
                state.follow_scaler(scaler)
            if number in (0, 4, 6):  # the layer is frozen, then trained again
                module.layers[0].requires_grad_(number != 4)
                ddp = WRAPPERS[wrapper](module, bucket_cap_mb=100)
                register(ddp, (state, hook))
            scaled_step(ddp, scaler, generator)
            seen.append({name: g / scale for name, g in gradients(ddp).items() if g is not None})
        return seen

    # The scale changes one step after the layer was frozen.
    seen, expected = trained([1024.0] * 5 + [256.0] * 3), trained([1024.0] * 8)
    assert_same_bits(seen, expected)


@on_ranks(2)
def test_errors_keep_their_scale_when_another_scaler_is_followed():
    ddp, scaler = wrapped(), Scaler(1024.0)
    state = register(ddp, "int4")
    state.follow_scaler(scaler)
    for _ in range(4):
        ddp(*ddp.module.batch(own_batches())).backward()
    before = [error.clone() for error in state.memory.residuals()]
    scaler.scale = 1.0
    for other in (scaler, None, Scaler(1024.0)):
        state.follow_scaler(other)
        state.memory.match_scale()
        assert_same_bits(state.memory.residuals(), before)


def scaled_step(ddp, scaler, generator):
    ddp.zero_grad()
    (ddp(*ddp.module.batch(generator)) * scaler.scale).backward()


def following(hook, wrapper="gradwire", scale=1024.0):
    """A DDP on a group of its own, a state that follows a scaler, the scaler, and a function that makes a step."""
    ddp, scaler, generator = wrapped(wrapper, group=(group := dist.new_group())), Scaler(scale), own_batches()
    state = register(ddp, hook, group)
    state.follow_scaler(scaler)
    return ddp, state, scaler, lambda: scaled_step(ddp, scaler, generator)


def assert_scales_differ(error, *lines):
    """Every rank has raised the scales of all ranks, one of which may come first."""
    for kind, text in from_all_ranks(error):
        assert kind == "RuntimeError"
        assert "The loss scales differ between ranks:\n  scale: " in text
        assert all(line in text for line in lines)
        assert "Load the state of the gradient scaler on every rank" in text


def on_others(rank):
    others = [str(each) for each in range(dist.get_world_size()) if each != rank]
    return f"rank{'s' * (len(others) > 1)} {', '.join(others)}"


@pytest.mark.parametrize("steps", [0, 4], ids=["from the start", "later"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["int4", "powersgd", "fp16_of_powersgd"])
@on_ranks(2, 3, limit=60)
def test_scales_that_differ_raise_on_every_rank_and_change_no_errors(hook, wrapper, steps):
    ddp, state, scaler, step = following(hook, wrapper)
    for _ in range(steps):
        step()
    before, last = [error.clone() for error in state.memory.residuals()], dist.get_world_size() - 1
    assert steps == 0 or any(error.any() for error in before)
    if dist.get_rank() == last:
        scaler.scale = 4096.0
    assert_scales_differ(error_of(step), f"1024.0 on {on_others(last)}", f"4096.0 on rank {last}")
    assert_same_bits(state.memory.residuals(), before)
    if wrapper == "pytorch":
        return
    scaler.scale = 2048.0
    ddp.resynchronize()
    for _ in range(2):
        step()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("steps", [0, 4], ids=["from the start", "later"])
@on_ranks(2, 3, limit=60)
def test_scaler_that_one_rank_does_not_follow_raises_on_every_rank(steps, wrapper):
    _, state, _, step = following("int4", wrapper)
    if steps == 0 and dist.get_rank() == 0:
        state.follow_scaler(None)
    for _ in range(steps):
        step()
    if steps > 0 and dist.get_rank() == 0:
        state.follow_scaler(None)
    none = "none, because state.follow_scaler(scaler) was not called, on rank 0"
    assert_scales_differ(error_of(step), none, f"1024.0 on {on_others(0)}")


@on_ranks(2, 3, limit=60)
def test_scale_that_grows_after_a_rank_has_joined_raises_on_every_rank():
    ddp, state, scaler, step = following("int4")

    def train_on():
        with ddp.join():
            for _ in range(4 if dist.get_rank() == 0 else 8):
                step()
                if dist.get_rank() > 0 and state.iter == 6:
                    scaler.scale *= 2

    assert_scales_differ(error_of(train_on), "1024.0 on rank 0", f"2048.0 on {on_others(0)}")


@on_ranks(2, 3, limit=60)
def test_checkpoint_of_scales_that_differ_raises_on_every_rank():
    _, state, scaler, step = following("int4")
    for _ in range(4):
        step()
    if dist.get_rank() == 0:
        scaler.scale = 512.0
    assert_scales_differ(error_of(state.state_dict), "512.0 on rank 0", f"1024.0 on {on_others(0)}")


@on_ranks(2)
def test_scales_are_compared_only_in_the_step_after_a_change():
    _, _, scaler, step = following("int4")
    with mock.patch.object(
        shared_facts, "differences_between_ranks", side_effect=shared_facts.differences_between_ranks
    ) as compare:
        for scale, n_compared in ((1024.0, 1), (1024.0, 1), (2048.0, 2), (2048.0, 2), (2048.0, 2), (1024.0, 3)):
            scaler.scale = scale
            step()
            assert compare.call_count == n_compared


@on_ranks(1)
def test_object_without_a_scale_is_refused():
    kind, message = error_of(quantization_hooks.QuantizationState().follow_scaler, 1024.0)
    assert kind == "TypeError"
    assert message == "scaler is 1024.0; expected a torch.amp.GradScaler, or None."


def test_the_tests_have_every_hook_with_error_memory():
    states = [state for make in HOOKS.values() if isinstance(state := make(None)[0], HookState)]
    kept = {type(state) for state in states if "errors" in state.memory.declared}
    assert kept == {type(HOOKS[name](None)[0]) for name in WITH_ERRORS}
