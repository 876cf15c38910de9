"""Block tables: the gradients of a bucket as blocks, and where each block lies in a message.

A tensor's elements, in the order of its memory, are cut into *blocks* of `block_size`. Every tensor starts a block of
its own, so its blocks do not depend on the rest of the bucket; its last block may be partial. The tensors that share a
wire format are a *section*. The blocks of a section are dealt to pieces * world_size *cells* in order, and cell
piece * world_size + shard of every section belongs to rank `shard`, which reduces it. A message is uint8,
[pieces, world_size, cell_bytes]; a cell is

    header (int32 flag, int32 stamp, 8 unused bytes)
    | for each section: scales of its blocks | payloads of its blocks

where each part begins at a multiple of 16 bytes. The last cells of a section may lack blocks, down to none at all;
their bytes are not written.

A kernel reads one packed int64 table per section,

    addresses[S] | lengths[S] | first_blocks[S] | keys[S] | chunk_segment[C] | chunk_start[C]

for S tensors (segments), cut into C chunks of at most ``CHUNK_NUMEL`` elements, which `load_chunk` decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.kernels.layouts import real_numel
from gradwire.kernels.segment_table import Run, SegmentTable, cut_runs
from gradwire.kernels.uploads import upload
from gradwire.kernels.wire_formats import SCALE_BYTES, Blocks, WireFormat

HEADER_BYTES = 16
ALIGN_BYTES = 16
# Elements that the CPU paths handle at once: 2 MiB of fp32 in each of two scratch buffers, which stay in the last level
# of the cache. Smaller runs would fit the second level, but pay more for calls: 0.1 ms a run.
RUN_NUMEL = 1 << 19
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 1024


class BlockTable:
    """The layout of dense tensors of one dtype and device as blocks.

    A table serves every list of tensors with the shapes, strides, dtype and device that it was built from, on one
    stream.

    Args:
        tensors: the list to describe. Only their layouts are kept.
        block_size: elements of a block: a power of two from 32 to 1024.
        keys: key of each tensor's random numbers, a signed 64-bit number (`random_key`).

    Attributes:
        segments: the tensors, without blocks.
        dtype: dtype of the tensors' real elements; a complex element counts twice.
        lengths: the number of real elements of each tensor.
        first_blocks: the number of blocks before each tensor.
        n_blocks: number of blocks of all tensors.
        numel: elements of all blocks, missing ones included: the size of an error memory.
        n_chunks: the number of programs of a kernel.

    Raises:
        ValueError: `SegmentTable` refuses the tensors, or the block size or the number of keys is wrong.
    """

    def __init__(self, tensors: Sequence[Tensor], block_size: int, keys: Sequence[int]) -> None:
        if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size is {block_size}; expected a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}. "
                "64 is a good choice for int4."
            )
        if len(keys) != len(tensors):
            raise ValueError(f"Got {len(keys)} keys for {len(tensors)} tensors. Pass one for each.")
        self.block_size = block_size
        self.keys = list(keys)
        self.block_counts = [-(-real_numel(tensor) // block_size) for tensor in tensors]
        self.first_blocks = [0, *accumulate(self.block_counts)][:-1]
        self.n_blocks = sum(self.block_counts)
        self.numel = self.n_blocks * block_size
        self.segments = SegmentTable(tensors, [self.first_blocks, self.keys])
        self.device, self.dtype = self.segments.device, self.segments.dtype
        self.lengths, self.n_chunks = self.segments.lengths, self.segments.n_chunks

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def layout(self) -> Tensor:
        """Lengths, first blocks and keys of the tensors, on the device: int64 [3, S]."""
        return upload([*self.lengths, *self.first_blocks, *self.keys], self.device).view(3, -1)

    @cached_property
    def block_segments(self) -> Tensor:
        """The index of each block's tensor, on the device: [n_blocks], int32."""
        indices = torch.arange(len(self), dtype=torch.int32, device=self.device)
        counts = upload(self.block_counts, self.device)
        return indices.repeat_interleave(counts, output_size=self.n_blocks)  # with its size, no synchronization

    def blocks(self, first: int, last: int) -> Blocks:
        """The blocks ``first`` to ``last - 1``, on the device."""
        segments = self.block_segments[first:last].long()
        lengths, first_blocks, keys = self.layout[:, segments]
        starts = (torch.arange(first, last, device=self.device) - first_blocks) * self.block_size
        return Blocks((lengths - starts).clamp(max=self.block_size), keys, starts)

    @cached_property
    def partial_blocks(self) -> list[tuple[int, int]]:
        """The blocks with missing elements, in order: the number of the block, and of its elements."""
        layout = zip(self.first_blocks, self.lengths, strict=True)
        return [(first + n // self.block_size, n % self.block_size) for first, n in layout if n % self.block_size]

    def partial_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The `partial_blocks` from ``first`` to ``last - 1``."""
        blocks = self.partial_blocks
        return blocks[bisect_left(blocks, (first, 0)) : bisect_left(blocks, (last, 0))]

    @cached_property
    def runs(self) -> list[Run]:
        """All blocks, in order, cut into runs of at most ``RUN_NUMEL`` elements."""
        return cut_runs(self.block_counts, RUN_NUMEL // self.block_size)

    def error_views(self, flat: Tensor) -> list[Tensor]:
        """Views of an error memory, [numel], in the shapes and strides of the tensors; complex ones as real pairs."""
        starts = [first * self.block_size for first in self.first_blocks]
        return [self.segments.view(i, flat, start) for i, start in enumerate(starts)]


@dataclass(eq=False)
class Section:
    """The part of a message that one group of tensors takes, in every cell.

    Attributes:
        table: the blocks.
        format: their encoding.
        blocks_per_cell: how many blocks a cell has room for.
        scales_at: where the scales of the cell's blocks begin, in bytes from the start of the cell.
        payload_at: where their payloads begin.
    """

    table: BlockTable
    format: WireFormat
    blocks_per_cell: int
    scales_at: int
    payload_at: int

    def cell_blocks(self, cell: int) -> tuple[int, int]:
        """The first block of a cell, and one past its last. They are equal if the cell is empty."""
        n_blocks = self.table.n_blocks
        first = cell * self.blocks_per_cell
        return min(first, n_blocks), min(first + self.blocks_per_cell, n_blocks)

    def views(self, cells: Tensor) -> tuple[Tensor | None, Tensor]:
        """Views of the section in ``cells``, [cells, cell_bytes].

        Returns:
            The scales, [cells, blocks_per_cell] in bf16 (None if the format has none), and the payloads, [cells,
            blocks_per_cell, bytes] in uint8.
        """
        count, width = self.blocks_per_cell, self.payload_bytes
        payload = cells[:, self.payload_at : self.payload_at + count * width].view(len(cells), count, width)
        if not self.format.is_scaled:
            return None, payload
        return cells[:, self.scales_at : self.scales_at + count * SCALE_BYTES].view(torch.bfloat16), payload

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block's payload."""
        return self.format.payload_bytes(self.table.block_size)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class MessageLayout:
    """The layout of a message.

    Args:
        groups: the tensors of each wire format. A table whose tensors are all empty is a section without blocks.
        world_size: the number of ranks.
        pieces: messages per shot.
        multiple: the number of blocks of each section in a cell is rounded up to a multiple of it.

    Attributes:
        sections: one for each group.
        cell_bytes: the size of a cell, a multiple of 16.
        n_cells: pieces * world_size.
        message_shape: shape of a message, in uint8: sent and received in the first shot, gathered in the second.
        result_shape: shape of one rank's reduced cells, which it sends in the second shot, in uint8.

    Raises:
        ValueError: there are no groups, the world size or the number of pieces is not positive, or devices differ.
    """

    def __init__(
        self, groups: Sequence[tuple[WireFormat, BlockTable]], world_size: int, pieces: int = 1, multiple: int = 1
    ) -> None:
        if not groups:
            raise ValueError("groups is empty; a message needs at least one wire format and its block table.")
        if world_size < 1 or pieces < 1:
            raise ValueError(f"world_size is {world_size} and pieces is {pieces}; expected positive numbers.")
        devices = {table.device for _, table in groups}
        if len(devices) > 1:
            raise ValueError(f"The groups are on {sorted(map(str, devices))}; a message lies on one device.")
        self.world_size, self.pieces = world_size, pieces
        self.n_cells = pieces * world_size
        self.sections: list[Section] = []
        at = HEADER_BYTES
        for wire, table in groups:
            blocks = -(-table.n_blocks // (self.n_cells * multiple)) * multiple
            payload_at = _aligned(at + blocks * wire.scale_bytes)
            self.sections.append(Section(table, wire, blocks, at, payload_at))
            at = _aligned(payload_at + blocks * wire.payload_bytes(table.block_size))
        self.cell_bytes = at
        self.message_shape = (pieces, world_size, at)
        self.result_shape = (pieces, at)

    def shard_numel(self, section: Section) -> int:
        """Elements of one rank's cells: the size of the error memory of the second shot."""
        return self.pieces * section.blocks_per_cell * section.table.block_size
