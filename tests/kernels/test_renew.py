"""The factors of the next step: unit columns, random ones where a column is zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import FactorLayout, draw, random_key
from tests.kernels.support.calls import renew
from tests.kernels.support.cases import INTERPRETED, PROPERTY, name
from tests.kernels.support.exact import Guarded, assert_same_bits
from tests.kernels.support.matrix_cases import (
    FACTOR_WIRES,
    assert_gaps_untouched,
    assert_within,
    numbers,
    packed,
    rounding,
    values,
)
from tests.kernels.support.random_oracle import at, uniform_oracle

INF, NAN = float("inf"), float("nan")
FOLLOWING = (torch.float32, torch.float64)


class Renewal:
    """The factors of a bucket in guarded memory, and what `renew` made of them."""

    def __init__(self, rows, wire, following, device, *, keys=None, step=0, flags=None, offset=0, renew=renew):
        self.factor = FactorLayout([len(q) for q in rows], [q.shape[1] for q in rows])
        self.keys = keys or list(range(len(rows)))
        self.wire = Guarded(packed(self.factor, rows, wire), offset=offset, device=device)
        # What was there before: it must not matter where it is overwritten, and stay where it is not.
        before = [torch.arange(float(q.numel())).view_as(q) for q in self.factor.views(self.wire.window)]
        for part in before:
            part[:, ::3] = NAN
        self.following = Guarded(packed(self.factor, before, following), offset=offset, device=device)
        self.finite = Guarded(torch.tensor(flags or [1] * len(rows), dtype=torch.int32), device=device)
        self.before = self.factor.views(self.following.window.clone())

        renew(self.wire.window, self.factor, self.keys, at(step, device), self.following.window, self.finite.window)

        self.wire.assert_untouched("the wire")
        assert_gaps_untouched(self.following, self.factor, "the following factors")
        self.finite.assert_guards_untouched("the flags")
        self.flags = self.finite.window.tolist()
        self.q = [numbers(view) for view in self.factor.views(self.wire.window)]
        self.after = self.factor.views(self.following.window)

    def check(self, i, step=0):
        """Factor ``i`` has unit rows in the directions of those of the wire, or random ones where they are zero."""
        q = self.q[i]
        drawn = numbers(uniform_oracle(self.keys[i], step, q.size)).reshape(q.shape)
        q = np.where((q == 0).all(1, keepdims=True), drawn, q)
        q = q / np.abs(q).max(1, keepdims=True)
        unit_rows = q / np.linalg.norm(q, axis=1, keepdims=True)
        # One division, n squares and their sum, of which the root halves the error, the root, one division.
        operations = 3 + (q.shape[1] + 2) / 2
        bound = rounding(operations, self.after[i].dtype) * np.abs(unit_rows) + torch.finfo(self.after[i].dtype).tiny
        assert_within(numbers(self.after[i]), unit_rows, bound, f"factor {i}")
        assert self.flags[i] == 1


LENGTHS = st.one_of(st.sampled_from((1, 2, 3, 16, 17, 127, 128)), st.integers(1, 60 if INTERPRETED else 2000))


@st.composite
def factors(draw):
    """Factors with rows of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    result = []
    for _ in range(draw(st.integers(1, 3 if INTERPRETED else 6))):
        rank, length = draw(st.integers(1, 4 if INTERPRETED else 33)), draw(LENGTHS)
        rows = values((rank, length), draw(st.sampled_from(("normal", "graded", "sparse", "integers"))), generator)
        scales = draw(st.sampled_from((1.0, 1e-30, 1e30, None)))
        if scales is None:
            scales = 10.0 ** (60 * torch.rand(rank, 1, dtype=torch.float64, generator=generator) - 30)
        zeros = draw(st.sampled_from((0.0, 0.5, 1.0)))
        result.append(rows * scales * (torch.rand(rank, 1, generator=generator) >= zeros))
    return result


@pytest.mark.parametrize("following", FOLLOWING, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
@PROPERTY
@given(rows=factors(), step=st.sampled_from((0, 1, 2**31 - 1, 2**40)), offset=st.sampled_from((0, 1, 3)))
def test_renew_normalizes_rows_and_draws_zero_rows(wire, following, device, rows, step, offset):
    keys = [random_key(step, str(i)) for i in range(len(rows))]
    renewal = Renewal(rows, wire, following, device, keys=keys, step=step, offset=offset)
    for i in range(len(rows)):
        renewal.check(i, step)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("following", FOLLOWING, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
def test_renew_of_non_finite_factor_keeps_next_factor_and_clears_flag(wire, following, poison, device):
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 9), (1, 1), (3, 40))]
    clean = Renewal(rows, wire, following, device)
    for hit, place in ((0, (0, 0)), (0, (1, 8)), (1, (0, 0)), (2, (1, 20))):
        poisoned = [q.clone() for q in rows]
        poisoned[hit][place] = poison
        renewal = Renewal(poisoned, wire, following, device)
        assert renewal.flags == [int(i != hit) for i in range(3)]
        for i in range(3):
            expected = renewal.before[i] if i == hit else clean.after[i]
            assert_same_bits(renewal.after[i], expected, f"factor {i} with {poison} in {hit}")


@pytest.mark.parametrize("following", FOLLOWING, ids=name)
def test_renew_with_cleared_flag_keeps_next_factor(following, device):
    rows = [torch.ones(2, 5), torch.zeros(1, 4), torch.ones(1, 3), torch.full((1, 2), NAN)]
    renewal = Renewal(rows, torch.float32, following, device, flags=[0, 0, 1, 0])
    assert renewal.flags == [0, 0, 1, 0]
    for i in (0, 1, 3):
        assert_same_bits(renewal.after[i], renewal.before[i], f"factor {i}")
    renewal.check(2)


@pytest.mark.parametrize("dtype", FOLLOWING, ids=name)
def test_draw_matches_renew_of_zero_factors(dtype, device):
    zeros, keys = [torch.zeros(2, 9), torch.zeros(1, 40), torch.zeros(3, 3)], [7, -7, 2**60]
    renewal = Renewal(zeros, dtype, dtype, device, keys=keys, step=3)
    drawn = Guarded.poisoned(renewal.factor.numel, dtype, offset=1, device=device)
    draw(renew, renewal.factor, keys, at(3, device), drawn.window)
    assert_gaps_untouched(drawn, renewal.factor, "the factors")
    for i, found in enumerate(renewal.factor.views(drawn.window)):
        renewal.check(i, 3)
        assert_same_bits(found, renewal.after[i], f"factor {i}")
