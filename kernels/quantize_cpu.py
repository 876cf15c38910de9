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
from collections.abc import Sequence
from math import frexp
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.block_table import MIN_BLOCK_SIZE, RUN_NUMEL, BlockTable, Section
from gradwire.kernels.segment_table import Run, memory_order
from gradwire.kernels.wire_formats import MIN_SCALE, Rounding, WireFormat, decode, encode_with_errors


class Buffers(NamedTuple):
    """Scratch in fp32 for the blocks of a run: three tensors [n, block_size], then three [n, 1]."""

    values: Tensor
    codes: Tensor
    decoded: Tensor
    found: Tensor  # absmax or mean
    scales: Tensor
    inverses: Tensor


class Scratch(threading.local):
    """Memory of one thread for the longest run, kept: fresh memory costs a page fault every 4 KiB, 2 ms for a run."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._buffers: dict[int, Buffers] = {}  # by block size

    def buffers(self, block_size: int) -> Buffers:
        """Uninitialized buffers, which share their memory with those of other block sizes."""
        if block_size not in self._buffers:
            if self._memory is None:
                numel = 3 * RUN_NUMEL + 3 * RUN_NUMEL // MIN_BLOCK_SIZE
                self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
            tiles = self._memory[: 3 * RUN_NUMEL].view(3, -1, block_size)
            columns = self._memory[3 * RUN_NUMEL :].view(3, -1, 1)[:, : RUN_NUMEL // block_size]
            self._buffers[block_size] = Buffers(*tiles, *columns)
        return self._buffers[block_size]


SCRATCH = Scratch()


def _encode(
    section: Section,
    scratch: Buffers,
    values: Tensor,  # [n, block_size] fp32
    first_block: int,
    scales: Tensor | None,  # [n] bf16
    payload: Tensor,  # [n, bytes] uint8
    pending: Tensor | None,  # [n, block_size]
    rounding: Rounding | None,
) -> bool:
    """Encode consecutive blocks, and write what encoding lost to ``pending``. Whether all elements are finite."""
    wire, table, last_block = section.format, section.table, first_block + values.shape[0]
    if pending is None or pending.dtype == torch.float32:
        if scales is None:
            is_done = _encode_floats(wire, scratch, values, payload, pending)
        elif wire.is_integer:
            is_done = _encode_integers(wire, scratch, values, scales, payload, pending)
        else:
            is_whole = wire.is_odd and not table.partial_between(first_block, last_block)
            encode_whole = _encode_signs if wire.bits == 1 else _encode_odd
            is_done = is_whole and payload.shape[1] % 8 == 0
            is_done = is_done and encode_whole(wire, scratch, values, scales, payload, pending)
        if is_done:
            return True
    blocks = table.blocks(first_block, last_block)
    encoded_scales, encoded = encode_with_errors(values, blocks, wire, pending, rounding)
    payload.copy_(encoded)
    if scales is None or encoded_scales is None:
        return bool(values.isfinite().all())
    scales.copy_(encoded_scales.squeeze(1))
    return not scales.isnan().any()


def _round_scales(wire: WireFormat, scratch: Buffers, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scales of blocks and their inverses, in scratch; None if one is not finite, or near the largest scale."""
    n, half = values.shape
    magnitudes, found = torch.abs(values, out=scratch.codes[:n]), scratch.found[:n]
    if wire.bits == 1:
        magnitudes.mul_(1 / half)
        while half > 1:
            half //= 2
            magnitudes[:, :half] += magnitudes[:, half : 2 * half]
        found.copy_(magnitudes[:, :1])
    else:
        torch.amax(magnitudes, 1, keepdim=True, out=found)
    scale, inverse = scratch.scales[:n], scratch.inverses[:n]
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


def _encode_integers(
    wire: WireFormat, scratch: Buffers, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None
) -> bool:
    """Encode to integers of two bits or more; False, with nothing done, if a block is out of the ordinary."""
    n, width, bits, offset = values.shape[0], payload.shape[1], wire.bits, wire.offset
    rounded = _round_scales(wire, scratch, values)
    if rounded is None:
        return False
    scale, inverse = rounded
    q = torch.mul(values, inverse, out=scratch.codes[:n])
    q.round_()
    if pending is not None:
        torch.addcmul(values, q, scale, value=-1, out=pending)
    scales.copy_(scale.view(-1))
    packed = _pack(q, width, bits)
    for plane in range(1, 8 // bits):
        offset += wire.offset << plane * bits
    payload.view(torch.int8).copy_(packed)
    if offset:
        payload.add_(offset)
    return True


def _encode_odd(
    wire: WireFormat, scratch: Buffers, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None
) -> bool:
    """Encode whole blocks to odd numbers of two bits; False, with nothing done, if a block is out of the ordinary."""
    rounded = _round_scales(wire, scratch, values)
    if rounded is None:
        return False
    scale, inverse = rounded
    q = torch.mul(values, inverse, out=scratch.codes[: values.shape[0]])
    q.clamp_(-wire.levels, wire.levels).mul_(0.5).floor_()
    if pending is not None:
        q.mul_(2).add_(1)
        torch.addcmul(values, q, scale, value=-1, out=pending)
        pending += 0.0  # the error of -0 is 0
        q.sub_(1).mul_(0.5)
    scales.copy_(scale.view(-1))
    payload.copy_(_pack(q.add_(wire.offset), payload.shape[1], wire.bits))
    return True


def _pack(codes: Tensor, width: int, bits: int) -> Tensor:
    """Bytes of packed codes, in fp32: ``codes[:, :width]``, which is modified."""
    packed = codes[:, :width]
    for plane in range(1, 8 // bits):
        packed.add_(codes[:, plane * width : (plane + 1) * width], alpha=1 << plane * bits)
    return packed


def _encode_signs(
    wire: WireFormat, scratch: Buffers, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None
) -> bool:
    """Encode whole blocks to signs; False, with nothing done, if a block is out of the ordinary."""
    n = values.shape[0]
    rounded = _round_scales(wire, scratch, values)
    if rounded is None:
        return False
    scale, _ = rounded
    positive = values >= 0
    if pending is not None:
        torch.sub(values, torch.where(positive, scale, -scale, out=scratch.codes[:n]), out=pending)
        pending += 0.0  # the error of -0 is 0
    scales.copy_(scale.view(-1))
    # Each plane is bytes of 0 or 1, so that a shift of eight of them stays within the bytes.
    planes = positive.view(torch.int64).view(n, 8, -1)
    packed = payload.view(torch.int64).copy_(planes[:, 0])
    for plane in range(1, 8):
        packed |= planes[:, plane] << plane
    return True


def _encode_floats(wire: WireFormat, scratch: Buffers, values: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
    """Encode without scales; False, with nothing done, if an element is not finite or saturates."""
    assert wire.dtype is not None
    limit = torch.finfo(wire.dtype).max
    low, high = torch.aminmax(values)
    if not (-limit <= low.item() and high.item() <= limit):
        return False
    encoded = payload.view(wire.dtype).copy_(values)
    if pending is not None:
        torch.sub(values, scratch.codes[: values.shape[0]].copy_(encoded), out=pending)
    return True


def _decode(wire: WireFormat, scratch: Buffers, scales: Tensor | None, payload: Tensor, out: Tensor) -> None:
    """Decode blocks into ``out``, [n, block_size], fp32."""
    n, width = payload.shape
    if scales is None and wire.dtype is not None:
        out.copy_(payload.view(wire.dtype))
    elif wire.dtype is not None or scales is None or width % 8 != 0:
        out.copy_(decode(None if scales is None else scales.unsqueeze(1), payload, wire))
    elif wire.bits == 8:
        out.copy_(payload.view(torch.int8)).mul_(scratch.scales[:n].copy_(scales.unsqueeze(1)))
    else:
        bits, is_odd = wire.bits, wire.is_odd
        codes = payload.view(torch.int64)
        plane = scratch.codes.view(torch.int8).view(-1)[: n * width].view(n, width)
        words = plane.view(torch.int64)
        # Odd numbers take a bit more, because they are codes plus a half: -64 and 64 are signs.
        scale = scratch.scales[:n].copy_(scales.unsqueeze(1)).mul_(2.0 ** (bits - 8 + is_odd))
        # The same byte eight times: the top bits, and what turns codes into two's complement.
        top = int.from_bytes(bytes([256 - (1 << 8 - bits)] * 8), "little", signed=True)
        middle = int.from_bytes(bytes([0x80 | is_odd << 7 - bits] * 8), "little", signed=True)
        for i in range(8 // bits):
            torch.bitwise_left_shift(codes, 8 - (i + 1) * bits, out=words)
            words.bitwise_and_(top).bitwise_xor_(middle)
            out[:, i * width : (i + 1) * width].copy_(plane)
        out.mul_(scale)


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
    table, scratch = section.table, SCRATCH.buffers(section.table.block_size)
    views = table.run_views(scratch.values.view(-1))
    scales, payload = section.views(message.flatten(0, 1))
    pending = None if pending is None else pending.view(-1, table.block_size)
    for i, (run, cells) in enumerate(section.run_cells):
        values = scratch.values[: run.stop - run.start]
        flat = values.view(-1)
        error = None if errors is None else errors[run.start * table.block_size : run.stop * table.block_size]
        if not run.is_slice:
            flat.zero_()
            torch._foreach_copy_(views[i], table.segments.real(tensors[run.first : run.last]))
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
        for cell, slot, first, last in cells:
            slots = slice(slot, slot + last - first)
            _encode(
                section,
                scratch,
                values[first - run.start : last - run.start],
                first,
                None if scales is None else scales[cell, slots],
                payload[cell, slots],
                None if pending is None else pending[first:last],
                rounding,
            )


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
    scratch, room = SCRATCH.buffers(section.table.block_size), section.blocks_per_cell
    pieces, world_size, _ = received.shape
    scales, payload = section.views(result)
    errors = None if errors is None else errors.view(pieces, room, -1)
    pending = None if pending is None else pending.view(pieces, room, -1)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        if pending is not None:
            pending[piece, last - first :].zero_()
        sent_scales, sent_payload = section.views(received[piece])
        is_finite = True
        for start in range(first, last, len(scratch.values)):
            stop = min(start + len(scratch.values), last)
            slots = slice(start - first, stop - first)
            total = scratch.values[: stop - start]
            _sum_cells(section, scratch, sent_scales, sent_payload, slots, total)
            if errors is not None:
                total += errors[piece, slots]
            for block, count in section.table.partial_between(start, stop):
                total[block - start, count:] = 0
            is_finite &= _encode(
                section,
                scratch,
                total,
                start,
                None if scales is None else scales[piece, slots],
                payload[piece, slots],
                None if pending is None else pending[piece, slots],
                rounding,
            )
        if not is_finite:
            result[piece, :4].view(torch.int32).fill_(1)


def _sum_cells(
    section: Section, scratch: Buffers, scales: Tensor | None, payload: Tensor, slots: slice, total: Tensor
) -> None:
    """``total`` = the sum of the blocks in these slots of all cells of a piece, in rank order."""
    total.zero_()
    contribution = scratch.decoded[: len(total)]
    for peer in range(len(payload)):
        _decode(
            section.format, scratch, None if scales is None else scales[peer, slots], payload[peer, slots], contribution
        )
        total += contribution


def sum_quantized_cpu(received: Tensor, section: Section, total: Tensor, rank: int) -> None:
    """`sum_quantized` on a CPU."""
    table, scratch = section.table, SCRATCH.buffers(section.table.block_size)
    pieces, world_size, _ = received.shape
    sums = total.view(pieces, section.blocks_per_cell, table.block_size)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        scales, payload = section.views(received[piece])
        for start in range(first, last, len(scratch.values)):
            slots = slice(start - first, min(start + len(scratch.values), last) - first)
            _sum_cells(section, scratch, scales, payload, slots, sums[piece, slots])
        for block, count in table.partial_between(first, last):
            sums[piece, block - first, count:] = 0
        sums[piece, last - first :].zero_()


def dequantize_cpu(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` on a CPU."""
    table, scratch = section.table, SCRATCH.buffers(section.table.block_size)
    views = table.run_views(scratch.values.view(-1))
    scales, payload = section.views(gathered.flatten(0, 1))
    for i, (run, cells) in enumerate(section.run_cells):
        values, target = scratch.values[: run.stop - run.start], None
        if run.is_slice:
            target = _slice(tensors, table, run, values.numel())
            if target.dtype == torch.float32 and target.numel() == values.numel():
                values, target = target.view_as(values), None
        for cell, slot, first, last in cells:
            slots = slice(slot, slot + last - first)
            scale, out = None if scales is None else scales[cell, slots], values[first - run.start : last - run.start]
            _decode(section.format, scratch, scale, payload[cell, slots], out)
        if table.dtype.itemsize == 2 and section.format.dtype != table.dtype:  # the format may exceed the range
            limit = torch.finfo(table.dtype).max
            if section.format.is_scaled:
                values.clamp_(-limit, limit)  # NaN passes, and there is no inf
            else:
                values.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))
        if target is not None:
            target.copy_(values.view(-1)[: target.numel()])
        elif not run.is_slice:
            torch._foreach_copy_(table.segments.real(tensors[run.first : run.last]), views[i])


def commit_errors_cpu(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """`commit_errors` on a CPU."""
    if not gathered[..., :4].any():
        errors.copy_(pending)
