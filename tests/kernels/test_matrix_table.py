"""The layout of a bucket's matrices and factors, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import Matrix, MatrixTable, matrix_table
from tests.kernels.support.cases import PROPERTY
from tests.kernels.support.matrix_cases import places

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


def test_rows_beyond_32_bit_offsets_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(matrix_table, "use_triton", lambda device: True)
    longest = matrix_table.MAX_COLUMNS
    rows = max(matrix_table.ELEMENTWISE.rows, matrix_table.DOT.rows)
    assert rows * longest <= 2**31
    for columns in (longest, longest + 1):
        table = MatrixTable([Matrix(2, columns, 1)], torch.float32, torch.device("cpu"))
        assert table.can_use_triton() == (columns == longest)
