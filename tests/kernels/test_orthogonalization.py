"""Orthogonalization of packed factors, held to its guarantees in fp64.

Implementations differ in the signs of rows and in which nearly dependent rows they drop, so no row is ever compared
with another implementation's: what is tested is that rows are orthonormal or zero, and what they span.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import FactorLayout, orthogonalize_reference, orthogonalize_triton
from gradwire.kernels.orthogonalize import ONE_ROUND_ERROR, orthogonalize_cpu
from tests.kernels.support.calls import orthogonalize
from tests.kernels.support.cases import INTERPRETED, PROPERTY, name
from tests.kernels.support.exact import Guarded, assert_same_bits
from tests.kernels.support.matrix_cases import FACTOR_WIRES, assert_gaps_untouched, numbers, packed, unit

INF, NAN = float("inf"), float("nan")
OUTS = (torch.float32, torch.float64)
ORTHONORMAL = 1e-5  # the docstring's promise


def orthogonalized(rows, wire_dtype, out_dtype, device, offset=0, orthogonalize=orthogonalize):
    """The factors of a bucket, orthogonalized in guarded memory, as (wire, result, flag) in numpy."""
    factor = FactorLayout([len(w) for w in rows], [w.shape[1] for w in rows])
    wire = Guarded(packed(factor, rows, wire_dtype), offset=offset, device=device)
    out = Guarded.poisoned(factor.numel, out_dtype, offset=offset, device=device)
    finite = Guarded(torch.full((len(rows),), 7, dtype=torch.int32), device=device)

    orthogonalize(wire.window, factor, out.window, finite.window)

    wire.assert_untouched("the wire")
    assert_gaps_untouched(out, factor, "the result")
    finite.assert_guards_untouched("the flags")
    parts = zip(factor.views(wire.window), factor.views(out.window), finite.window.tolist(), strict=True)
    return [(numbers(w), p.clone(), flag) for w, p, flag in parts]


def largest_loss(rank, n, dtype, is_small):
    """How much of a row, relative to its norm, may be outside the span of the result's rows up to its own.

    Gram-Schmidt drops what is below 64 eps, and rounds each of rank steps with sums of n terms (see `check_span`).
    CholeskyQR, for large factors on a GPU, sees squares. It drops a pivot below 4 rank eps, and the elimination, whose
    factors are at most the inverse root of that, adds rounding errors of rank eps to it: 2 rank eps / sqrt(4 eps).
    Seen: 0.61 of the first, 0.034 of the second bound.
    """
    eps = torch.finfo(dtype).eps
    if is_small:
        return 64 * eps + rank**1.5 * np.sqrt(n) * eps
    return np.sqrt(4 * rank * eps + rank * np.sqrt(eps))


def scaled_rows(w):
    """The rows divided by their largest magnitudes, which changes neither span nor remainders."""
    largest = np.abs(w).max(1, keepdims=True)
    return w / np.where(largest > 0, largest, 1)


def check_basis(w, p, flag, what, is_small=False, allowed=None):
    """The guarantees for every finite input: ``p``, of fp32 or fp64, is an orthonormal basis of the rows of ``w``."""
    allowed = allowed or largest_loss(*w.shape, p.dtype, is_small)
    p = numbers(p)
    assert flag == 1, what
    assert np.isfinite(p).all(), what
    gram = p @ p.T
    assert np.linalg.eigvalsh(gram).max() <= 1 + ORTHONORMAL, f"{what}: the product with it can grow"
    kept = p.any(1)
    assert np.abs(gram - np.diag(kept.astype(float))).max() <= ORTHONORMAL, f"{what}: neither orthonormal nor zero"

    w = scaled_rows(w)
    outside = np.linalg.norm(w - np.tril(w @ p.T) @ p, axis=1) / np.maximum(np.linalg.norm(w, axis=1), 1)
    assert outside.max() <= allowed, f"{what}: {outside} of the rows lost, allowed {allowed:.2g}"


def check_span(w, p, what):
    """The span of ``p`` is that of ``w``, whose rows are independent.

    Rounding moves each row of W by at most rank sqrt(n) u of its norm (rank steps; sums of n terms round like a random
    walk: Higham & Mary 2019), all of them together by sqrt(rank) times that, and the span by that over the smallest
    singular value of W with unit rows (Stewart & Sun, theorem V.4.4): rank^1.5 sqrt(n) u / sigma. Seen: 0.55 of it for
    2 x 2, 0.29 for one row, 0.2 for all others.
    """
    rank, n = w.shape
    w = scaled_rows(w)
    _, values, basis = np.linalg.svd(w / np.linalg.norm(w, axis=1, keepdims=True), full_matrices=False)
    u, p = unit(p.dtype), numbers(p)
    assert p.any(1).all(), f"{what}: a row was dropped"
    distance = max(np.linalg.norm(p - (p @ basis.T) @ basis, 2), np.linalg.norm(basis - (basis @ p.T) @ p, 2))
    # The oracle rounds in the same way, in fp64.
    bound = rank**1.5 * np.sqrt(n) * (u + unit(torch.float64)) / values.min()
    assert distance <= bound, f"{what}: the spans are {distance:.2g} apart, allowed {bound:.2g}"


def with_condition(rank, n, condition, generator):
    """Rows with singular values from 1 down to 1 / condition."""
    left = np.linalg.qr(generator.standard_normal((rank, rank)))[0]
    right = np.linalg.qr(generator.standard_normal((n, rank)))[0]
    return left * np.logspace(0, -np.log10(condition), rank) @ right.T


def make(kind, rank, n, seed):
    """The rows of one factor, in fp64."""
    generator = np.random.default_rng(seed)
    w = generator.standard_normal((rank, n))
    if kind == "condition":
        return with_condition(rank, n, 10.0 ** generator.uniform(0, 12), generator)
    if kind == "graded":
        return w * 10.0 ** generator.uniform(-30, 30, (rank, 1))
    if kind == "huge or tiny":
        return w * generator.choice((1e-30, 1e-20, 1e20, 1e30))
    if kind == "subnormal":
        return w * torch.finfo(torch.float32).tiny / 64
    if kind == "deficient":
        inner = int(generator.integers(0, rank)) if rank > 1 else 0
        return generator.standard_normal((rank, inner)) @ generator.standard_normal((inner, n))
    if kind == "copies":  # of each other, at powers of two, so that they depend exactly
        origins = generator.integers(0, rank, rank)
        return w[origins] * 2.0 ** generator.integers(-20, 20, (rank, 1)) * generator.choice((-1, 1), (rank, 1))
    if kind == "zeros":
        return w * generator.choice((0.0, 1.0), (rank, 1))
    if kind == "nearly equal":
        return np.ones((rank, n)) + 10.0 ** generator.uniform(-9, 0, (rank, 1)) * w
    if kind == "sparse":
        return w * (generator.random((rank, n)) < 0.05)
    if kind == "local":  # nearly parallel where they are large, and different elsewhere
        parallel = generator.standard_normal(n) + 3e-3 * w
        return np.where(np.arange(n) < 64, parallel, 1e-6 * w)
    if kind == "chain":  # each nearly the one before, so that rounding errors grow from row to row
        basis = np.linalg.qr(w.T)[0].T
        return basis + np.concatenate([np.zeros((1, n)), basis[:-1]]) * 10.0 ** generator.uniform(0, 6)
    if kind == "constant":
        return np.ones((rank, n)) * 10.0 ** generator.uniform(-30, 30, (rank, 1))
    return w


KINDS = (
    "normal",
    "condition",
    "graded",
    "huge or tiny",
    "subnormal",
    "deficient",
    "copies",
    "zeros",
    "nearly equal",
    "sparse",
    "constant",
    "local",
    "chain",
)
LENGTHS = st.one_of(st.sampled_from((1, 2, 3, 16, 17, 64, 127, 128)), st.integers(1, 100 if INTERPRETED else 300))
RANKS = st.one_of(st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 8 if INTERPRETED else 64))


@st.composite
def factors(draw):
    result = []
    for _ in range(draw(st.integers(1, 3 if INTERPRETED else 5))):
        n = draw(LENGTHS)
        result.append((draw(st.sampled_from(KINDS)), min(draw(RANKS), n), n, draw(st.integers(0, 2**20))))
    return result


@pytest.mark.parametrize("out", OUTS, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
@PROPERTY
@given(drawn=factors(), offset=st.sampled_from((0, 1, 3)))
def test_finite_factors_become_orthonormal_bases_of_their_rows(wire, out, device, drawn, offset):
    rows = [make(*size_and_seed) for size_and_seed in drawn]
    for size_and_seed, result in zip(drawn, orthogonalized(rows, wire, out, device, offset), strict=True):
        check_basis(*result, str(size_and_seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", OUTS, ids=name)
def test_reference_gives_orthonormal_bases(out, kind, device):
    sizes = ((1, 1), (1, 100), (2, 2), (3, 50), (4, 128), (8, 8))
    rows = [make(kind, *size, seed) for seed, size in enumerate(sizes)]
    rows.append(np.array([[1.0, 2.0, INF]]))
    *results, last = orthogonalized(rows, torch.float32, out, device, orthogonalize=orthogonalize_reference)
    for size, result in zip(sizes, results, strict=True):
        check_basis(*result, f"{kind} {size}", is_small=True)
    assert last[1].isnan().all()
    assert last[2] == 0


SIZES = ((1, 1), (1, 200), (2, 2), (3, 100), (4, 64), (8, 200), (16, 16))


def well_conditioned(wire, out, device, sizes, conditions):
    generator = np.random.default_rng(0)
    for condition in conditions:
        rows = [with_condition(*size, condition, generator) for size in sizes]
        for w, p, flag in orthogonalized(rows, wire, out, device):
            what = f"{len(w)} x {w.shape[1]} of condition {condition:g}"
            check_basis(w, p, flag, what)
            # What bf16 makes of ill-conditioned rows has a condition of its own, which the bound takes from them.
            if wire != torch.bfloat16 or condition <= 10:
                check_span(w, p, what)


@pytest.mark.parametrize("out", OUTS, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
def test_span_of_independent_rows_is_kept(wire, out, device):
    well_conditioned(wire, out, device, SIZES, (1.0, 30.0, 1000.0))


@pytest.fixture
def large(monkeypatch):
    """Sizes of large factors; in the interpreter, of such that are cut into tiles once these are small.

    The longest one then has more tiles than are added up at a time.
    """
    if not INTERPRETED:
        return (1, 5000), (4, 4099), (16, 3000), (33, 700), (64, 2000)
    monkeypatch.setattr(orthogonalize_triton, "SMALL_NUMEL", 64)
    monkeypatch.setattr(orthogonalize_triton, "TILE_LENGTH", 64)
    monkeypatch.setattr(orthogonalize_triton, "GRAMS_NUMEL", 2 * 16 * 16)
    return (1, 100), (3, 130), (12, 64)


@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
def test_span_of_large_factors_is_kept(wire, device, large):
    out = torch.float64 if wire == torch.float64 and not INTERPRETED else torch.float32
    well_conditioned(wire, out, device, large, (1.0, 1000.0))


@pytest.mark.parametrize("max_tiles", [1, 2, 100])
def test_large_factors_become_orthonormal_with_any_tile_limit(max_tiles, device, large, monkeypatch):
    monkeypatch.setattr(orthogonalize_triton, "MAX_TILES", max_tiles)
    well_conditioned(torch.float32, torch.float32, device, large, (100.0,))


@pytest.mark.parametrize("kind", KINDS)
def test_large_factors_become_orthonormal_bases_of_their_rows(kind, device, large):
    rows = [make(kind, *size, seed) for seed, size in enumerate(large)]
    for (w, p, flag), size in zip(orthogonalized(rows, torch.float32, torch.float32, device), large, strict=True):
        # A row may also be dropped because it would let rounding errors grow. On an H200, 9 % of one remained.
        allowed = 0.2 if kind == "chain" and device.type == "cuda" else None
        check_basis(w, p, flag, f"{kind} {size}", allowed=allowed)


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("exponent", [0, 2, 4, 6, 8, 10, 12])
def test_basis_at_any_condition_does_not_grow(exponent, is_large, device, request):
    sizes = request.getfixturevalue("large") if is_large else [(2, 40), (4, 100), (8, 64), (8, 8)] * 3
    generator = np.random.default_rng(exponent)
    rows = [with_condition(*size, 10.0**exponent, generator) for size in sizes]
    for w, p, flag in orthogonalized(rows, torch.float32, torch.float32, device):
        check_basis(w, p, flag, f"{w.shape} of condition 1e{exponent}", is_small=not is_large)


def test_large_factor_with_shipped_tile_length_becomes_orthonormal(device):
    generator = np.random.default_rng(0)
    rows = [with_condition(*size, 100.0, generator) for size in ((12, 2049), (4, 60))]
    for w, p, flag in orthogonalized(rows, torch.float32, torch.float32, device):
        check_basis(w, p, flag, str(w.shape))
        check_span(w, p, str(w.shape))


def check_poisoned(sizes, hits, wire, out, device):
    """Each of ``hits``, (factor, place, number), makes its factor NaN and leaves the bits of the others."""
    rows = [make("normal", *size, seed) for seed, size in enumerate(sizes)]
    clean = orthogonalized(rows, wire, out, device)
    for hit, at, number in hits:
        poisoned = [w.copy() for w in rows]
        poisoned[hit][at] = number
        for i, (_, p, flag) in enumerate(orthogonalized(poisoned, wire, out, device)):
            assert flag == (i != hit)
            if i == hit:
                assert p.isnan().all()
            else:
                assert_same_bits(p, clean[i][1], f"neighbor {i}")


def test_non_finite_large_factor_becomes_nan_and_spares_neighbors(device, large):
    hits = [(i, (rank - 1, n - 1), (NAN, INF, -INF)[i % 3]) for i, (rank, n) in enumerate(large)]
    check_poisoned(large, hits, torch.float32, torch.float32, device)


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("out", OUTS, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
def test_copies_and_zeros_are_dropped_and_other_rows_kept(wire, out, is_large, device, request):
    sizes = request.getfixturevalue("large") if is_large else [(4, 100), (8, 64)]
    for rank, n in [size for size in sizes if size[0] >= 4]:
        w = numbers(torch.tensor(np.random.default_rng(0).standard_normal((rank, n))).to(wire))
        w[1], w[2], w[rank - 1] = -2 * w[0], 0, 0.25 * w[0]
        ((w, p, flag),) = orthogonalized([w], wire, out, device)
        check_basis(w, p, flag, "with copies", is_small=not is_large)
        kept = [row not in (1, 2, rank - 1) for row in range(rank)]
        assert p.any(1).tolist() == kept
        check_span(w[kept], p[torch.tensor(kept)], "rows that are not copies")


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("out", OUTS, ids=name)
@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
def test_non_finite_factor_becomes_nan_and_spares_neighbors(wire, out, poison, device):
    places = ((0, (0, 0)), (1, (0, 0)), (2, (2, 6)), (3, (1, 0)))
    check_poisoned(((4, 100), (1, 1), (3, 7), (2, 5)), [(*hit, poison) for hit in places], wire, out, device)


@pytest.mark.parametrize("condition", [3e3, 1e4, 3e4])
def test_second_round_on_cpus_reaches_error_of_single_round(condition):
    rows = [with_condition(*size, condition, np.random.default_rng(0)) for size in ((2, 40), (4, 100), (16, 300))]
    factor = FactorLayout([len(w) for w in rows], [w.shape[1] for w in rows])
    # Into fp64, because the rounding of fp32 is larger than what the second round mends.
    out, finite = torch.zeros(factor.numel, dtype=torch.float64), torch.zeros(3, dtype=torch.int32)
    wire = packed(factor, rows, torch.float64)
    orthogonalize_cpu(wire, factor, out, finite)
    for p in factor.views(out):
        assert (p @ p.mT - torch.eye(len(p))).abs().max() <= ONE_ROUND_ERROR
