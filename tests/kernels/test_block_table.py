"""Block tables and message layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels import HEADER_BYTES, WIRE_FORMATS, BlockTable, MessageLayout
from tests.kernels.support.cases import PROPERTY


def empties(shapes, dtype=torch.float32):
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def table(*shapes, block_size=64, dtype=torch.float32):
    return BlockTable(empties(shapes, dtype), block_size, list(range(len(shapes))))


def test_every_tensor_starts_a_block():
    blocks = table((100,), (), (0, 5), (64,), (3, 50))
    assert blocks.lengths == [100, 1, 0, 64, 150]
    assert blocks.first_blocks == [0, 2, 3, 3, 4]
    assert (blocks.n_blocks, blocks.numel) == (7, 448)
    assert blocks.partial_blocks == [(1, 36), (2, 1), (6, 22)]
    assert blocks.partial_between(1, 6) == [(1, 36), (2, 1)]
    assert blocks.block_segments.tolist() == [0, 0, 1, 3, 4, 4, 4]
    assert blocks.block_segments.dtype == torch.int32


def test_complex_elements_count_twice():
    blocks = table((40,), dtype=torch.complex64)
    assert blocks.lengths == [80]
    assert blocks.dtype == torch.float32
    flat = torch.arange(128.0)
    (view,) = blocks.error_views(flat)
    assert view.shape == (40, 2)
    assert view[3].tolist() == [6, 7]


def test_error_views_have_shapes_and_strides_of_the_tensors():
    tensors = [torch.empty(5, 7), torch.empty(7, 5).t(), torch.empty(()), torch.empty(0, 2)]
    blocks = BlockTable(tensors, 32, [0, 0, 0, 0])
    flat = torch.arange(float(blocks.numel + 3))[3:]
    views = blocks.error_views(flat)
    assert [view.shape for view in views] == [tensor.shape for tensor in tensors]
    assert [view.stride() for view in views[:2]] == [(7, 1), (1, 5)]
    assert [view.flatten()[0].item() for view in views[:3]] == [3, 67, 131]
    views[2].fill_(-1)
    assert flat[128] == -1


def test_packed_table_has_first_blocks_and_keys():
    tensors = empties([(100,), (5000,)])
    blocks = BlockTable(tensors, 64, [7, -9])
    packed = blocks.segments.packed(tensors)
    assert packed[:2].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert packed[2:].tolist() == [100, 5000, 0, 2, 7, -9, 0, 1, 1, 0, 0, 4096]


@pytest.mark.parametrize("block_size", [0, 16, 48, 2048, -64])
def test_wrong_block_size_raises(block_size):
    with pytest.raises(ValueError, match="power of two from 32 to 1024"):
        table((5,), block_size=block_size)


GROUPS = st.lists(
    st.tuples(
        st.sampled_from(list(WIRE_FORMATS.values())),
        st.lists(st.integers(0, 3000), min_size=1, max_size=4),
        st.sampled_from((32, 64, 1024)),
    ),
    min_size=1,
    max_size=3,
)


@PROPERTY
@given(groups=GROUPS, world_size=st.integers(1, 9), pieces=st.integers(1, 3))
def test_parts_of_a_cell_are_aligned_and_disjoint_and_hold_all_blocks(groups, world_size, pieces):
    tables = [
        (wire, BlockTable(empties([(n,) for n in sizes]), size, [0] * len(sizes))) for wire, sizes, size in groups
    ]
    layout = MessageLayout(tables, world_size, pieces)
    assert layout.message_shape == (pieces, world_size, layout.cell_bytes)
    assert layout.result_shape == (pieces, layout.cell_bytes)
    assert layout.cell_bytes % 16 == 0
    end = HEADER_BYTES
    for section, (wire, block_table) in zip(layout.sections, tables, strict=True):
        assert section.format is wire
        assert section.scales_at % 16 == 0
        assert section.payload_at % 16 == 0
        assert section.scales_at >= end
        assert section.payload_at >= section.scales_at + section.blocks_per_cell * wire.scale_bytes
        end = section.payload_at + section.blocks_per_cell * wire.payload_bytes(block_table.block_size)
        ranges = [section.cell_blocks(cell) for cell in range(layout.n_cells)]
        assert [b for first, last in ranges for b in range(first, last)] == list(range(block_table.n_blocks))
        assert all(last - first <= section.blocks_per_cell for first, last in ranges)
        assert layout.shard_numel(section) == pieces * section.blocks_per_cell * block_table.block_size
    assert end <= layout.cell_bytes < end + 16


@pytest.mark.parametrize("world_size, pieces", [(0, 1), (2, 0)])
def test_message_without_cells_raises(world_size, pieces):
    with pytest.raises(ValueError, match="expected positive numbers"):
        MessageLayout([(WIRE_FORMATS["int4"], table((5,)))], world_size, pieces)


def test_message_without_groups_raises():
    with pytest.raises(ValueError, match="groups is empty"):
        MessageLayout([], 2)


def test_message_across_devices_raises():
    elsewhere = BlockTable([torch.empty(5, device="meta")], 64, [0])
    with pytest.raises(ValueError, match="a message lies on one device"):
        MessageLayout([(WIRE_FORMATS["int4"], table((5,))), (WIRE_FORMATS["bf16"], elsewhere)], 2)
