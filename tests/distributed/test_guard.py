"""`HookState.guard`: gradients are sent in full while training diverges, at the same steps on every rank."""

import logging
import math
from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks._guard import MIN_HISTORY, Guard
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.telemetry import sum_of_squares
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.states import FEEDBACK, START, Training
from tests.support.training import (
    HOOKS,
    SMALL,
    WRAPPERS,
    error_of,
    failing_hook,
    gradients,
    own_batches,
    register,
    train,
    train_steps,
    wrapped,
)

GUARDED = [*(hook for hook in FEEDBACK if hook in HOOKS), "scaled_fp16", "fp16_of_powersgd"]


class Regression(nn.Module):
    """A linear layer that learns another one. Plain momentum converges at this learning rate from any weights."""

    LEARNING_RATE = 0.5

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 32, bias=False)
        self.wanted = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    def forward(self, x):
        return 0.5 * (self.layer(x) - x @ self.wanted.T).square().sum(1).mean()

    @staticmethod
    def batch(generator):
        return (torch.randn(256, 64, generator=generator) * torch.linspace(0.3, 1, 64),)


def losses_of(hook, steps, wrapper="gradwire", **guard):
    """The loss of every step of a `Regression`, the steps in which the guard sent in full, and the final weights."""
    torch.manual_seed(0)
    ddp = wrapped(wrapper, Regression())
    state = register(ddp, hook)
    if guard:
        state.guard(**guard)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=Regression.LEARNING_RATE, momentum=0.9)
    generator, losses, in_full = own_batches(), [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(*ddp.module.batch(generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if guard and state.sends_in_full:
            in_full.append(step)
    return losses, in_full, ddp.module.layer.weight.detach().clone()


@pytest.mark.parametrize("wrapper", [pytest.param("pytorch", marks=pytest.mark.slow), "gradwire"])
@on_ranks(2)
def test_training_that_diverges_under_sign_but_not_plainly_converges_with_the_guard(wrapper):
    sign = lambda: (QuantizationState(None, "sign"), quantization_hook)  # noqa: E731
    plain, _, _ = losses_of("allreduce", 400)
    unguarded, _, _ = losses_of(sign(), 400)
    guarded, in_full, weights = losses_of(sign(), 400, wrapper, every=2)
    assert plain[-1] < 1e-3 * plain[0]
    assert not unguarded[-1] < 1e6 * unguarded[0]
    assert guarded[-1] < 0.1 * guarded[0]
    assert 100 <= len(in_full) < 396  # it tries to compress again
    assert_same_on_all_ranks(from_all_ranks((in_full, weights)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", GUARDED)
@on_ranks(2, 3)
def test_guard_that_does_not_trip_changes_no_bit(hook, wrapper):
    state, function = HOOKS[hook](None)
    state.guard(every=1, growth=1e9, ratio=1e9)
    guarded = train(wrapper, "odd", hook=(state, function), steps=7, bucket_cap_mb=SMALL)
    assert_same_bits(guarded, train(wrapper, "odd", hook=hook, steps=7, bucket_cap_mb=SMALL))
    assert len(state._guard._norms) == 6  # the last check is not judged yet


def tripped(kind, wrapper="gradwire", plain_steps=3):
    """A `Training` whose guard trips: in a checked step, the error memory of the last rank is infinite."""
    training = Training(kind, wrapper)
    training.state.guard(every=1, plain_steps=plain_steps)
    training.run(START + 2)
    if dist.get_rank() == dist.get_world_size() - 1:
        error = next(error for error in training.state.residuals() if error.numel())
        error.view(-1)[0] = math.inf
    training.run(1)
    return training


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", FEEDBACK)
@on_ranks(2, 3)
def test_error_memory_that_is_infinite_on_one_rank_heals_on_all(kind, wrapper):
    training = tripped(kind, wrapper)
    state, seen = training.state, []
    for _ in range(8):
        training.run(1)
        squares = float(sum_of_squares(state.residuals(), torch.device("cpu")))
        seen.append((state.sends_in_full, squares > 0, math.isfinite(squares)))
        assert_same_on_all_ranks(from_all_ranks(gradients(training.ddp)))
        assert all(gradient.isfinite().all() for gradient in gradients(training.ddp).values())
    in_full = [each for each, _, _ in seen]
    n = in_full.index(False)
    assert 3 <= n <= 3 + MIN_HISTORY
    assert in_full == [True] * n + [False] * (8 - n)
    assert all(is_finite for *_, is_finite in seen)
    assert not any(has_errors for _, has_errors, _ in seen[:n])
    assert_same_on_all_ranks(from_all_ranks(in_full))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["int4", "powersgd", "auto"])
@on_ranks(2)
def test_steps_in_full_are_bitwise_the_plain_all_reduce(kind, wrapper):
    training = tripped(kind, wrapper)
    plain = wrapped(wrapper)
    plain.module.load_state_dict(training.module.state_dict())
    batch = plain.module.batch(own_batches())
    for ddp in (plain, training.ddp):
        ddp.zero_grad()
        ddp(*batch).backward()
    assert training.state.sends_in_full
    assert_same_bits(gradients(training.ddp), gradients(plain))


@on_ranks(2)
def test_change_is_logged_once_on_the_first_rank():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("gradwire.hooks.quantization_hooks")
    logger.addHandler(handler)
    try:
        tripped("int4").run(8)
    finally:
        logger.removeHandler(handler)
    changes = [text for level, text in records if level == "WARNING"]
    if dist.get_rank() > 0:
        assert changes == []
        return
    off, on = changes
    assert off.startswith("quantization_hook: Step 5: the error memory is not finite. Gradients are sent in full for")
    assert on.endswith("Gradients are compressed again.")


@on_ranks(2)
def test_gradient_that_is_not_finite_once_does_not_trip_the_guard():
    training = Training("int4")
    training.state.guard(every=1)
    for is_poisoned in (False, False, False, True, False, False):
        parameter = next(training.module.parameters())
        handle = parameter.register_hook(lambda gradient: gradient * math.nan) if is_poisoned else None
        training.run(1)
        if handle is not None:
            handle.remove()
        assert not training.state.sends_in_full
    assert len(training.state._guard._norms) == 4


@on_ranks(2)
def test_guard_that_differs_raises_on_every_rank():
    training = Training("int4")
    training.run(START + 1)
    training.state.guard(every=1 + dist.get_rank())
    kind, text = error_of(training.run, 1)
    assert kind == "RuntimeError"
    assert "guard(): (1, 10.0, 100.0, 100) on rank 0; (2, 10.0, 100.0, 100) on rank 1" in text


@on_ranks(2)
def test_guard_starts_anew_on_every_rank_after_an_error():
    training = tripped("int4", plain_steps=100)
    with failing_hook(training.ddp, 1 if dist.get_rank() == 0 else -1):
        assert error_of(training.run, 1) is not None
    training.ddp.resynchronize()
    train_steps(training.ddp, 3)
    assert from_all_ranks(training.state.sends_in_full) == [False, False]
    assert_same_on_all_ranks(from_all_ranks(gradients(training.ddp)))


@on_ranks(2)
def test_ranks_that_have_seen_different_checks_decide_alike_after_a_handshake():
    training = tripped("int4", plain_steps=100)
    if dist.get_rank() == 0:
        training.state._guard.restart()  # as on a rank that was a step behind when an error came
    training.state.revoke_agreements()
    training.run(2)
    assert from_all_ranks(training.state.sends_in_full) == [False, False]
    assert_same_on_all_ranks(from_all_ranks(gradients(training.ddp)))


@on_ranks(2)
def test_guard_that_is_stopped_compresses_again():
    training = tripped("int4", plain_steps=100)
    training.state.stop_guarding()
    training.run(1)
    assert not training.state.sends_in_full
    assert any(error.any() for error in training.state.residuals())


@on_ranks(2)
def test_trip_clears_errors_that_a_node_is_to_hand_over():
    training = Training("int4_on_nodes")
    training.run(START + 2)
    state, name = training.state, "layers.0.weight"
    state.take_back(name, torch.ones_like(training.module.layers[0].weight))
    assert state.tensors("errors")[name].any()
    state.forget_errors()
    assert not any(error.any() for error in state.tensors("errors").values())


# --- decisions


class FakeState:
    """The part of a state that a guard uses."""

    process_group, hook_name, first_compressed_step = None, "a hook", 0
    forgotten = 0

    def forget_errors(self):
        self.forgotten += 1


def decisions(checks, every=1, **options):
    """After each check, given as (norm of the gradient, norm of the errors), whether the guard is tripped."""
    state = FakeState()
    guard = Guard(state, **({"every": every, "growth": 10, "ratio": 100, "plain_steps": 3} | options))
    guard._tell = lambda _: None
    seen = []
    for iteration, (norm, errors) in enumerate(checks, 1):
        guard._judge(iteration, norm**2, errors**2)
        seen.append(guard.is_tripped)
    return seen


CALM = [(1.0, 0.1)] * 6


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([(11.0, 0.1)], [True]),
        ([(9.0, 0.1)], [False]),
        ([(1.0, 101.0)], [True]),
        ([(1.0, 99.0)], [False]),
        ([(0.0, 1e9)], [False]),  # a batch without a loss
        ([(1.0, math.inf)], [True]),
        ([(1.0, math.nan)], [True]),
        ([(math.nan, 0.1)], [False]),
        ([(math.nan, 0.1), (math.inf, 0.1)], [False, True]),
        ([(math.nan, 0.1), (1.0, 0.1), (math.nan, 0.1)], [False, False, False]),
        ([(11.0, 0.1), *CALM[:4]], [True, True, True, False, False]),
        ([(11.0, 0.1), *[(6.0, 0.1)] * 4], [True] * 5),  # not calm enough
    ],
    ids=str,
)
def test_guard_trips_and_returns(checks, expected):
    assert decisions([*CALM, *checks])[len(CALM) :] == expected


def test_first_checks_are_no_reference():
    assert decisions([(0.0, 0.0)] * 8 + [(1.0, 0.1), (1e9, 0.1), (1e9, 0.1)]) == [False] * 11
    assert decisions([(1.0, 0.1)] * (MIN_HISTORY - 1) + [(1e9, 0.1)]) == [False] * MIN_HISTORY


def test_norm_that_grows_slowly_trips_the_guard():
    growing = [(1.15**k, 0.1) for k in range(100)]
    assert any(decisions(growing))
    assert not any(decisions([(1.05**k, 0.1) for k in range(100)]))


def test_compression_that_fails_again_soon_stays_off_for_longer():
    trip = [(11.0, 0.1)]
    seen = decisions([*CALM, *trip, *CALM[:3], *trip, *CALM, *trip * 1, *CALM, *CALM])
    lengths = [len(list(group)) for is_tripped, group in groupby(seen) if is_tripped]
    assert lengths == [3, 6, 12]
    patient = decisions([*CALM, *trip, *CALM, *CALM, *CALM, *trip, *CALM])
    assert [len(list(group)) for is_tripped, group in groupby(patient) if is_tripped] == [3, 3]


def test_guard_waits_for_the_first_compressed_step(monkeypatch):
    monkeypatch.setattr(FakeState, "first_compressed_step", 100)
    assert not any(decisions([*CALM, (1e9, 1e9), (math.nan, 0.1), (math.nan, 0.1)]))


# --- with telemetry, and options


@on_ranks(2)
def test_telemetry_measures_steps_under_the_guard():
    training = Training("int4")
    training.state.observe(every=1, exact_every=1)
    training.state.guard(every=1)
    training.run(START + 2)
    metrics, n_checks = training.state.metrics(), len(training.state._guard._norms)
    training.state.stop_observing()
    training.run(1)
    assert metrics["step"] == START + 2
    assert 0 < metrics["relative_error"] < 1
    assert metrics["residual_ratio"] > 0
    assert n_checks == START + 1  # the last one is not judged yet


@pytest.mark.parametrize(
    "option", [{"every": 0}, {"growth": 1.5}, {"growth": math.inf}, {"ratio": 0.5}, {"plain_steps": 0}]
)
def test_option_out_of_range_raises_with_its_name(option):
    ((name, value),) = option.items()
    state = QuantizationState()
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        state.guard(**option)
    assert not state.sends_in_full
