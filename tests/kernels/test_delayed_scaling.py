"""The rule that moves the scale of a bucket: its kernel, its reference, and the formula."""

import math

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.kernels.delayed_scaling import BLIND_EXPONENT, MAX_EXPONENT, bound_update_scale, update_scale_reference
from tests.kernels.support.cases import INTERPRETED, PROPERTY
from tests.kernels.support.exact import Guarded, assert_same_bits

INF, NAN = float("inf"), float("nan")
OPTIONS = {"top": 14, "margin": 4, "growth": 1, "backoff": 2, "inverse_world": 0.5}


def update_scale(exponent, *rest, **options):
    bound_update_scale(exponent.device)(exponent, *rest, **options)


def clamp(exponent):
    return max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent))


def following(exponent, calibrated, absmax, *, top, margin, growth, backoff, inverse_world):
    """`update_scale` in Python's integers: the next exponent and flag, and the scales."""
    if absmax == 0:
        exponent = max(exponent, min(exponent + growth, BLIND_EXPONENT))
    elif math.isfinite(absmax):
        e = math.frexp(absmax)[1] - 1
        target = top - 1 - margin - e
        chosen = min(target, exponent + growth) if calibrated else target
        if e + exponent >= top - 1:
            chosen = min(chosen, exponent) - backoff
        exponent, calibrated = chosen, 1
    exponent = clamp(exponent)
    send = np.float32(2.0**exponent * float(np.float32(inverse_world)))
    return exponent, calibrated, float(send), 2.0**-exponent


class State:
    """The tensors of one bucket, each inside guards and, but for the counters, off 16-byte alignment."""

    def __init__(self, exponent, calibrated, absmax, counters, device):
        self.exponent = Guarded(torch.tensor([exponent, calibrated], dtype=torch.int32), offset=2, device=device)
        self.scales = Guarded.poisoned(2, torch.float32, offset=2, device=device)
        self.absmax = Guarded(torch.tensor([absmax]), offset=1, device=device)
        self.counters = Guarded(torch.tensor(counters), device=device)

    @property
    def guarded(self):
        return [self.exponent, self.scales, self.absmax, self.counters]

    def tensors(self):
        return [guarded.window for guarded in self.guarded]


absmaxima = st.one_of(
    st.sampled_from((0.0, 2.0**-149, 2.0**-126, 1.0, 65504.0, float(torch.finfo(torch.float32).max), INF, NAN)),
    st.floats(0, width=32, allow_nan=False),
    st.integers(-149, 127).map(lambda e: 2.0**e),
)
exponents = st.integers(-MAX_EXPONENT, MAX_EXPONENT)
options = st.fixed_dictionaries(
    {
        "top": st.integers(4, 127),
        "margin": st.integers(0, 12),
        "growth": st.one_of(st.just(1), st.integers(1, 2 * MAX_EXPONENT)),
        "backoff": st.integers(0, 12),
        "inverse_world": st.integers(1, 4096).map(lambda world: 1 / world),
    }
)


@settings(PROPERTY, max_examples=100 if INTERPRETED else 300)
@given(
    exponent=exponents,
    calibrated=st.integers(0, 1),
    absmax=absmaxima,
    options=options,
    counters=st.tuples(*[st.integers(0, 2**40)] * 3, st.integers(0, 1)),
    is_last=st.booleans(),
)
def test_update_scale_matches_reference_and_formula(device, exponent, calibrated, absmax, options, counters, is_last):
    state, reference = (State(exponent, calibrated, absmax, counters, device) for _ in range(2))
    update_scale(*state.tensors(), **options, is_last=is_last)
    update_scale_reference(*reference.tensors(), **options, is_last=is_last)
    for guarded, expected, what in zip(
        state.guarded, reference.guarded, ("exponent", "scales", "absmax", "counters"), strict=True
    ):
        guarded.assert_guards_untouched(what)
        assert_same_bits(guarded.window, expected.window, what)

    wanted = following(exponent, calibrated, absmax, **options)
    assert (*state.exponent.window.tolist(), *state.scales.window.tolist()) == wanted
    assert state.absmax.window.item() == 0
    skip = counters[3] | (not math.isfinite(absmax))
    expected = [*counters[:2], counters[2] + skip, 0] if is_last else [*counters[:3], skip]
    assert state.counters.window.tolist() == expected


@settings(PROPERTY, max_examples=10 if INTERPRETED else 40)
@given(
    start=exponents,
    calibrated=st.integers(0, 1),
    absmax=st.floats(2.0**-100, 2.0**100, width=32),
    options=options.filter(lambda o: o["margin"] >= 1),
)
@example(start=100, calibrated=1, absmax=1.5, options=OPTIONS)
@example(start=-100, calibrated=1, absmax=1.5, options={**OPTIONS, "growth": 16})
def test_exponent_for_constant_gradient_reaches_target_and_stays(device, start, calibrated, absmax, options):
    target = clamp(options["top"] - 1 - options["margin"] - (math.frexp(absmax)[1] - 1))
    state = State(start, calibrated, 0.0, [0, 0, 0, 0], device)
    needed = 3 + (2 * MAX_EXPONENT + options["backoff"]) // options["growth"]
    for _ in range(needed):
        state.absmax.window.fill_(absmax)
        update_scale(*state.tensors(), **options, is_last=True)
        if state.exponent.window[0].item() == target:
            break
    for _ in range(3):
        state.absmax.window.fill_(absmax)
        assert state.exponent.window.tolist() == [target, 1]
        update_scale(*state.tensors(), **options, is_last=True)
