"""The passes of PowerSGD over a bucket's matrices, held to an fp64 oracle in numpy.

Bounds. A sum of k products in any order, fused or not, is within rounding(k) of the sum of their magnitudes (Higham,
"Accuracy and Stability of Numerical Algorithms", section 3.1). M adds one rounding, the scale two (its own and that of
the product), the dtype of the result one. The largest error seen in fp32 is 0.60 of the bound, and 0.17 of it for sums
of more than 30 terms; in 16 bits the last rounding is nearly all of the bound, and has been seen at 0.997 of it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import (
    Renewal,
    SegmentTable,
    Uncompressed,
    backproject_reference,
    matrix_table,
    project_reference,
    reconstruct_reference,
)
from gradwire.kernels.matrix_table import Tiling
from tests.kernels.support.calls import backproject, flatten, project, reconstruct, renew, unflatten
from tests.kernels.support.cases import INTERPRETED, PROPERTY, name
from tests.kernels.support.exact import assert_same_bits, round_to
from tests.kernels.support.matrix_cases import (
    FACTOR_WIRES,
    FP32_OR_SLOW,
    GRADIENTS,
    Bucket,
    Place,
    assert_gaps_zero,
    buckets,
    check_backproject,
    check_project,
    check_reconstruct,
    numbers,
)

INF, NAN = float("inf"), float("nan")
SLOW_FALSE = pytest.param(False, marks=pytest.mark.slow)
SCALES = st.sampled_from((1.0, 0.5, 1 / 3, 0.1, 1024.0))


@pytest.fixture(scope="module", autouse=True)
def shipped():
    """In the interpreter, tiles and strips so small that small matrices have several; yields them as shipped."""
    names = ("ELEMENTWISE", "DOT")
    with pytest.MonkeyPatch.context() as patch:
        shipped = {name: getattr(matrix_table, name) for name in names}
        if INTERPRETED:
            patch.setattr(matrix_table, "ELEMENTWISE", Tiling(rows=8, columns=16, strip_rows=16, strip_columns=32))
            patch.setattr(matrix_table, "DOT", Tiling(rows=16, columns=16, strip_rows=32, strip_columns=32))
        yield shipped


on_the_cpu_path = pytest.mark.skipif(
    INTERPRETED, reason="too large for the interpreter, or about the BLAS of the CPU path"
)


PASSES = (project, backproject, reconstruct)
REFERENCES = (project_reference, backproject_reference, reconstruct_reference)


def check(bucket, dtype, device, scale, p_dtype=None, passes=PASSES):
    filled = bucket.fill(dtype, device)
    check_project(filled, scale, passes[0])
    check_backproject(filled, scale, passes[1])
    if not bucket.in_place:
        filled.assert_source_untouched()
    check_reconstruct(filled, p_dtype or filled.compute, bucket.wire, passes[2])
    if not bucket.in_place:
        filled.assert_source_untouched()


@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
@PROPERTY
@given(bucket=buckets(), scale=SCALES, p_dtype=st.sampled_from((None, *FACTOR_WIRES)))
def test_passes_match_oracle_and_conserve_gradient(dtype, device, bucket, scale, p_dtype):
    check(bucket, dtype, device, scale, p_dtype)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "added again"])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_references_match_oracle_and_conserve_gradient(dtype, keep, device):
    sizes = (Place(33, 17, 4), Place(1, 40, 1, 1), Place(37, 29, 16, 3), Place(40, 1, 1))
    for has_error, in_place, wire in (
        (True, True, torch.bfloat16),
        (True, False, torch.float32),
        (False, False, torch.float64),
    ):
        bucket = Bucket(sizes, has_error=has_error, keep=keep, in_place=in_place, wire=wire, wire_offset=1)
        check(bucket, dtype, device, 1 / 3, passes=REFERENCES)


@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "added again"])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_passes_on_small_integers_are_exact(dtype, keep, wire, device):
    # Every sum is an integer that fp32 (and TF32's product of small ones) holds; only the 16-bit stores round.
    sizes = (Place(33, 17, 4), Place(1, 40, 1, 1), Place(37, 29, 16, 3), Place(40, 1, 1), Place(24, 32, 20))
    filled = Bucket(sizes, kind="integers", keep=keep, wire=wire, wire_offset=1).fill(dtype, device)
    table = filled.table
    q, p = filled.factor(table.q, filled.compute), filled.empty_factor(table.p, wire)
    project(filled.operands, q.window, p.window, scale=0.5)
    for q_i, p_i, m in zip(table.q.views(q.window), table.p.views(p.window), filled.m, strict=True):
        np.testing.assert_array_equal(numbers(p_i), numbers(round_to(0.5 * numbers(q_i) @ m.T, wire)))

    p, q = filled.factor(table.p, filled.compute), filled.empty_factor(table.q, wire)
    backproject(filled.operands, p.window, q.window, scale=0.25)
    for p_i, q_i, m in zip(table.p.views(p.window), table.q.views(q.window), filled.m, strict=True):
        np.testing.assert_array_equal(numbers(q_i), numbers(round_to(0.25 * numbers(p_i) @ m, wire)))

    q = filled.factor(table.q, wire)
    reconstruct(filled.operands, p.window, q.window, filled.flags().window)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p.window), table.q.views(q.window), strict=True)):
        out = round_to(numbers(p_i).T @ numbers(q_i), dtype)
        np.testing.assert_array_equal(numbers(filled.operands.target[i]), numbers(out))
        np.testing.assert_array_equal(numbers(filled.operands.error[i]), filled.m[i] - numbers(out))


@pytest.mark.parametrize("wire", FACTOR_WIRES, ids=name)
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_products_write_zeros_between_factors(dtype, wire, device):
    filled = Bucket((Place(5, 7, 2), Place(3, 3, 1), Place(33, 17, 3)), wire=wire, wire_offset=1).fill(dtype, device)
    assert_gaps_zero(check_project(filled, 1.0), filled.table.p, "P")
    assert_gaps_zero(check_backproject(filled, 1.0), filled.table.q, "Q")


@pytest.mark.parametrize("in_place", [True, SLOW_FALSE])
@pytest.mark.parametrize("dtype", FP32_OR_SLOW, ids=name)
def test_fused_launches_give_the_bits_of_separate_functions(dtype, in_place, device):
    places = (Place(5, 700, 2), Place(3, 3, 1), Place(33, 17, 3))
    shapes = [(4099,), (), (5, 7), (0,)]
    generator = torch.Generator().manual_seed(0)
    gradients = [(1e4 * torch.randn(shape, generator=generator)).to(dtype).to(device) for shape in shapes]
    gradients[0][:2] = torch.tensor([torch.inf, torch.nan])
    table = SegmentTable(gradients)

    def run(is_fused, advance_to=8, with_p=True):
        filled = Bucket(places).fill(dtype, device)
        layout, compute = filled.table, filled.compute
        p, q = (filled.factor(side, compute).window for side in (layout.p, layout.q))
        layout.q.views(q)[2][1] = 0
        layout.q.views(q)[0][0, 600] = torch.inf
        sent = [torch.zeros_like(p), torch.zeros_like(q)]
        wire = torch.full((table.numel,), torch.nan, dtype=dtype, device=device)
        source = [gradient.clone() for gradient in gradients]
        target = source if in_place else [torch.full_like(gradient, torch.nan) for gradient in gradients]
        finite, step = filled.flags(1, 1, 0).window, torch.tensor([7], device=device)
        following = torch.full_like(q, torch.nan)
        layout.keys[:] = [1, 2, 3]
        if is_fused:
            sent_with = layout.p if with_p else layout.q
            uncompressed = Uncompressed(table, source, target, wire, sent_with)
            renewal = Renewal(layout.q, following, step, advance_to)
            operands = replace(filled.operands, uncompressed=uncompressed, renewal=renewal)
            project(operands, q, sent[0], scale=0.5)
            assert wire.isnan().all() != with_p
            backproject(operands, p, sent[1], scale=0.5)
            wires = [wire.clone()]
            reconstruct(operands, p, q, finite)
        else:
            project(filled.operands, q, sent[0], scale=0.5)
            flatten(source, wire, table=table, scale=0.5)
            wires = [wire.clone()]
            backproject(filled.operands, p, sent[1], scale=0.5)
            step += 1
            renew(q, layout.q, [1, 2, 3], step, following, finite)
            reconstruct(filled.operands, p, q, finite)
            unflatten(wire, target, table=table)
        operands = filled.operands
        return [*sent, *wires, wire, *target, finite, step, following, *operands.target, *(operands.error or [])]

    expected = run(is_fused=False)
    for advance_to, with_p in ((8, True), (None, True), (8, False)):
        for i, (actual, wanted) in enumerate(zip(run(True, advance_to, with_p), expected, strict=True)):
            assert_same_bits(actual, wanted, f"result {i}")


LONG = {
    "wide": (Place(3, 5000, 3), Place(2, 4099, 1, 1), Place(1, 20011, 1)),
    "tall": (Place(5000, 3, 2), Place(4099, 2, 2, 1), Place(20011, 1, 1)),
    "both": (Place(700, 601, 4), Place(5, 3, 2), Place(513, 1024, 33)),
}


@on_the_cpu_path
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
@pytest.mark.parametrize("sizes", LONG.values(), ids=LONG)
def test_passes_with_long_sums_match_oracle(sizes, dtype, device):
    for keep in (True, False):
        check(Bucket(sizes, keep=keep, in_place=keep), dtype, device, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("rank", [4, 16], ids=["element by element", "dot"])
def test_passes_with_shipped_tiles_match_oracle(rank, dtype, shipped, device, monkeypatch):
    for name_, tiling in shipped.items():
        monkeypatch.setattr(matrix_table, name_, tiling)
    cut = shipped["ELEMENTWISE" if rank == 4 else "DOT"]
    sizes = (
        Place(17, 2 * cut.strip_columns + 64, rank),
        Place(33, 40, rank),
        Place(2 * cut.strip_rows + 1, 18, rank),
        Place(cut.strip_rows + 1, 17, rank - 1, 1),
    )
    check(Bucket(sizes, keep=True), dtype, device, 0.5)


@on_the_cpu_path
@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_passes_with_any_block_size_match_oracle(dtype, block, device, monkeypatch):
    monkeypatch.setattr(matrix_table, "CPU_BLOCK_NUMEL", block)
    sizes = (Place(61, 67, 4), Place(1, 127, 1, 1), Place(127, 1, 1), Place(31, 33, 16, 3))
    for has_error, keep, in_place in ((True, True, False), (True, False, True), (False, False, False)):
        check(Bucket(sizes, has_error=has_error, keep=keep, in_place=in_place), dtype, device, 1 / 3)


def run(bucket, dtype, device, *, at=None, poison=None):
    """The bits that the three passes write for each matrix; optionally with one element of G replaced."""
    filled = bucket.fill(dtype, device)
    if at is not None:
        matrix, row, column = at
        filled.operands.source[matrix][row, column] = poison
    table = filled.table
    parts = []
    q, p = filled.factor(table.q, filled.compute), filled.empty_factor(table.p, bucket.wire)
    project(filled.operands, q.window, p.window, scale=0.3)
    parts.append(table.p.views(p.window))
    p, q = filled.factor(table.p, filled.compute), filled.empty_factor(table.q, bucket.wire)
    backproject(filled.operands, p.window, q.window, scale=0.3)
    parts.append(table.q.views(q.window))
    q = filled.factor(table.q, bucket.wire)
    reconstruct(filled.operands, p.window, q.window, filled.flags().window)
    parts += [filled.operands.target, filled.operands.error]
    return [dict(zip(("P", "Q", "result", "error"), results, strict=True)) for results in zip(*parts, strict=True)]


NEIGHBORS = (Place(33, 40, 4), Place(1, 7, 1), Place(40, 1, 1), Place(17, 16, 16), Place(5, 31, 5, 3))


def assert_same_results(actual, expected, what):
    assert actual.keys() == expected.keys()
    for part, bits in expected.items():
        assert_same_bits(actual[part], bits, f"{part} of {what}")


@pytest.mark.parametrize("in_place", [True, SLOW_FALSE], ids=["in place", "apart"])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
@pytest.mark.parametrize("rank", [1, 4, 7])  # above 8, the interpreter multiplies by BLAS
def test_passes_have_same_bits_at_every_address(rank, dtype, in_place, device):
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("BLAS rounds by alignment")
    sizes = (Place(9, 72, rank), Place(40, 24, rank))
    aligned, shifted = (
        run(Bucket([replace(place, offset=offset) for place in sizes], keep=in_place, in_place=in_place), dtype, device)
        for offset in (0, 1)
    )
    for i in range(len(sizes)):
        assert_same_results(shifted[i], aligned[i], f"matrix {i}")


def results_among(neighbors, kind, dtype, device, seed):
    """The results of one matrix, always the same, between others."""
    matrix = Place(33, 40, 4)
    before, after = neighbors
    alone = Bucket((matrix,), kind=kind).fill(dtype, device)
    alone_p, alone_q = (alone.factor(side, alone.compute) for side in (alone.table.p, alone.table.q))

    filled = Bucket((*before, matrix, *after), kind=kind, seed=seed).fill(dtype, device)
    table, index = filled.table, len(before)
    p, q = filled.factor(table.p, filled.compute), filled.factor(table.q, filled.compute)
    table.p.views(p.window)[index].copy_(alone.table.p.views(alone_p.window)[0])
    table.q.views(q.window)[index].copy_(alone.table.q.views(alone_q.window)[0])
    for ours, theirs in zip((filled.operands.source, filled.operands.error), (alone.source, alone.error), strict=True):
        ours[index].copy_(theirs[0].window.view(33, 40))
    new_p, new_q = filled.empty_factor(table.p, torch.bfloat16), filled.empty_factor(table.q, torch.bfloat16)
    project(filled.operands, q.window, new_p.window, scale=0.5)
    backproject(filled.operands, p.window, new_q.window, scale=0.5)
    reconstruct(filled.operands, p.window, q.window, filled.flags().window)
    return {
        "P": table.p.views(new_p.window)[index],
        "Q": table.q.views(new_q.window)[index],
        "result": filled.operands.target[index],
        "error": filled.operands.error[index],
    }


AROUND = {
    "alone": ((), ()),
    "first": ((), NEIGHBORS[1:]),
    "last": (NEIGHBORS[1:], ()),
    "between": ((Place(3, 5, 3),), (Place(40, 40, 33), Place(1, 1, 1))),
    "of rank 4 or less": ((Place(3, 5, 3),), (Place(1, 7, 1), Place(5, 31, 4))),
}


# Sums of small integers are exact in any order; the interpreter's numpy chooses that by the size of the tiles.
@pytest.mark.parametrize("kind", [pytest.param("normal", marks=on_the_cpu_path), "integers"])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_sizes_of_neighbors_do_not_change_bits(dtype, kind, device):
    # On a GPU, the largest rank of a bucket decides which kernel forms the products of all its matrices.
    names = ("alone", "of rank 4 or less") if kind == "normal" and device.type == "cuda" else tuple(AROUND)
    alone, *among = (results_among(AROUND[name], kind, dtype, device, 1) for name in names)
    for results in among:
        for part, expected in alone.items():
            # Zeros may differ in their signs.
            assert_same_bits(results[part] + 0.0, expected + 0.0, part)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("dtype", FP32_OR_SLOW, ids=name)
def test_non_finite_element_reaches_its_row_of_p_alone(dtype, poison, wire, device):
    bucket = Bucket(NEIGHBORS, wire=wire)
    clean = run(bucket, dtype, device)
    for matrix, row, column in ((0, 0, 0), (0, 32, 39), (1, 0, 6), (2, 39, 0)):
        hit = run(bucket, dtype, device, at=(matrix, row, column), poison=poison)
        for i, (before, after) in enumerate(zip(clean, hit, strict=True)):
            others = torch.arange(NEIGHBORS[i].rows) != (row if i == matrix else -1)
            assert_same_bits(after["P"][:, others], before["P"][:, others], f"other rows of P {i}")
            if i == matrix:
                assert not after["P"][:, row].isfinite().any(), "0 times it is not finite either"
            else:
                assert_same_results(after, before, f"neighbor {i}")


@pytest.mark.parametrize("part", ["source", "error"])
def test_non_finite_element_reaches_p_although_q_is_zero_there(part, device):
    filled = Bucket((Place(9, 6, 2), Place(5, 4, 2))).fill(torch.float32, device)
    getattr(filled.operands, part)[0][3, 2] = INF
    table = filled.table
    q, p = filled.factor(table.q, torch.float32), filled.empty_factor(table.p, torch.float32)
    table.q.views(q.window)[0][:, 2] = 0
    project(filled.operands, q.window, p.window, scale=1.0)
    finite = [view.isfinite().all(0).tolist() for view in table.p.views(p.window)]
    assert finite == [[row != 3 for row in range(9)], [True] * 5]


@pytest.mark.parametrize("reconstruct", [reconstruct, reconstruct_reference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep", [True, SLOW_FALSE], ids=["kept", "added again"])
@pytest.mark.parametrize("dtype", FP32_OR_SLOW, ids=name)
def test_reconstruct_with_cleared_flag_keeps_error_and_writes_nan(dtype, keep, reconstruct, device):
    bucket = Bucket((Place(7, 5, 2), Place(33, 40, 4, 1), Place(16, 9, 3)), keep=keep)

    def after(flags, poisoned):
        filled = bucket.fill(dtype, device)
        table = filled.table
        q, p = filled.factor(table.q, filled.compute), filled.factor(table.p, filled.compute)
        new_p = filled.empty_factor(table.p, filled.compute)
        project(filled.operands, q.window, new_p.window, scale=1.0)
        if poisoned == "p":  # as orthogonalization leaves it
            table.p.views(p.window)[1].fill_(NAN)
        if poisoned == "q":  # as the all-reduce leaves it
            table.q.views(q.window)[1][2, 30] = INF
        reconstruct(filled.operands, p.window, q.window, filled.flags(*flags).window)
        filled.assert_guards_untouched()
        return filled

    clean = after((1, 1, 1), None)
    # The flag decides, not the factors: another rank may have seen what this one has not.
    for flags, poisoned in (
        ((1, 0, 1), "p"),
        ((1, 0, 1), "q"),
        ((1, 0, 1), None),
        ((0, 1, 1), None),
        ((1, 1, 0), None),
        ((0, 0, 0), None),
    ):
        found = after(flags, poisoned)
        for i, flag in enumerate(flags):
            what = f"{i} with flags {flags}"
            if flag:
                assert_same_bits(found.operands.target[i], clean.operands.target[i], f"result {what}")
                assert_same_bits(found.operands.error[i], clean.operands.error[i], f"error {what}")
            else:
                assert found.operands.target[i].isnan().all(), what
                found.error[i].assert_untouched(f"error {what}")
