"""Quantization on CPUs: run by run, so that the scratch of each run stays in cache.

A byte is packed by float arithmetic, the sum of q_t 2^(t bits), a small integer, and converted once; the offset of the
codes is added to the byte. Unpacking moves each plane to the top of its byte, eight bytes at a time, where the
conversion from int8 extends its sign; the factor 2^(8 - bits) is divided out with the scale. All products are exact, so
fused multiply-adds, which vectorized loops contain and others do not, change nothing.

Other cases call the reference, run by run: fp8, an error memory in bf16, means of partial blocks,
and elements that are not finite or too large for their scale.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import frexp
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.block_table import MIN_BLOCK_SIZE, RUN_NUMEL, BlockTable, Section
from gradwire.kernels.segment_table import Run, memory_order
from gradwire.kernels.wire_formats import MIN_SCALE, Rounding, WireFormat, encode_with_errors


class Scratch(threading.local):
    """Memory of one thread for the longest run, kept: fresh memory costs a page fault every 4 KiB, 2 ms for a run."""

    memory = torch.empty(0, device="cpu")

    def allocate(self) -> Tensor:
        """The memory, uninitialized fp32: three tiles, and three columns of one element for each block."""
        if self.memory.numel() == 0:
            numel = 3 * RUN_NUMEL + 3 * RUN_NUMEL // MIN_BLOCK_SIZE
            self.memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self.memory


SCRATCH = Scratch()


class Part(NamedTuple):
    """The blocks of a run that lie in one cell."""

    cell: int
    slots: slice
    values: Tensor  # [n, block_size] fp32, in the scratch
    first: int  # number of the first block
    last: int  # one past the last
    is_whole: bool  # whether no element is missing


class Tile(NamedTuple):
    """A run of blocks, and its place in the scratch."""

    run: Run
    values: Tensor  # [n, block_size] fp32
    flat: Tensor  # the same, [n * block_size]
    views: list[Tensor]  # of ``flat``, in the shapes of the run's tensors; none for a slice of a tensor
    is_whole: bool  # whether no element is missing
    parts: list[Part]


# Arguments: values, [n, block_size]; scales, [n] bf16, or None; payload, [n, bytes] uint8; pending, [n, block_size].
Encoder = Callable[["Work", Tensor, Any, Tensor, Tensor | None], bool]
Decoder = Callable[["Work", Any, Tensor, Tensor], None]


class Work:
    """A section's code and its views of one thread's scratch, made once.

    Args:
        section: the section.
        memory: the scratch.

    Attributes:
        tiles: the runs of the section's table.
        values, codes, decoded: fp32 [n, block_size], for the longest run. All sections share this memory.
        found, scales, inverses: fp32 [n, 1]: absmax or mean, scale and its reciprocal.
        limit: largest magnitude of the gradients' dtype; None if no decoded number exceeds it.
    """

    def __init__(self, section: Section, memory: Tensor) -> None:
        table, wire = section.table, section.format
        size, room = table.block_size, section.blocks_per_cell
        self.section, self.wire, self.memory = section, wire, memory
        self.values, self.codes, self.decoded = memory[: 3 * RUN_NUMEL].view(3, -1, size)
        columns = memory[3 * RUN_NUMEL :].view(3, -1, 1)
        self.found, self.scales, self.inverses = columns[:, : RUN_NUMEL // size]
        self.tiles: list[Tile] = []
        for run in table.runs:
            values, cells, views = self.values[: run.stop - run.start], [], []
            flat = values.view(-1)
            if not run.is_slice:
                places = [(i, (table.first_blocks[i] - run.start) * size) for i in range(run.first, run.last)]
                views = [table.segments.view(i, flat, start) for i, start in places]
            for cell in range(run.start // room, -(-run.stop // room)):
                first, last = max(run.start, cell * room), min(run.stop, (cell + 1) * room)
                slots, blocks = (
                    slice(first - cell * room, last - cell * room),
                    slice(first - run.start, last - run.start),
                )
                cells.append(Part(cell, slots, values[blocks], first, last, not table.partial_between(first, last)))
            is_whole = not table.partial_between(run.start, run.stop)
            self.tiles.append(Tile(run, values, flat, views, is_whole, cells))
        # Codes are moved eight bytes at a time.
        is_wide = section.payload_bytes % 8 == 0
        self.encode = _ENCODERS[wire.kind] if is_wide else None
        self.encodes_partial = wire.kind in ("integers", "floats")
        self.decode = _DECODERS[wire.kind] if is_wide else _decode_by_reference
        is_exceeded = table.dtype.itemsize == 2 and table.dtype != wire.dtype
        self.limit = torch.finfo(table.dtype).max if is_exceeded else None


def _bind(section: Section) -> Work:
    """A new `Work` of a section, for this thread."""
    section.memory = SCRATCH.allocate()
    work = section.work = Work(section, section.memory)
    return work


def _encode_by_reference(
    work: Work,
    values: Tensor,  # [n, block_size] fp32
    first: int,
    scales: Tensor | None,  # [n] bf16
    payload: Tensor,  # [n, bytes] uint8
    pending: Tensor | None,  # [n, block_size]
    rounding: Rounding | None,
) -> bool:
    """Encode the blocks from ``first`` on, and write what encoding lost to ``pending``. Whether all are finite."""
    blocks = work.section.table.blocks(first, first + len(values))
    encoded_scales, encoded = encode_with_errors(values, blocks, work.wire, pending, rounding)
    payload.copy_(encoded)
    if scales is not None and encoded_scales is not None:
        scales.copy_(encoded_scales.squeeze(1))
    return bool(work.wire.is_finite(encoded_scales, encoded))


# The encoders below return False, with nothing done, if an element is not finite or a block is out of the ordinary.


def _round_scales(work: Work, found: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scales of blocks and their inverses, in scratch; None if one is not finite, or near the largest scale."""
    wire, n = work.wire, len(found)
    scale, inverse = work.scales[:n], work.inverses[:n]
    low, high = torch.aminmax(found)
    smallest, largest = low.item(), high.item()
    # Above this bound, the scale may be lowered and elements saturate. NaN fails the comparison.
    if not largest < wire.max_scale * wire.levels * 0.99:
        return None
    torch.div(found, wire.levels, out=scale)
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    if smallest < MIN_SCALE * 2 * wire.levels:
        scale.clamp_(min=MIN_SCALE)
    torch.reciprocal(scale, out=inverse)
    if smallest == 0:
        scale.masked_fill_(found == 0, 0)
        inverse.masked_fill_(found == 0, 0)
    return scale, inverse


def _encode_integers(work: Work, values: Tensor, scales: Any, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode to integers of two bits or more."""
    wire, n = work.wire, len(values)
    codes = torch.abs(values, out=work.codes[:n])
    rounded = _round_scales(work, torch.amax(codes, 1, keepdim=True, out=work.found[:n]))
    if rounded is None:
        return False
    scale, inverse = rounded
    torch.mul(values, inverse, out=codes).round_()
    if pending is not None:
        torch.addcmul(values, codes, scale, value=-1, out=pending)
    scales.copy_(scale.view(-1))
    _pack(wire, codes, payload)
    return True


def _encode_odd(work: Work, values: Tensor, scales: Any, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode whole blocks to odd numbers."""
    wire, n = work.wire, len(values)
    codes = torch.abs(values, out=work.codes[:n])
    rounded = _round_scales(work, torch.amax(codes, 1, keepdim=True, out=work.found[:n]))
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
    width, offset = payload.shape[1], wire.offset
    packed = numbers[:, :width]
    for plane in range(1, wire.planes):
        packed.add_(numbers[:, plane * width : (plane + 1) * width], alpha=1 << plane * wire.bits)
        offset += wire.offset << plane * wire.bits
    payload.view(torch.int8).copy_(packed)
    if offset:
        payload.add_(offset)


def _encode_signs(work: Work, values: Tensor, scales: Any, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode whole blocks to signs."""
    n, half = values.shape
    folded = torch.abs(values, out=work.codes[:n]).mul_(1 / half)
    while half > 1:
        half //= 2
        folded[:, :half] += folded[:, half : 2 * half]
    rounded = _round_scales(work, work.found[:n].copy_(folded[:, :1]))
    if rounded is None:
        return False
    scale, _ = rounded
    positive = values >= 0
    if pending is not None:
        torch.sub(values, torch.where(positive, scale, -scale, out=work.codes[:n]), out=pending)
        pending += 0.0  # the error of -0 is 0
    scales.copy_(scale.view(-1))
    # Each plane is bytes of 0 or 1, so that a shift of eight of them stays within the bytes.
    planes = positive.view(torch.int64).view(n, 8, -1)
    packed = payload.view(torch.int64).copy_(planes[:, 0])
    for plane in range(1, 8):
        packed |= planes[:, plane] << plane
    return True


def _encode_floats(work: Work, values: Tensor, scales: Any, payload: Tensor, pending: Tensor | None) -> bool:
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


def _decode_floats(work: Work, scales: Any, payload: Tensor, out: Tensor) -> None:
    out.copy_(payload.view(work.wire.dtype))


def _decode_codes(work: Work, scales: Any, payload: Tensor, out: Tensor) -> None:
    wire, (n, width) = work.wire, payload.shape
    scale = work.scales[:n].copy_(scales.unsqueeze(1))
    if wire.planes == 1:
        out.copy_(payload.view(torch.int8)).mul_(scale)
        return
    codes = payload.view(torch.int64)
    plane = work.codes.view(torch.int8).view(-1)[: n * width].view(n, width)
    words = plane.view(torch.int64)
    # Odd numbers take a bit more, because they are codes plus a half: -64 and 64 are signs.
    scale.mul_(2.0 ** (wire.bits - 8) * wire.spacing)
    # The same byte eight times: the top bits, and what turns codes into two's complement.
    top = int.from_bytes(bytes([256 - (1 << 8 - wire.bits)] * 8), "little", signed=True)
    middle = int.from_bytes(bytes([0x80 | wire.spacing - 1 << 7 - wire.bits] * 8), "little", signed=True)
    for i in range(wire.planes):
        torch.bitwise_left_shift(codes, 8 - (i + 1) * wire.bits, out=words)
        words.bitwise_and_(top).bitwise_xor_(middle)
        out[:, i * width : (i + 1) * width].copy_(plane)
    out.mul_(scale)


def _decode_by_reference(work: Work, scales: Any, payload: Tensor, out: Tensor) -> None:
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


def _slice(tensors: Sequence[Tensor], table: BlockTable, run: Run, numel: int) -> Tensor:
    """The elements of a run that is a slice of one tensor, at most ``numel``."""
    start = (run.start - table.first_blocks[run.first]) * table.block_size
    return memory_order(tensors[run.first])[start : start + numel]


def quantize_cpu(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    scale: float,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`quantize` on a CPU."""
    table, size = section.table, section.table.block_size
    work = section.work if section.memory is SCRATCH.memory else _bind(section)
    scales, payload = section.views(message.flatten(0, 1))
    encode = work.encode if pending is None or pending.dtype == torch.float32 else None
    pending = None if pending is None else pending.view(-1, size)
    tensors = table.segments.real(tensors) if table.segments.is_complex else list(tensors)
    for run, _, flat, views, is_whole, parts in work.tiles:
        error = None if errors is None else errors[run.start * size : run.stop * size]
        if not run.is_slice:
            if not is_whole:
                flat.zero_()
            torch._foreach_copy_(views, tensors[run.first : run.last])
            flat.mul_(scale)
        else:
            source = _slice(tensors, table, run, flat.numel())
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
        for cell, slots, blocks, first, last, part_is_whole in parts:
            part = (
                None if scales is None else scales[cell, slots],
                payload[cell, slots],
                None if pending is None else pending[first:last],
            )
            is_done = encode is not None and (work.encodes_partial or part_is_whole) and encode(work, blocks, *part)
            if not is_done:
                _encode_by_reference(work, blocks, first, *part, rounding)


def reduce_quantized_cpu(
    received: Tensor,
    section: Section,
    result: Tensor,
    rank: int,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`reduce_quantized` on a CPU."""
    table, room = section.table, section.blocks_per_cell
    work = section.work if section.memory is SCRATCH.memory else _bind(section)
    pieces, world_size, _ = received.shape
    scales, payload = section.views(result)
    encode = work.encode if pending is None or pending.dtype == torch.float32 else None
    errors = None if errors is None else errors.view(pieces, room, -1)
    pending = None if pending is None else pending.view(pieces, room, -1)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        if pending is not None:
            pending[piece, last - first :].zero_()
        sent_scales, sent_payload = section.views(received[piece])
        is_finite = True
        for start in range(first, last, len(work.values)):
            stop = min(start + len(work.values), last)
            slots = slice(start - first, stop - first)
            total = _sum_cells(work, sent_scales, sent_payload, slots, work.values[: stop - start])
            if errors is not None:
                total += errors[piece, slots]
            partial = table.partial_between(start, stop) if table.partial_blocks else ()
            for block, count in partial:
                total[block - start, count:] = 0
            part = (
                None if scales is None else scales[piece, slots],
                payload[piece, slots],
                None if pending is None else pending[piece, slots],
            )
            is_done = encode is not None and (work.encodes_partial or not partial) and encode(work, total, *part)
            is_finite &= is_done or _encode_by_reference(work, total, start, *part, rounding)
        if not is_finite:
            result[piece, :4].view(torch.int32).fill_(1)


def _sum_cells(work: Work, scales: Tensor | None, payload: Tensor, slots: slice, total: Tensor) -> Tensor:
    """``total`` = the sum of the blocks in these slots of all cells of a piece, in rank order."""
    total.zero_()
    contribution = work.decoded[: len(total)]
    for peer in range(len(payload)):
        work.decode(work, None if scales is None else scales[peer, slots], payload[peer, slots], contribution)
        total += contribution
    return total


def sum_quantized_cpu(received: Tensor, section: Section, total: Tensor, rank: int) -> None:
    """`sum_quantized` on a CPU."""
    table = section.table
    work = section.work if section.memory is SCRATCH.memory else _bind(section)
    pieces, world_size, _ = received.shape
    sums = total.view(pieces, section.blocks_per_cell, table.block_size)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        scales, payload = section.views(received[piece])
        for start in range(first, last, len(work.values)):
            slots = slice(start - first, min(start + len(work.values), last) - first)
            _sum_cells(work, scales, payload, slots, sums[piece, slots])
        for block, count in table.partial_between(first, last):
            sums[piece, block - first, count:] = 0
        sums[piece, last - first :].zero_()


def dequantize_cpu(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` on a CPU."""
    table = section.table
    work = section.work if section.memory is SCRATCH.memory else _bind(section)
    scales, payload = section.views(gathered.flatten(0, 1))
    tensors = table.segments.real(tensors) if table.segments.is_complex else list(tensors)
    for run, values, flat, views, _, parts in work.tiles:
        target = None
        if run.is_slice:
            target = _slice(tensors, table, run, flat.numel())
            if target.dtype == torch.float32 and target.numel() == flat.numel():
                values, target = target.view_as(values), None
        for cell, slots, _, first, last, _ in parts:
            out = values[first - run.start : last - run.start]
            work.decode(work, None if scales is None else scales[cell, slots], payload[cell, slots], out)
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
