"""Quantization on CPUs: run by run, so that the scratch of each run stays in cache.

Packing: sum q_t 2^(t bits) in fp32 (exact), convert once, add the offset. Unpacking: shift a code to the top of its
byte, eight bytes at a time, read it as int8 (which extends the sign), divide by 2^(8 - bits) in the scale. All products
are exact, so fused multiply-adds, which vectorized loops contain and others do not, change nothing. Words of several
bytes go through int32; fp32 holds their sums, below 2^24.

Other cases call the reference, run by run: fp8, an error memory in bf16, signs of partial blocks,
and elements that are not finite or too large for their scale.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from math import frexp
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradwire.kernels.block_table import HEADER_BYTES, MIN_BLOCK_SIZE, RUN_NUMEL, BlockTable, Section
from gradwire.kernels.layouts import memory_order
from gradwire.kernels.segment_table import Run
from gradwire.kernels.wire_formats import MIN_SCALE, Rounding, Signs, WireFormat, encode_with_errors


class Scratch(threading.local):
    """Memory of one thread for the longest run, kept: fresh memory costs a page fault every 4 KiB, 2 ms for a run.

    Attributes:
        works: the `Work` of each section that the thread has met.
    """

    def __init__(self) -> None:
        self.works: WeakKeyDictionary[Section, Work] = WeakKeyDictionary()

    @cached_property
    def memory(self) -> Tensor:
        """Uninitialized fp32: three tiles, one of bytes, and three columns of one element for each block."""
        numel = 3 * RUN_NUMEL + RUN_NUMEL // 4 + 3 * RUN_NUMEL // MIN_BLOCK_SIZE
        return torch.empty(numel, dtype=torch.float32, device="cpu")


SCRATCH = Scratch()


class Part(NamedTuple):
    """Consecutive blocks of one cell."""

    cell: int
    scales: slice  # bytes of their scales in the cell; none if the format has no scales
    payload: slice  # bytes of their payloads
    slots: slice  # their places in the cell
    blocks: slice  # their numbers
    values: Tensor  # [n, block_size] fp32, in the scratch
    missing: list[tuple[int, int]]  # rows of ``values`` with missing elements, and the number of their elements


class Tile(NamedTuple):
    """A run of blocks, and its place in the scratch."""

    run: Run
    flat: Tensor  # [n * block_size] fp32
    views: list[Tensor]  # of ``flat``, in the shapes of the run's tensors; none for a slice of a tensor
    parts: list[Part]


# Arguments: values, [n, block_size] fp32; scales, [n] bf16; payload, [n, bytes] uint8; pending, [n, block_size].
Encoder = Callable[["Work", Tensor, Tensor, Tensor, Tensor | None], bool]
Decoder = Callable[["Work", Tensor, Tensor, Tensor], None]


class Work:
    """A section's code and its views of one thread's scratch, made once.

    Args:
        section: the section.
        memory: the scratch.

    Attributes:
        tiles: the runs of the section's table.
        shards: the blocks of each cell that this rank has reduced, by cell; see `shard`.
        codes, decoded: fp32 [n, block_size], for the longest run, next to the values. All sections share this memory.
        bytes: int8 [n, block_size], also for the longest run.
        shifts: int64 [planes, 1]: what moves each plane to the top of its byte.
        found, scales, inverses: fp32 [n, 1]: absmax, scale and its reciprocal.
        encode: the format's encoder; None: the reference.
        encodes_partial: whether it encodes blocks with missing elements.
        decode: the format's decoder.
        payload_bytes: bytes of one block's payload.
        limit: largest number of the gradients' dtype; None if no decoded number exceeds it.
    """

    def __init__(self, section: Section, memory: Tensor) -> None:
        table, wire, room = section.table, section.format, section.blocks_per_cell
        self.table, self.wire = table, wire  # not the section, on whose life this object depends
        tiles, plane_bytes, columns = memory.split([3 * RUN_NUMEL, RUN_NUMEL // 4, 3 * RUN_NUMEL // MIN_BLOCK_SIZE])
        self._values, self.codes, self.decoded = tiles.view(3, -1, table.block_size)
        self.bytes = plane_bytes.view(torch.int8).view(-1, table.block_size)
        columns = columns.view(3, -1, 1)
        self.found, self.scales, self.inverses = columns[:, : RUN_NUMEL // table.block_size]
        self.shards: dict[int, list[Part]] = {}
        self.tiles: list[Tile] = []
        for run in table.runs:
            flat = self._values[: run.stop - run.start].view(-1)
            tensors = range(run.first, 0 if run.is_slice else run.last)
            starts = [(table.first_blocks[i] - run.start) * table.block_size for i in tensors]
            views = [table.segments.view(i, flat, start) for i, start in zip(tensors, starts, strict=True)]
            cells = range(run.start // room, -(-run.stop // room))
            ends = [(cell, max(run.start, cell * room), min(run.stop, (cell + 1) * room)) for cell in cells]
            self.tiles.append(Tile(run, flat, views, [self._part(section, *end, run.start) for end in ends]))
        self.payload_bytes = section.payload_bytes
        self.shifts = 8 - wire.bits * torch.arange(1, wire.planes + 1, device="cpu").view(-1, 1)
        is_wide = self.payload_bytes % 8 == 0  # codes are moved eight bytes at a time
        self.encode = _ENCODERS[wire.kind] if is_wide else None
        self.encodes_partial = wire.kind in ("integers", "floats")
        self.decode = _DECODERS[wire.kind] if is_wide else _decode_by_reference
        is_exceeded = table.dtype.itemsize == 2 and table.dtype != wire.dtype
        self.limit = torch.finfo(table.dtype).max if is_exceeded else None

    def _part(self, section: Section, cell: int, first: int, last: int, start: int) -> Part:
        """The blocks ``first`` to ``last - 1``, in the scratch of a run that starts with the block ``start``."""
        slots = slice(first - cell * section.blocks_per_cell, last - cell * section.blocks_per_cell)
        widths = (section.scales_at, section.format.scale_bytes), (section.payload_at, section.payload_bytes)
        scales, payload = (slice(at + slots.start * width, at + slots.stop * width) for at, width in widths)
        missing = [(block - first, count) for block, count in section.table.partial_between(first, last)]
        values = self._values[first - start : last - start]
        return Part(cell, scales, payload, slots, slice(first, last), values, missing)

    def shard(self, section: Section, cell: int) -> list[Part]:
        """The blocks of a cell, in parts that fit the scratch. Kept in ``shards``."""
        first, last = section.cell_blocks(cell)
        room = len(self._values)
        ends = [(start, min(start + room, last)) for start in range(first, last, room)]
        self.shards[cell] = [self._part(section, cell, *end, end[0]) for end in ends]
        return self.shards[cell]


def _work(section: Section) -> Work:
    """A section's `Work` in this thread's scratch, made at its first use."""
    work = SCRATCH.works.get(section)
    if work is None:
        work = SCRATCH.works[section] = Work(section, SCRATCH.memory)
    return work


def _encode_part(
    work: Work,
    part: Part,
    cell: Tensor,  # [cell_bytes] uint8
    pending: Tensor | None,  # [n, block_size] fp32 or bf16
    rounding: Rounding | None,
) -> bool:
    """Encode a part's values into its cell, and write what encoding lost to ``pending``. Whether all are finite."""
    values = part.values
    scales, payload = cell[part.scales].view(torch.bfloat16), cell[part.payload].view(-1, work.payload_bytes)
    is_usual = (work.encodes_partial or not part.missing) and (pending is None or pending.dtype == torch.float32)
    if work.encode is not None and is_usual and work.encode(work, values, scales, payload, pending):
        return True
    blocks = work.table.blocks(part.blocks.start, part.blocks.stop)
    encoded_scales, encoded = encode_with_errors(values, blocks, work.wire, pending, rounding)
    payload.copy_(encoded)
    if encoded_scales is not None:
        scales.copy_(encoded_scales.squeeze(1))
    return bool(work.wire.is_finite(encoded_scales, encoded))


# The encoders below return False, with nothing done, if an element is not finite or a block is out of the ordinary.


def _round_scales(work: Work, found: Tensor, levels: int) -> tuple[Tensor, Tensor] | None:
    """``found / levels`` as scales, and their inverses, in scratch; None if one is not finite or near the largest."""
    wire, n = work.wire, len(found)
    scale, inverse = work.scales[:n], work.inverses[:n]
    low, high = torch.aminmax(found)
    smallest, largest = low.item(), high.item()
    # Above this bound, the scale may be lowered and elements saturate. NaN fails the comparison.
    if not largest < wire.max_scale * levels * 0.99:
        return None
    torch.div(found, levels, out=scale)
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    if smallest < MIN_SCALE * 2 * levels:
        scale.clamp_(min=MIN_SCALE)
    torch.reciprocal(scale, out=inverse)
    if smallest == 0:
        scale.masked_fill_(found == 0, 0)
        inverse.masked_fill_(found == 0, 0)
    return scale, inverse


def _encode_integers(work: Work, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode to integers of two bits or more."""
    wire, n = work.wire, len(values)
    top, bottom = torch.amax(values, 1, keepdim=True), torch.amin(values, 1, keepdim=True).neg_()
    rounded = _round_scales(work, torch.maximum(top, bottom, out=work.found[:n]), wire.levels)
    if rounded is None:
        return False
    sign = torch.where(top > bottom, -1.0, 1.0)
    scale, inverse = rounded[0].mul_(sign), rounded[1].mul_(sign)
    codes = torch.mul(values, inverse, out=work.codes[:n]).round_().clamp_(max=wire.levels - 1)
    if pending is not None:
        torch.addcmul(values, codes, scale, value=-1, out=pending)
    scales.copy_(scale.view(-1))
    _pack(wire, codes, payload)
    return True


def _encode_odd(work: Work, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode whole blocks to odd numbers."""
    wire, n = work.wire, len(values)
    codes = torch.abs(values, out=work.codes[:n])
    rounded = _round_scales(work, torch.amax(codes, 1, keepdim=True, out=work.found[:n]), wire.levels)
    if rounded is None:
        return False
    scale, inverse = rounded
    torch.mul(values, inverse, out=codes).clamp_(-wire.levels, wire.levels).mul_(0.5).floor_()
    if pending is not None:
        codes.mul_(2).add_(1)
        torch.addcmul(values, codes, scale, value=-1, out=pending)
        pending += 0.0  # the error of -0 is 0
        codes.sub_(1).mul_(0.5)
    scales.copy_(scale.view(-1))
    _pack(wire, codes, payload)
    return True


def _pack(wire: WireFormat, numbers: Tensor, payload: Tensor) -> None:
    """Pack integers, or halves of odd ones, rounded down. ``numbers``, [n, block_size] fp32, are modified."""
    width, offset = payload.shape[1] // wire.word_bytes, wire.offset
    packed = numbers[:, :width]
    for plane in range(1, wire.planes):
        packed.add_(numbers[:, plane * width : (plane + 1) * width], alpha=1 << plane * wire.bits)
        offset += wire.offset << plane * wire.bits
    if wire.word_bytes > 1:
        words = packed.to(torch.int32).add_(offset)
        for part in payload.split(width, 1):
            part.copy_(words)  # the lowest byte
            words >>= 8
        return
    payload.view(torch.int8).copy_(packed)
    if offset:
        payload.add_(offset)


def _encode_signs(work: Work, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode whole blocks to signs."""
    n, block_size = values.shape
    multiples = torch.abs(values, out=work.codes[:n])
    largest = torch.amax(multiples, 1, keepdim=True, out=work.found[:n])
    rounded = _round_scales(work, largest, levels=1 << 14)
    if rounded is None:
        return False
    unit, inverse = rounded
    total = multiples.mul_(inverse).round_().sum(1, keepdim=True)
    squares = multiples.mul_(2.0**-7).round_().square_().sum(1, keepdim=True)
    units = Signs.units(total, squares, torch.full_like(total, block_size))
    scale = work.wire.round_scale(largest, unit * units)
    values += 0.0  # -0 becomes 0
    if pending is not None:
        torch.sub(values, torch.copysign(scale, values, out=work.codes[:n]), out=pending)
    scales.copy_(scale.view(-1))
    positive = torch.bitwise_right_shift(values.view(torch.int32), 31, out=work.codes[:n].view(torch.int32)).add_(1)
    # Each plane is bytes of 0 or 1, so that a shift of eight of them stays within the bytes.
    planes = work.bytes[:n].copy_(positive).view(torch.int64).view(n, 8, -1)
    packed = payload.view(torch.int64).copy_(planes[:, 0])
    for plane in range(1, 8):
        packed |= planes[:, plane] << plane
    return True


def _encode_floats(work: Work, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode without scales."""
    dtype = work.wire.dtype
    limit = torch.finfo(dtype).max
    low, high = torch.aminmax(values)
    if not (-limit <= low.item() and high.item() <= limit):
        return False
    encoded = payload.view(dtype).copy_(values)
    if pending is not None:
        torch.sub(values, work.codes[: len(values)].copy_(encoded), out=pending)
    return True


def _decode_floats(work: Work, scales: Tensor, payload: Tensor, out: Tensor) -> None:
    out.copy_(payload.view(work.wire.dtype))


def _decode_codes(work: Work, scales: Tensor, payload: Tensor, out: Tensor) -> None:
    wire, (n, width) = work.wire, payload.shape
    scale = work.scales[:n].copy_(scales.unsqueeze(1))
    if wire.planes == 1:
        out.copy_(payload.view(torch.int8)).mul_(scale)
        return
    if wire.word_bytes > 1:
        width //= wire.word_bytes
        word, *higher_bytes = payload.to(torch.int32).split(width, 1)
        for i, byte in enumerate(higher_bytes, 1):
            word += byte << 8 * i
        for i in range(wire.planes):
            out[:, i * width : (i + 1) * width].copy_(word >> i * wire.bits & (1 << wire.bits) - 1)
        out.sub_(wire.offset).mul_(scale)
        return
    planes = work.bytes[:n]
    words = planes.view(torch.int64).view(n, wire.planes, -1)
    # Odd numbers take a bit more, because they are codes plus a half: -64 and 64 are signs.
    scale.mul_(2.0 ** (wire.bits - 8) * wire.spacing)
    # The same byte eight times: the top bits, and what turns codes into two's complement.
    top = int.from_bytes(bytes([256 - (1 << 8 - wire.bits)] * 8), "little", signed=True)
    middle = int.from_bytes(bytes([0x80 | wire.spacing - 1 << 7 - wire.bits] * 8), "little", signed=True)
    torch.bitwise_left_shift(payload.view(torch.int64).unsqueeze(1), work.shifts, out=words)
    words.bitwise_and_(top).bitwise_xor_(middle)
    out.copy_(planes).mul_(scale)


def _decode_by_reference(work: Work, scales: Tensor, payload: Tensor, out: Tensor) -> None:
    out.copy_(work.wire.decode(scales.unsqueeze(1), payload))


_ENCODERS: dict[str, Encoder | None] = {
    "integers": _encode_integers,
    "odd integers": _encode_odd,
    "signs": _encode_signs,
    "e4m3fn": None,
    "floats": _encode_floats,
}
_DECODERS: dict[str, Decoder] = {
    "integers": _decode_codes,
    "odd integers": _decode_codes,
    "signs": _decode_codes,
    "e4m3fn": _decode_by_reference,
    "floats": _decode_floats,
}


def _sliced_blocks(tensors: Sequence[Tensor], table: BlockTable, run: Run, numel: int) -> Tensor:
    """The elements of a run of blocks that is a slice of one tensor, at most ``numel``."""
    start = (run.start - table.first_blocks[run.first]) * table.block_size
    return memory_order(tensors[run.first])[start : start + numel]


def quantize_cpu(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    scale: float,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
    cleared: Tensor | None = None,
) -> None:
    """`quantize` on a CPU."""
    if cleared is not None:
        cleared[:, :HEADER_BYTES].zero_()
    table, size = section.table, section.table.block_size
    work = _work(section)
    cells = message.flatten(0, 1)
    pending = None if pending is None else pending.view(-1, size)
    tensors = table.segments.real(tensors) if table.segments.is_complex else list(tensors)
    for run, flat, views, parts in work.tiles:
        error = None if errors is None else errors[run.start * size : run.stop * size]
        if not run.is_slice:
            if len(table.partial_blocks) > 0:
                flat.zero_()
            torch._foreach_copy_(views, tensors[run.first : run.last])
            flat.mul_(scale)
        else:
            source = _sliced_blocks(tensors, table, run, flat.numel())
            present = flat[: source.numel()]
            flat[source.numel() :].zero_()
            if source.dtype != torch.float32:
                present.copy_(source).mul_(scale)
            elif error is None or frexp(scale)[0] != 0.5:
                torch.mul(source, scale, out=present)
            else:
                # One pass, rounded as two: a division by 1 / scale, unlike a product, is not fused with the addition.
                divisor = torch.tensor(1 / scale, device="cpu")
                torch.addcdiv(error[: source.numel()].to(torch.float32), source, divisor, out=present)
                error = None
        if error is not None:
            flat += error
        for part in parts:
            _encode_part(work, part, cells[part.cell], None if pending is None else pending[part.blocks], rounding)


def reduce_quantized_cpu(
    received: Tensor,
    section: Section,
    result: Tensor,
    rank: int,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """`reduce_quantized` on a CPU."""
    work = _work(section)
    pieces, world_size, _ = received.shape
    errors = None if errors is None else errors.view(pieces, section.blocks_per_cell, -1)
    pending = None if pending is None else pending.view(pieces, section.blocks_per_cell, -1)
    for piece in range(pieces):
        cell, n_blocks, is_finite = result[piece], 0, True
        own = piece * world_size + rank
        for part in work.shards.get(own) or work.shard(section, own):
            n_blocks, total = part.slots.stop, part.values
            _sum_cells(work, received[piece], part, total)
            if errors is not None:
                total += errors[piece, part.slots]
            for row, count in part.missing:
                total[row, count:] = 0
            after = None if pending is None else pending[piece, part.slots]
            is_finite &= _encode_part(work, part, cell, after, rounding)
        if pending is not None:
            pending[piece, n_blocks:].zero_()
        if not is_finite:
            cell[:4].view(torch.int32).fill_(1)


def _sum_cells(work: Work, cells: Tensor, part: Part, total: Tensor) -> None:
    """``total`` = the sum of the blocks of a part in all cells of a piece, in rank order."""
    total.zero_()
    contribution = work.decoded[: len(total)]
    for cell in cells:
        scales, payload = cell[part.scales].view(torch.bfloat16), cell[part.payload].view(-1, work.payload_bytes)
        work.decode(work, scales, payload, contribution)
        total += contribution


def sum_quantized_cpu(received: Tensor, section: Section, total: Tensor, rank: int) -> None:
    """`sum_quantized` on a CPU."""
    work = _work(section)
    pieces, world_size, _ = received.shape
    sums = total.view(pieces, section.blocks_per_cell, -1)
    for piece in range(pieces):
        n_blocks = 0
        own = piece * world_size + rank
        for part in work.shards.get(own) or work.shard(section, own):
            n_blocks, part_sums = part.slots.stop, sums[piece, part.slots]
            _sum_cells(work, received[piece], part, part_sums)
            for row, count in part.missing:
                part_sums[row, count:] = 0
        sums[piece, n_blocks:].zero_()


def dequantize_cpu(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` on a CPU."""
    table, work = section.table, _work(section)
    cells = gathered.flatten(0, 1)
    tensors = table.segments.real(tensors) if table.segments.is_complex else list(tensors)
    for run, flat, views, parts in work.tiles:
        values, target = flat, None
        if run.is_slice:
            target = _sliced_blocks(tensors, table, run, flat.numel())
            if target.dtype == torch.float32 and target.numel() == flat.numel():
                values, target = target, None
        blocks = values.view(-1, table.block_size)
        for part in parts:
            cell, out = cells[part.cell], blocks[part.blocks.start - run.start : part.blocks.stop - run.start]
            scales, payload = cell[part.scales].view(torch.bfloat16), cell[part.payload].view(-1, work.payload_bytes)
            work.decode(work, scales, payload, out)
        if work.limit is not None and section.format.is_scaled:
            values.clamp_(-work.limit, work.limit)  # NaN passes, and there is no inf
        elif work.limit is not None:
            values.copy_(torch.where(values.isfinite(), values.clamp(-work.limit, work.limit), values))
        if target is not None:
            target.copy_(flat[: target.numel()])
        elif not run.is_slice:
            torch._foreach_copy_(tensors[run.first : run.last], views)


def commit_errors_cpu(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """`commit_errors` on a CPU."""
    if not gathered[..., :4].any():
        errors.copy_(pending)
