"""The layout of a bucket's matrices and factors, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import (
    FactorLayout,
    Matrix,
    MatrixTable,
    Operands,
    backproject,
    matrix_table,
    orthogonalize,
    project,
    reconstruct,
    renew,
)
from tests.kernels.cases import PROPERTY, name
from tests.kernels.matrix_cases import GRADIENTS, places

CPU = torch.device("cpu")


def table(*matrices, dtype=torch.float32):
    return MatrixTable([Matrix(*matrix) for matrix in matrices], dtype, CPU)


@PROPERTY
@given(drawn=st.lists(places(), min_size=1, max_size=8))
def test_views_are_disjoint_in_order_and_minimally_padded(drawn):
    layout = MatrixTable([Matrix(p.rows, p.columns, p.rank) for p in drawn], torch.float32, CPU)
    for factor, lengths in ((layout.p, [p.rows for p in drawn]), (layout.q, [p.columns for p in drawn])):
        buffer = torch.arange(factor.numel)
        views = factor.views(buffer)
        assert [tuple(view.shape) for view in views] == [(p.rank, n) for p, n in zip(drawn, lengths, strict=True)]
        end = 0
        for view, offset in zip(views, factor.offsets, strict=True):
            assert torch.equal(view.flatten(), torch.arange(offset, offset + view.numel())), "row after row"
            assert end <= offset < end + 16
            assert offset % 16 == 0
            end = offset + view.numel()
        assert end <= factor.numel < end + 16
        assert factor.has_gaps == (factor.numel != sum(view.numel() for view in views))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1000, 3), (3, 300_001), (1, 2**19), (2**19, 1), (700, 600)])
def test_scratch_holds_block_of_rows_of_each_matrix(shape):
    layout = table((2, 3, 1), (*shape, 1))
    scratch = layout.scratch[1]
    assert 1 <= len(scratch) <= shape[0]
    assert scratch.shape[1] == shape[1]
    assert len(scratch) == 1 or scratch.numel() <= 2**18
    assert len(scratch) == shape[0] or scratch.numel() > 2**17, "no smaller than it has to be"
    assert layout.scratch[0].shape == (2, 3)


def test_empty_table_raises():
    with pytest.raises(ValueError, match=r"at least one matrix; got an empty list"):
        MatrixTable([], torch.float32, CPU)


@pytest.mark.parametrize("rows, columns, rank", [(4, 6, 5), (6, 4, 5), (4, 6, 0), (4, 6, -1), (0, 6, 1), (6, 0, 0)])
def test_impossible_rank_raises(rows, columns, rank):
    message = rf"Matrix 1 is {rows} x {columns} with rank {rank}; expected 1 to min\(rows, columns\)"
    with pytest.raises(ValueError, match=message):
        table((2, 2, 1), (rows, columns, rank))


@pytest.mark.parametrize(
    "buffer, shape",
    [
        (torch.empty(31), r"\(31,\)"),
        (torch.empty(33), r"\(33,\)"),
        (torch.empty(0), r"\(0,\)"),
        (torch.empty(2, 16), r"\(2, 16\)"),
        (torch.empty(64)[::2], r"\(32,\)"),
    ],
    ids=["short", "long", "empty", "2-D", "strided"],
)
def test_misfitting_buffer_raises(buffer, shape):
    with pytest.raises(
        ValueError, match=rf"^the wire has shape {shape}; expected a contiguous 1-D tensor of 32 elements"
    ):
        FactorLayout([2, 1], [8, 16]).check(buffer, "the wire")


def operands(layout, *, keep=False, has_error=True, **replaced):
    def matrices(dtype):
        return [torch.empty(m.rows, m.columns, dtype=dtype) for m in layout.matrices]

    parts = {"source": matrices(layout.dtype), "target": matrices(layout.dtype)}
    parts["error"] = matrices(layout.compute) if has_error else None
    return Operands(layout, keep=keep, **{**parts, **replaced})


def check(layout, **options):
    operands(layout, **options).check(torch.empty(layout.p.numel), torch.empty(layout.q.numel))


@pytest.mark.parametrize("dtype", GRADIENTS, ids=name)
def test_keep_without_error_feedback_or_wide_target_raises(dtype):
    layout = table((2, 3, 1), dtype=dtype)
    message = rf"M can be kept only with error feedback and in {layout.compute}, not in {dtype}"
    with pytest.raises(ValueError, match=message):
        check(layout, keep=True, has_error=False)
    if dtype != layout.compute:
        with pytest.raises(ValueError, match=message):
            check(layout, keep=True)


MISFITS = {
    "transposed shape": (torch.empty(3, 2), r"torch\.float32 \(3, 2\) with strides \(2, 1\)"),
    "flat": (torch.empty(6), r"torch\.float32 \(6,\) with strides \(1,\)"),
    "strided": (torch.empty(3, 2).t(), r"torch\.float32 \(2, 3\) with strides \(1, 2\)"),
    "padded rows": (torch.empty(2, 4)[:, :3], r"torch\.float32 \(2, 3\) with strides \(4, 1\)"),
    "dtype": (torch.empty(2, 3, dtype=torch.int32), r"torch\.int32 \(2, 3\) with strides \(3, 1\)"),
}


@pytest.mark.parametrize("part", ["source", "target", "error"])
@pytest.mark.parametrize("misfit, found", MISFITS.values(), ids=MISFITS)
def test_matrix_of_wrong_layout_raises(misfit, found, part):
    layout = table((4, 1, 1), (2, 3, 1))
    with pytest.raises(ValueError, match=rf"Matrix 1 is {found}; expected a contiguous torch\.float32 \(2, 3\)"):
        check(layout, **{part: [torch.empty(4, 1), misfit]})


# Each function, with the names of its packed factors.
CALLS = {
    project: ("q", "p"),
    backproject: ("p", "q"),
    reconstruct: ("p", "q"),
    orthogonalize: ("wire", "out"),
    renew: ("wire", "following"),
}


def call(function, matrices, factors):
    """Call a function on the matrices of an `Operands`, or on factors of the same layout."""
    layout, finite = matrices.table, torch.ones(1, dtype=torch.int32)
    if function in (project, backproject):
        function(matrices, *factors, scale=1.0)
    elif function is reconstruct:
        function(matrices, *factors, finite)
    elif function is orthogonalize:
        function(factors[0], layout.p, factors[1], finite)
    else:
        function(factors[0], layout.p, [0], torch.zeros(1, dtype=torch.int64), factors[1], finite)


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_misfitting_factor_raises_before_anything_is_written(function, which):
    layout, parameter = table((5, 5, 2)), CALLS[function][which]
    factors = [torch.full((16,), 3.0) for _ in range(2)]
    factors[which] = torch.full((17,), 3.0)
    matrices = operands(layout)
    with pytest.raises(ValueError, match=rf"^{parameter} has shape \(17,\); expected .* of 16 elements"):
        call(function, matrices, factors)
    assert all((factor == 3).all() for factor in factors)


def test_rows_beyond_32_bit_offsets_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(matrix_table, "use_triton", lambda device: True)
    longest = matrix_table.MAX_COLUMNS
    rows = max(matrix_table.ELEMENTWISE.rows, matrix_table.DOT.rows)
    assert rows * longest <= 2**31
    for columns in (longest, longest + 1):
        table = MatrixTable([Matrix(2, columns, 1)], torch.float32, torch.device("cpu"))
        assert table.can_use_triton() == (columns == longest)
