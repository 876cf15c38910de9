"""Block tables: the gradients of a bucket as blocks, and where each block lies in a message.

A tensor's elements, in the order of its memory, are cut into *blocks* of `block_size`. Every tensor starts a block of
its own, so its blocks do not depend on the rest of the bucket; its last block may be partial. The tensors that share a
wire format are a *section*. The blocks of a section are dealt to pieces * world_size *cells* in order, and cell
piece * world_size + shard of every section belongs to rank `shard`, which reduces it. A message is uint8,
[pieces, world_size, cell_bytes]; a cell is

    header: int32 flag, 12 unused bytes | for each section: scales of its blocks | payloads of its blocks

where each part begins at a multiple of 16 bytes. The last cells of a section may lack blocks, down to none at all;
their bytes are not written.

A kernel reads one packed int64 table per section,

    addresses[S] | lengths[S] | first_blocks[S] | keys[S] | chunk_segment[C] | chunk_start[C]

for S tensors (segments), cut into C chunks of at most ``CHUNK_NUMEL`` elements, which `load_block_chunk` decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.language import jit, tl
from gradwire.kernels.segment_table import SegmentTable
from gradwire.kernels.uploads import Upload, pinned
from gradwire.kernels.wire_formats import WireFormat

HEADER_BYTES = 16
ALIGN_BYTES = 16
# Elements that the CPU paths handle at once: 2 MiB of fp32 in each of two scratch buffers, which stay in the last level
# of the cache. Smaller runs would fit the second level, but pay more for calls: 0.1 ms a run.
RUN_NUMEL = 1 << 19
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 1024


@jit
def load_block_chunk(table_ptr, n_segments, n_chunks, chunk):
    """Decode one chunk of a packed `BlockTable`.

    Returns:
        The address, the length, the first block and the key of the chunk's segment, and the chunk's start within it.
    """
    chunks_ptr = table_ptr + 4 * n_segments  # [2, C]
    segment = tl.load(chunks_ptr + chunk)
    start = tl.load(chunks_ptr + n_chunks + chunk)
    address = tl.load(table_ptr + segment)
    length = tl.load(table_ptr + n_segments + segment)
    first_block = tl.load(table_ptr + 2 * n_segments + segment)
    key = tl.load(table_ptr + 3 * n_segments + segment)
    return address, length, first_block, key, start


class Blocks(NamedTuple):
    """Contents of consecutive blocks: int64, one element per block.

    Attributes:
        counts: the number of elements.
        keys: the key of the tensor.
        starts: the index, in the tensor's memory order, of the first element.
    """

    counts: Tensor
    keys: Tensor
    starts: Tensor


class Run(NamedTuple):
    """Consecutive blocks that the CPU paths handle at once: of several whole tensors, or of a piece of a large one."""

    first: int  # index of the first tensor
    last: int  # one past the index of the last tensor
    first_block: int
    last_block: int  # one past the last block
    start: int  # the element of the first tensor at which the run begins
    is_piece: bool  # whether it is a piece of one tensor


class BlockTable:
    """The layout of dense tensors of one dtype and device as blocks.

    A table serves every list of tensors with the shapes, strides, dtype and device that it was built from, on one
    stream.

    Args:
        tensors: the list to describe. Only their layouts are kept.
        block_size: elements of a block: a power of two from 32 to 1024.
        keys: for each tensor, a signed 64-bit number that its random numbers depend on (`random_key`).

    Attributes:
        segments: the tensors, without blocks. `Fitting(tensors, table.segments)` passes `check` at once.
        dtype: of the tensors' real elements; a complex element counts twice.
        lengths: the number of real elements of each tensor.
        first_blocks: the number of blocks before each tensor.
        n_blocks: of all tensors.
        numel: elements of all blocks, missing ones included: the size of an error memory.
        n_chunks: the number of programs of a kernel.

    Raises:
        ValueError: as `SegmentTable`; or the block size or the number of keys is wrong.
    """

    def __init__(self, tensors: Sequence[Tensor], block_size: int, keys: Sequence[int]) -> None:
        if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size is {block_size}; expected a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}. "
                "64 is a good choice for int4."
            )
        if len(keys) != len(tensors):
            raise ValueError(f"Got {len(keys)} keys for {len(tensors)} tensors. Pass one for each.")
        self.segments = SegmentTable(tensors)
        self.block_size = block_size
        self.keys = list(keys)
        self.device, self.dtype = self.segments.device, self.segments.dtype
        self.lengths, self.n_chunks = self.segments.lengths, self.segments.n_chunks
        self.block_counts = [-(-length // block_size) for length in self.lengths]
        self.first_blocks = [0, *accumulate(self.block_counts)][:-1]
        self.n_blocks = sum(self.block_counts)
        self.numel = self.n_blocks * block_size
        self._addresses: list[int] = []  # as uploaded
        self._packed: Upload | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless ``tensors`` fit the table."""
        self.segments.check_tensors(tensors)

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """The packed int64 table on the device, with the addresses of ``tensors``, which must fit."""
        addresses = list(map(Tensor.data_ptr, tensors))
        if self._packed is None:
            rows = (addresses, self.lengths, self.first_blocks, self.keys, self.segments.chunks())
            self._packed = Upload([number for row in rows for number in row], self.device)
        elif addresses != self._addresses:
            self._packed.replace(addresses)
        self._addresses = addresses
        return self._packed.tensor

    @cached_property
    def layout(self) -> Tensor:
        """Lengths, first blocks and keys of the tensors, on the device: int64 [3, S]."""
        rows = [*self.lengths, *self.first_blocks, *self.keys]
        return pinned(rows, self.device).to(self.device, non_blocking=True).view(3, -1)

    @cached_property
    def block_segments(self) -> Tensor:
        """The index of each block's tensor, on the device: [n_blocks], int32."""
        counts = pinned(self.block_counts, torch.device("cpu"))
        indices = torch.arange(len(self), device="cpu").repeat_interleave(counts)
        host = indices.to(torch.int32)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

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
        start, stop = (bisect_left(self.partial_blocks, (block, 0)) for block in (first, last))
        return self.partial_blocks[start:stop]

    @cached_property
    def runs(self) -> list[Run]:
        """All blocks, in order, cut into runs of at most ``RUN_NUMEL`` elements."""
        runs: list[Run] = []
        room = RUN_NUMEL // self.block_size
        for i, (first, count) in enumerate(zip(self.first_blocks, self.block_counts, strict=True)):
            end = first + count
            if count > room:
                starts = range(first, end, room)
                runs += [Run(i, i + 1, at, min(at + room, end), (at - first) * self.block_size, True) for at in starts]
            elif runs and not runs[-1].is_piece and end - runs[-1].first_block <= room:
                runs[-1] = runs[-1]._replace(last=i + 1, last_block=end)
            else:
                runs.append(Run(i, i + 1, first, end, 0, False))
        return runs

    def error_views(self, flat: Tensor) -> list[Tensor]:
        """Views of an error memory, [numel], in the shapes and strides of the tensors; complex ones as real pairs."""
        return self.views(flat, 0, len(self))

    def views(self, flat: Tensor, first: int, last: int) -> list[Tensor]:
        """Views of the blocks of the tensors ``first`` to ``last - 1``, which ``flat`` holds, as in `error_views`."""
        base = self.first_blocks[first]
        starts = {i: (self.first_blocks[i] - base) * self.block_size for i in range(first, last)}
        return [self.segments.view(i, flat, start) for i, start in starts.items()]


@dataclass(frozen=True, eq=False)
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


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class MessageLayout:
    """Where everything lies in a message.

    Args:
        groups: the tensors of each wire format. A table whose tensors are all empty is a section without blocks.
        world_size: the number of ranks.
        pieces: the number of messages that a shot is cut into.

    Attributes:
        sections: one for each group.
        cell_bytes: the size of a cell, a multiple of 16.
        n_cells: pieces * world_size.

    Raises:
        ValueError: there are no groups, the world size or the number of pieces is not positive, or devices differ.
    """

    def __init__(self, groups: Sequence[tuple[WireFormat, BlockTable]], world_size: int, pieces: int = 1) -> None:
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
            blocks = -(-table.n_blocks // self.n_cells)
            payload_at = at + _aligned(blocks * wire.scale_bytes)
            self.sections.append(Section(table, wire, blocks, at, payload_at))
            at = payload_at + _aligned(blocks * wire.payload_bytes(table.block_size))
        self.cell_bytes = at

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """The shape of a message, in uint8: what is sent and received in the first shot, and gathered in the second."""
        return self.pieces, self.world_size, self.cell_bytes

    @property
    def result_shape(self) -> tuple[int, int]:
        """The shape of what one rank reduces and sends in the second shot, in uint8."""
        return self.pieces, self.cell_bytes

    def shard_numel(self, section: Section) -> int:
        """Elements of one rank's cells: the size of the error memory of the second shot."""
        return self.pieces * section.blocks_per_cell * section.table.block_size
