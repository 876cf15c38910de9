"""Quantisation on CPUs: run by run, so that the scratch of each run stays in cache.

A byte is packed by float arithmetic, the sum of q_t 2^(t bits), a small integer, and converted once; the offset of the
codes is added to the byte. Unpacking moves each plane to the top of its byte, eight bytes at a time, where the
conversion from int8 extends its sign; the factor 2^(8 - bits) is divided out with the scale. All products are exact, so
fused multiply-adds, which vectorised loops contain and others do not, change nothing.

Other cases call the reference, run by run: fp8, stochastic rounding, an error memory in bf16, signs of partial blocks,
and elements that are not finite or too large for their scale.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import frexp

import torch
from torch import Tensor

from gradwire.kernels.block_table import RUN_NUMEL, BlockTable, Run, Section
from gradwire.kernels.quantization_reference import encode_with_errors
from gradwire.kernels.segment_table import memory_order
from gradwire.kernels.wire_formats import BF16_MAX, MIN_SCALE, Rounding, WireFormat, decode


class Scratch(threading.local):
    """Buffers of one thread, kept between calls: fresh memory costs a page fault every 4 KiB, 2 ms for a run."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, rows: int, columns: int) -> Tensor:
        """An uninitialised fp32 tensor. A later call with the same name returns the same memory."""
        numel = rows * columns
        if name not in self._buffers or self._buffers[name].numel() < numel:
            self._buffers[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._buffers[name][:numel].view(rows, columns)


SCRATCH = Scratch()


class CellPart:
    """The blocks of a section in one cell.

    Attributes:
        scales: [blocks], bf16; None if the format has none.
        payload: [blocks, bytes], uint8.
    """

    def __init__(self, cell: Tensor, section: Section) -> None:
        wire, count = section.format, section.blocks_per_cell
        width = wire.payload_bytes(section.table.block_size)
        self.payload = cell[section.payload_at :][: count * width].view(count, width)
        self.scales = None
        if wire.is_scaled:
            self.scales = cell[section.scales_at :][: count * wire.scale_bytes].view(torch.bfloat16)

    def blocks(self, first: int, last: int) -> tuple[Tensor | None, Tensor]:
        """The scales and the payloads of some blocks."""
        return None if self.scales is None else self.scales[first:last], self.payload[first:last]


class RunCodec:
    """Encodes and decodes runs of blocks of a section.

    Args:
        section: the layout and the format.
        rounding: the random numbers.

    Attributes:
        n_blocks: of the largest run.
        values: a buffer for the callers, [n_blocks, block_size], fp32.
    """

    def __init__(self, section: Section, rounding: Rounding | None = None) -> None:
        self.section, self.rounding = section, rounding
        self.wire: WireFormat = section.format
        self.block_size = section.table.block_size
        self.is_stochastic = rounding is not None and rounding.stochastic
        self.n_blocks = min(RUN_NUMEL // self.block_size, section.table.n_blocks)
        self.values = SCRATCH.get("values", self.n_blocks, self.block_size)
        self._scratch = SCRATCH.get("codes", self.n_blocks, self.block_size)
        self._absmax, self._scales, self._inverses, self._levels = (
            SCRATCH.get(name, self.n_blocks, 1) for name in ("absmax", "scales", "inverses", "levels")
        )
        self._levels.fill_(max(self.wire.levels, 1))

    def encode(
        self, values: Tensor, first_block: int, scales: Tensor | None, payload: Tensor, pending: Tensor | None
    ) -> bool:
        """Encode consecutive blocks.

        Args:
            values: [n, block_size], fp32.
            first_block: the number of the first one.
            scales: [n], bf16. Overwritten.
            payload: [n, bytes], uint8. Overwritten.
            pending: [n, block_size]. Overwritten by the errors.

        Returns:
            Whether all elements are finite.
        """
        table, last_block = self.section.table, first_block + values.shape[0]
        if not self.is_stochastic and (pending is None or pending.dtype == torch.float32):
            if scales is None:
                is_done = self._encode_floats(values, payload, pending)
            elif self.wire.is_integer:
                is_done = self._encode_integers(values, scales, payload, pending)
            else:
                is_whole = not table.partial_between(first_block, last_block) and payload.shape[1] % 8 == 0
                is_done = self.wire.bits == 1 and is_whole and self._encode_signs(values, scales, payload, pending)
            if is_done:
                return True
        blocks = table.blocks(first_block, last_block)
        encoded_scales, encoded = encode_with_errors(values, blocks, self.section, pending, self.rounding)
        payload.copy_(encoded)
        if scales is None or encoded_scales is None:
            return bool(values.isfinite().all())
        scales.copy_(encoded_scales.squeeze(1))
        return not scales.isnan().any()

    def _round_scales(self, absmax: Tensor) -> tuple[Tensor, Tensor] | None:
        """The scales of blocks and their inverses, in scratch; None if one is not finite, or near the largest scale."""
        n, scale = absmax.shape[0], self._scales[: absmax.shape[0]]
        smallest, largest = (bound.item() for bound in torch.aminmax(absmax))
        # Above this bound a scale may be lowered, and elements saturate. A NaN fails the comparison.
        if not largest < self.wire.max_scale * self.wire.levels * 0.99:
            return None
        torch.div(absmax, self._levels[:n], out=scale)
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
        if smallest < MIN_SCALE * 2 * self.wire.levels:
            scale.clamp_(min=MIN_SCALE)
        inverse = torch.reciprocal(scale, out=self._inverses[:n])
        if smallest == 0:
            scale.masked_fill_(absmax == 0, 0)
        return scale, inverse

    def _encode_integers(self, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
        """`encode` to integers of two bits or more; False, with nothing done, if a block is out of the ordinary."""
        q = torch.abs(values, out=self._scratch[: values.shape[0]])
        rounded = self._round_scales(torch.amax(q, 1, keepdim=True, out=self._absmax[: values.shape[0]]))
        if rounded is None:
            return False
        scale, inverse = rounded
        torch.mul(values, inverse, out=q)
        q.round_()
        if pending is not None:
            torch.addcmul(values, q, scale, value=-1, out=pending)
        scales.copy_(scale.view(-1))
        self._pack(q, payload)
        return True

    def _encode_signs(self, values: Tensor, scales: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
        """`encode` of whole blocks to signs; False, with nothing done, if a block is out of the ordinary."""
        n, half = values.shape[0], self.block_size
        q = torch.abs(values, out=self._scratch[:n]).mul_(1 / half)
        while half > 1:
            half //= 2
            q[:, :half] += q[:, half : 2 * half]
        absmean = self._absmax[:n].copy_(q[:, :1])
        rounded = self._round_scales(absmean)
        if rounded is None:
            return False
        scale, _ = rounded
        positive = values >= 0
        if pending is not None:
            torch.where(positive, scale, -scale, out=q)
            torch.sub(values, q, out=pending)
            pending += 0.0  # the error of -0 is 0
        scales.copy_(scale.view(-1))
        # Each plane is bytes of 0 or 1, so that a shift of eight of them stays within the bytes.
        planes = positive.view(torch.int64).view(n, 8, -1)
        packed = payload.view(torch.int64).copy_(planes[:, 0])
        for plane in range(1, 8):
            packed |= planes[:, plane] << plane
        return True

    def _encode_floats(self, values: Tensor, payload: Tensor, pending: Tensor | None) -> bool:
        """`encode` without scales; False, with nothing done, if an element is not finite or saturates."""
        assert self.wire.dtype is not None
        limit = torch.finfo(self.wire.dtype).max
        smallest, largest = (bound.item() for bound in torch.aminmax(values))
        if not (-limit <= smallest and largest <= limit):
            return False
        encoded = payload.view(self.wire.dtype).copy_(values)
        if pending is not None:
            torch.sub(values, self._scratch[: values.shape[0]].copy_(encoded), out=pending)
        return True

    def _pack(self, q: Tensor, payload: Tensor) -> None:
        """Pack integers, [n, block_size] in fp32. They are overwritten."""
        bits, width = self.wire.bits, payload.shape[1]
        packed, offset = q[:, :width], self.wire.offset
        for plane in range(1, 8 // bits):
            packed.add_(q[:, plane * width : (plane + 1) * width], alpha=1 << plane * bits)
            offset += self.wire.offset << plane * bits
        payload.view(torch.int8).copy_(packed)
        if offset:
            payload.add_(offset)

    def decode(self, scales: Tensor | None, payload: Tensor, out: Tensor) -> None:
        """Decode blocks into ``out``, [n, block_size], fp32."""
        if self.wire.bits == 8 and self.wire.is_integer:
            assert scales is not None
            out.copy_(payload.view(torch.int8)).mul_(self._scales[: out.shape[0]].copy_(scales.unsqueeze(1)))
        elif self.wire.dtype is None and payload.shape[1] % 8 == 0:
            assert scales is not None
            self._decode_planes(scales, payload, out)
        elif scales is None and self.wire.dtype is not None:
            out.copy_(payload.view(self.wire.dtype))
        else:
            out.copy_(decode(None if scales is None else scales.unsqueeze(1), payload, self.wire))

    def _decode_planes(self, scales: Tensor, payload: Tensor, out: Tensor) -> None:
        """`decode` of signs and of integers of fewer than eight bits, plane by plane."""
        bits, (n, width) = self.wire.bits, payload.shape
        codes = payload.view(torch.int64)
        plane = self._scratch.view(torch.int8).view(-1)[: n * width].view(n, width)
        words = plane.view(torch.int64)
        scale = self._scales[:n]
        scale.copy_(scales.unsqueeze(1))
        # A sign becomes -64 or 64, because 128 is beyond int8.
        scale.mul_(-(2.0**-6) if bits == 1 else 2.0 ** (bits - 8))
        top = _in_each_byte(256 - (1 << 8 - bits))
        middle = _in_each_byte(0x40 if bits == 1 else 0x80)
        for i in range(8 // bits):
            torch.bitwise_left_shift(codes, 8 - (i + 1) * bits, out=words)
            words.bitwise_and_(top).bitwise_xor_(middle)
            out[:, i * width : (i + 1) * width].copy_(plane)
        out.mul_(scale)


def _in_each_byte(byte: int) -> int:
    """A signed 64-bit number of eight equal bytes."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def _overlaps(section: Section, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """The cells that hold the blocks ``first`` to ``last - 1``: cell, first slot, first block, one past the last."""
    per_cell = section.blocks_per_cell
    for cell in range(first // per_cell, -(-last // per_cell)):
        start, stop = max(first, cell * per_cell), min(last, (cell + 1) * per_cell)
        yield cell, start - cell * per_cell, start, stop


def _cell_parts(cells: Tensor, section: Section) -> list[CellPart]:
    return [CellPart(cell, section) for cell in cells]


def _gather(
    run: Run, tensors: Sequence[Tensor], table: BlockTable, values: Tensor, scale: float, errors: Tensor | None
) -> None:
    """Write the elements of a run, times ``scale``, plus ``errors``, to ``values``; all are [n * block_size]."""
    if run.is_piece:
        piece = memory_order(tensors[run.first])[run.start :][: values.numel()]
        present, missing = values[: piece.numel()], values[piece.numel() :]
        missing.zero_()
        if piece.dtype == torch.float32 and errors is not None and frexp(scale)[0] == 0.5:
            # One pass, rounded twice as in two: the quotient is the product, and division does not fuse with addition.
            divisor = torch.tensor(1 / scale, device="cpu")
            torch.addcdiv(errors[: piece.numel()].to(torch.float32), piece, divisor, out=present)
            return
        if piece.dtype == torch.float32:
            torch.mul(piece, scale, out=present)
        else:
            present.copy_(piece).mul_(scale)
    else:
        values.zero_()
        views = table.views(values, run.first, run.last)
        torch._foreach_copy_(views, table.segments.real(tensors[run.first : run.last]))
        values.mul_(scale)
    if errors is not None:
        values += errors


def quantize_cpu(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    *,
    scale: float,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`quantize` on a CPU."""
    table, codec = section.table, RunCodec(section, rounding)
    parts = _cell_parts(message.flatten(0, 1), section)
    of_blocks = None if pending is None else pending.view(-1, table.block_size)
    for run in table.runs:
        values = codec.values[: run.last_block - run.first_block]
        first, last = run.first_block * table.block_size, run.last_block * table.block_size
        _gather(run, tensors, table, values.view(-1), scale, None if errors is None else errors[first:last])
        for cell, slot, start, stop in _overlaps(section, run.first_block, run.last_block):
            scales, payload = parts[cell].blocks(slot, slot + stop - start)
            lost = None if of_blocks is None else of_blocks[start:stop]
            codec.encode(values[start - run.first_block : stop - run.first_block], start, scales, payload, lost)


def reduce_quantized_cpu(
    received: Tensor,
    section: Section,
    result: Tensor,
    *,
    rank: int,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`reduce_quantized` on a CPU."""
    codec, block_size = RunCodec(section, rounding), section.table.block_size
    pieces, world_size, _ = received.shape
    room = codec.n_blocks
    decoded = SCRATCH.get("decoded", room, block_size)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        at = piece * section.blocks_per_cell
        if pending is not None:
            pending.view(-1, block_size)[at + last - first : at + section.blocks_per_cell].zero_()
        if first == last:
            continue
        contributions = _cell_parts(received[piece], section)
        sums = CellPart(result[piece], section)
        is_finite = True
        for start in range(0, last - first, room):
            stop = min(start + room, last - first)
            total, contribution = codec.values[: stop - start], decoded[: stop - start]
            total.zero_()
            for part in contributions:
                codec.decode(*part.blocks(start, stop), contribution)
                total += contribution
            if errors is not None:
                total += errors.view(-1, block_size)[at + start : at + stop]
            for block, count in section.table.partial_between(first + start, first + stop):
                total[block - first - start, count:] = 0
            lost = None if pending is None else pending.view(-1, block_size)[at + start : at + stop]
            scales, payload = sums.blocks(start, stop)
            is_finite &= codec.encode(total, first + start, scales, payload, lost)
        if not is_finite:
            result[piece, :4].view(torch.int32).fill_(1)


def dequantize_cpu(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` on a CPU."""
    table, codec = section.table, RunCodec(section)
    parts = _cell_parts(gathered.flatten(0, 1), section)
    for run in table.runs:
        values = codec.values[: run.last_block - run.first_block]
        piece = None
        if run.is_piece:
            piece = memory_order(tensors[run.first])[run.start :][: values.numel()]
            if piece.dtype == torch.float32 and piece.numel() == values.numel():
                values = piece.view_as(values)
        for cell, slot, start, stop in _overlaps(section, run.first_block, run.last_block):
            scales, payload = parts[cell].blocks(slot, slot + stop - start)
            codec.decode(scales, payload, values[start - run.first_block : stop - run.first_block])
        if piece is not None and values.data_ptr() == piece.data_ptr():
            continue
        _saturate(values, table.dtype, section.format)
        if piece is not None:
            piece.copy_(values.view(-1)[: piece.numel()])
        else:
            targets = table.segments.real(tensors[run.first : run.last])
            torch._foreach_copy_(targets, table.views(values.view(-1), run.first, run.last))


def _saturate(values: Tensor, dtype: torch.dtype, wire: WireFormat) -> None:
    """Limit finite values to the range of ``dtype``, where the format may exceed it."""
    limit = {torch.float16: torch.finfo(torch.float16).max, torch.bfloat16: BF16_MAX}.get(dtype)
    if limit is None or wire.dtype == dtype:
        return
    if wire.is_scaled:
        values.clamp_(-limit, limit)  # NaN passes, and there is no inf
    else:
        values.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))


def commit_errors_cpu(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """`commit_errors` on a CPU."""
    if not gathered[..., :4].any():
        errors.copy_(pending)
