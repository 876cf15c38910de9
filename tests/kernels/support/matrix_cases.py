"""Buckets of matrices that the property tests draw, in guarded memory, and the bounds that rounding sets."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradwire.kernels import Matrix, MatrixTable, Operands, OwnFactor, Renewal, lowrank_triton
from tests.kernels.support.calls import backproject, project, reconstruct
from tests.kernels.support.cases import INTERPRETED
from tests.kernels.support.exact import Guarded, assert_same_bits, round_to

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# All dtypes for tests that take long in the interpreter: there those other than fp32 run with the slow tests.
FP32_OR_SLOW = [torch.float32, *(pytest.param(d, marks=[pytest.mark.slow] * INTERPRETED) for d in GRADIENTS[1:])]
FACTOR_WIRES = (torch.float32, torch.bfloat16, torch.float64)


def compute_dtype(gradient):
    return torch.float64 if gradient == torch.float64 else torch.float32


def numbers(tensor):
    """A copy of the elements in numpy's fp64, exact from every dtype."""
    return tensor.detach().cpu().to(torch.float64, copy=True).numpy()


def unit(dtype):
    """The relative error of rounding to nearest once."""
    return torch.finfo(dtype).eps / 2


def rounding(operations, compute):
    """The relative error of so many roundings one after another: k u / (1 - k u) (Higham, lemma 3.1).

    Twice that in fp64, because the oracle's own fp64 rounds as often.
    """
    k = operations * unit(compute)
    return (2 if compute == torch.float64 else 1) * k / (1 - k)


# The relative error of a product whose inputs were cut off after TF32's 10 bits: (1 + 2^-10)^2 - 1. Tensor cores cut
# off, Triton does not round before.
TF32 = 2.0**-9 + 2.0**-20


def stored_within(expected, error, dtype):
    """The bound of a number known to ``error`` after it has been stored in ``dtype``, which rounds once more."""
    info = torch.finfo(dtype)
    return error + (np.abs(expected) + error) * unit(dtype) + info.tiny * unit(dtype)


def assert_within(actual, expected, bound, what):
    wrong = ~(np.abs(actual - expected) <= bound)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements are out of bounds; the first, at {at}, is {actual[at]!r}, "
            f"expected {expected[at]!r} within {np.broadcast_to(bound, wrong.shape)[at]!r}"
        )


@dataclass(frozen=True)
class Place:
    """A matrix: its size, its rank, and how many elements past an aligned address it lies."""

    rows: int
    columns: int
    rank: int
    offset: int = 0


LARGEST = 40 if INTERPRETED else 200
# Powers of two and their neighbors, multiples of 4 and 16, primes, and anything between.
LENGTHS = st.one_of(
    st.sampled_from(
        [n for n in (1, 2, 3, 4, 5, 7, 12, 16, 17, 31, 32, 33, 48, 64, 127, 128, 199, 200) if n <= LARGEST]
    ),
    st.integers(1, LARGEST),
)
RANKS = st.one_of(st.sampled_from((1, 2, 3, 4, 5, 8, 16, 17, 32, 64)), st.integers(1, 64))
OFFSETS = st.sampled_from((0, 0, 0, 1, 2, 3))
KINDS = ("normal", "normal", "graded", "sparse")


@st.composite
def places(draw):
    rows, columns = draw(LENGTHS), draw(LENGTHS)
    if draw(st.integers(0, 3)) == 0:  # skinny
        rows, columns = draw(st.sampled_from(((1, columns), (rows, 1), (1, LARGEST), (LARGEST, 1), (1, 1))))
    return Place(rows, columns, min(draw(RANKS), rows, columns), draw(OFFSETS))


@dataclass(frozen=True)
class Bucket:
    """Matrices and how they are handed over.

    Attributes:
        has_error: whether there is error memory.
        keep: whether `project` leaves M in the target, where the dtype allows it.
        in_place: whether the target is the source.
        wire: wire dtype of the factors.
        own: the factor, "p" or "q", of which this rank's own is remembered; None: it is the only rank.
        has_residual: whether quantization lost some of it, if it is in the dtype of the arithmetic.
    """

    places: tuple[Place, ...]
    kind: str = "normal"
    has_error: bool = True
    keep: bool = False
    in_place: bool = True
    wire: torch.dtype = torch.float32
    wire_offset: int = 0
    seed: int = 0
    own: str | None = None
    has_residual: bool = False

    def fill(self, dtype, device):
        return Filled(self, dtype, device)


@st.composite
def buckets(draw):
    return Bucket(
        places=tuple(draw(st.lists(places(), min_size=1, max_size=3 if INTERPRETED else 6))),
        kind=draw(st.sampled_from(KINDS)),
        has_error=draw(st.sampled_from((True, True, False))),
        keep=draw(st.booleans()),
        in_place=draw(st.booleans()),
        wire=draw(st.sampled_from(FACTOR_WIRES)),
        wire_offset=draw(OFFSETS),
        seed=draw(st.integers(0, 2**20)),
        own=draw(st.sampled_from((None, "p", "q"))),
        has_residual=draw(st.booleans()),
    )


class Filled:
    """The tensors of a bucket, in guarded memory: what `Operands` names, and factors.

    Attributes:
        source, target, error: guarded; the target is the source, or NaN.
        sent, residual: guarded, of `OwnFactor`; None without one.
        g, m: G and G + E in numpy, as they were at first.
        operands: operands of all of them.
    """

    def __init__(self, bucket, dtype, device):
        self.bucket, self.dtype, self.device = bucket, dtype, device
        self.compute = compute_dtype(dtype)
        self.generator = torch.Generator().manual_seed(bucket.seed)
        self.table = MatrixTable([Matrix(p.rows, p.columns, p.rank) for p in bucket.places], dtype, device)
        self.source = [Guarded(self._values(p, dtype), offset=p.offset, device=device) for p in bucket.places]
        self.error = None
        if bucket.has_error:
            error_offsets = [(p.offset + 1) % 4 if p.offset else 0 for p in bucket.places]
            self.error = [
                Guarded(self._values(p, self.compute), offset=offset, device=device)
                for p, offset in zip(bucket.places, error_offsets, strict=True)
            ]
        self.target = self.source
        if not bucket.in_place:
            self.target = [
                Guarded.poisoned(p.rows * p.columns, dtype, offset=p.offset, device=device) for p in bucket.places
            ]
        own = self.sent = self.residual = None
        if bucket.own is not None and bucket.has_error:
            side = getattr(self.table, bucket.own)
            self.sent = self.empty_factor(side, bucket.wire)
            if bucket.has_residual and bucket.wire == self.compute:  # as of quantized factors
                self.residual = self.factor(side, self.compute)
            own = OwnFactor(side, self.sent.window, None if self.residual is None else self.residual.window, 3)
        self.keep = bucket.keep and bucket.has_error and dtype == self.compute
        self.operands = Operands(
            self.table,
            self.matrices(self.source),
            self.matrices(self.target),
            None if self.error is None else self.matrices(self.error),
            self.keep,
            own=own,
        )
        self.g = [numbers(g) for g in self.operands.source]
        self.e = [0 * g for g in self.g] if self.error is None else [numbers(e) for e in self.operands.error]
        self.m = [g + e for g, e in zip(self.g, self.e, strict=True)]

    def _values(self, place, dtype):
        return values((place.rows, place.columns), self.bucket.kind, self.generator).to(dtype).flatten()

    def matrices(self, guarded):
        return [g.view((p.rows, p.columns), (p.columns, 1)) for g, p in zip(guarded, self.bucket.places, strict=True)]

    def factor(self, side, dtype):
        """A guarded packed factor with values in it; ``side`` is `table.p` or `table.q`."""
        sizes = zip(side.ranks, side.lengths, strict=True)
        parts = [values(size, self.bucket.kind, self.generator) for size in sizes]
        return Guarded(packed(side, parts, dtype), offset=self.bucket.wire_offset, device=self.device)

    def empty_factor(self, side, dtype):
        return Guarded.poisoned(side.numel, dtype, offset=self.bucket.wire_offset, device=self.device)

    def step(self):
        """The number of a step on the device."""
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def flags(self, *values):
        """Guarded flags of the matrices, all 1 by default."""
        return Guarded(torch.tensor(values or [1] * len(self.table), dtype=torch.int32), device=self.device)

    def assert_source_untouched(self):
        for i, guarded in enumerate(self.source):
            guarded.assert_untouched(f"source {i}")

    def assert_guards_untouched(self):
        for what in ("source", "target", "error"):
            for i, guarded in enumerate(getattr(self, what) or []):
                guarded.assert_guards_untouched(f"{what} {i}")
        if self.sent is not None:
            self.sent.assert_guards_untouched("the own factor")
        if self.residual is not None:
            self.residual.assert_untouched("the residual of the own factor")

    def assert_remembered(self, side, wire, before):
        """`OwnFactor.sent` is a copy of the factors on the wire, if it is that side; else as it was before."""
        if self.sent is not None:
            expected = wire.window if self.operands.own.layout is side else before
            assert_same_bits(self.sent.window, expected, "the own factor")


def packed(side, parts, dtype):
    """The factors ``parts`` in one buffer laid out as ``side``, with NaN between them."""
    buffer = torch.full((side.numel,), torch.nan, dtype=dtype)
    for view, part in zip(side.views(buffer), parts, strict=True):
        view.copy_(torch.as_tensor(part))
    return buffer


def _between(guarded, side):
    """The elements between packed factors."""
    between = torch.ones(side.numel, dtype=torch.bool)
    for view in side.views(between):
        view.fill_(False)
    return guarded.window.cpu()[between]


def assert_gaps_untouched(guarded, side, what):
    """Nothing was written around a packed factor, nor between its parts, where it was NaN."""
    guarded.assert_guards_untouched(what)
    assert _between(guarded, side).isnan().all(), f"something was written between the factors of {what}"


def assert_gaps_zero(guarded, side, what):
    """Nothing was written around a packed factor, and zeros between its parts."""
    guarded.assert_guards_untouched(what)
    assert (_between(guarded, side) == 0).all(), f"no zeros between the factors of {what}"


def values(shape, kind, generator):
    """Random elements in fp64: of ordinary size, with rows from 1e-3 to 1, mostly zeros, or small integers."""
    if kind == "integers":
        return torch.randint(-3, 4, shape, generator=generator).double()
    result = torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "graded":
        result *= 10 ** (3 * torch.rand(shape[0], 1, dtype=torch.float64, generator=generator) - 3)
    if kind == "sparse":
        result *= torch.rand(shape, generator=generator) < 0.1
    return result


def check_product(left, right, scale, actual, compute, what, each_error=0.0):
    """``actual`` is ``scale`` times the product, to the rounding of its sums and of its dtype.

    ``each_error``: the relative error of each summand. Tensor cores also cut off sums, up to twice what rounding takes.
    """
    expected = scale * (left @ right)
    error = each_error + (2 if each_error else 1) * rounding(left.shape[1] + 3, compute)
    error = error * abs(scale) * (np.abs(left) @ np.abs(right))
    assert_within(numbers(actual), expected, stored_within(expected, error, actual.dtype), what)


def error_of_each(filled):
    """The relative error of the products that `project` and `backproject` sum up: the interpreter's TF32 is fp32."""
    runs_in_tf32 = filled.device.type == "cuda" and filled.table.can_use_triton()
    return TF32 if runs_in_tf32 and lowrank_triton.dot_precision(filled.table) == "tf32" else 0.0


def check_project(filled, scale, project=project):
    """`project` gives the oracle's P, leaves M where it should, and writes nothing else. Returns P."""
    table = filled.table
    q = filled.factor(table.q, filled.compute)
    p = filled.empty_factor(table.p, filled.bucket.wire)
    sent = filled.sent and filled.sent.window.clone()

    project(filled.operands, q.window, p.window, scale=scale)

    q.assert_untouched("Q")
    p.assert_guards_untouched("P")
    filled.assert_guards_untouched()
    for guarded in filled.error or []:
        guarded.assert_untouched("the error memory")
    for i, target in enumerate(filled.target):
        if filled.keep:
            # fp64 holds enough bits of a sum of fp32 numbers that rounding it to fp32 rounds once.
            assert_same_bits(filled.operands.target[i].cpu(), round_to(filled.m[i], filled.compute), f"M {i}")
        else:
            target.assert_untouched(f"target {i}")
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q.window), table.p.views(p.window), strict=True)):
        check_product(numbers(q_i), filled.m[i].T, scale, p_i, filled.compute, f"P {i}", error_of_each(filled))
    filled.assert_remembered(table.p, p, sent)
    return p


def check_backproject(filled, scale, backproject=backproject):
    """`backproject`, after `project`, gives the oracle's Q and writes nothing else. Returns Q."""
    table = filled.table
    p = filled.factor(table.p, filled.compute)
    q = filled.empty_factor(table.q, filled.bucket.wire)
    before = [tensor.clone() for tensor in filled.operands.target]
    sent = filled.sent and filled.sent.window.clone()

    backproject(filled.operands, p.window, q.window, scale=scale)

    p.assert_untouched("P")
    q.assert_guards_untouched("Q")
    filled.assert_guards_untouched()
    for guarded in filled.error or []:
        guarded.assert_untouched("the error memory")
    for i, target in enumerate(filled.operands.target):
        assert_same_bits(target, before[i], f"target {i}")
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p.window), table.q.views(q.window), strict=True)):
        check_product(numbers(p_i), filled.m[i], scale, q_i, filled.compute, f"Q {i}", error_of_each(filled))
    filled.assert_remembered(table.q, q, sent)
    return q


def check_reconstruct(filled, p_dtype, q_dtype, reconstruct=reconstruct):
    """`reconstruct`, after `project`, gives the oracle's result, and an error that conserves M."""
    table = filled.table
    p, q = filled.factor(table.p, p_dtype), filled.factor(table.q, q_dtype)
    finite, operands, sent = filled.flags(), filled.operands, None
    if (own := operands.own) is not None:
        sent = [numbers(each) for each in own.layout.views(own.sent)]
        received = p if own.layout is table.p else q
        renewal = Renewal(own.layout, torch.empty_like(received.window, dtype=filled.compute), filled.step(), None)
        operands = replace(operands, renewal=renewal)

    reconstruct(operands, p.window, q.window, finite.window)

    p.assert_untouched("P")
    q.assert_untouched("Q")
    finite.assert_untouched("the flags")
    filled.assert_guards_untouched()
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p.window), table.q.views(q.window), strict=True)):
        # Factors wider than the arithmetic are rounded to it.
        left, right = (numbers(factor.to(filled.compute)) for factor in (p_i, q_i))
        check_product(left.T, right, 1.0, filled.operands.target[i], filled.compute, f"result {i}")
        if sent is not None:
            check_own_error(filled, i, left, right, sent[i])
        elif filled.error is not None:
            check_conservation(filled, i)


def check_own_error(filled, i, p, q, sent):
    """E is what this rank's own factors, P_own^T Q_own, leave out of M, and what the result's dtype rounds off."""
    own, out, error = filled.operands.own, numbers(filled.operands.target[i]), filled.operands.error[i]
    residual = 0 if own.residual is None else numbers(own.layout.views(own.residual)[i])
    is_p = filled.bucket.own == "p"
    received = p if is_p else q
    mine = own.world_size * (sent - residual)
    size = own.world_size * (np.abs(sent) + np.abs(residual)) + np.abs(received)
    lost = (mine - received).T @ q if is_p else p.T @ (mine - received)
    size = size.T @ np.abs(q) if is_p else np.abs(p).T @ size
    size += np.abs(filled.g[i]) + np.abs(filled.e[i]) + np.abs(out)
    bound = rounding(len(p) + 7, filled.compute) * size
    assert_within(numbers(error), filled.m[i] - out - lost, bound, f"error {i}")


def check_conservation(filled, i):
    """E is M minus the result as it was stored, and nothing more is lost than each of the two operations rounds."""
    out, error = numbers(filled.operands.target[i]), filled.operands.error[i]
    m = numbers(round_to(filled.m[i], filled.compute))
    assert_same_bits(error.cpu(), round_to(m - out, filled.compute), f"error {i}")
    lost = np.abs(filled.g[i] + filled.e[i] - out - numbers(error))
    bound = rounding(1, filled.compute) * (np.abs(filled.m[i]) + np.abs(numbers(error)))
    assert_within(lost, 0 * lost, bound, f"what error {i} does not hold")
