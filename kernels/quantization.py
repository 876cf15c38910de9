"""Quantisation: the two shots of a compressed all-reduce, between gradients and messages of bytes.

    quantize            M = g * scale + E;  message = encode(M);  pending = M - decode(message)
    reduce_quantized    S = sum_i decode(received_i) + E2;  result = encode(S);  pending = S - decode(result)
    dequantize          g = decode(gathered)
    commit_errors       (E, E2) = pending, unless a rank found a number that is not finite

`wire_formats` defines encode and decode, `block_table` where the blocks lie. Rank r sends cell [p, j] of its message to
rank j, reduces the cells [p, r] of all ranks in rank order, and sends the result to all. Each of the first three
operations is one launch for one section of a message. Arithmetic is in fp32 for every dtype of the gradients; fp64 is
rounded to fp32 first. Missing elements of partial blocks count as 0, and their errors stay 0.

A message needs no flag: a scale that is NaN, or an element that is not finite, makes the sum of its block not finite.
`reduce_quantized` then raises the flag in the header of its result, which all ranks receive, and `commit_errors` leaves
the error memories of all ranks as they were.

Without stochastic rounding the error of an element of an integer format is at most

    |x - s q| <= s / 2 * (1 + 2 levels * 2^-22)

because x * fl(1 / s) deviates from x / s, which is at most the number of levels, by two roundings, 2^-24 of it each. A
scale of int2 above 2^126 has a subnormal reciprocal, whose relative error is 2^-22. Where the scale is lowered so that
s * levels is finite, in the last 2^-7 below fp32's largest number, elements deviate by s * levels / 128 at most.

Traffic for N elements, with s bytes per gradient element, e bytes per element of the error memory (0 without), and
b = bits / 8 + 2 / block_size bytes per element of the message:

    quantize            (s + 2 e + b) N
    reduce_quantized    ((n + 1) b + 2 e) N / n        for n ranks
    dequantize          (s + b) N
    commit_errors       2 e (N + N / n)

For int4 with blocks of 64 and fp32 gradients, that is 25 N with an error memory in fp32, and 19 N in bf16, for large n.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.block_table import Blocks, BlockTable, Section
from gradwire.kernels.counter_random import random_bits
from gradwire.kernels.segment_table import memory_order
from gradwire.kernels.wire_formats import Rounding, WireFormat, decode, encode, round_to_bf16

ERROR_DTYPES = (torch.float32, torch.bfloat16)


def quantize_bytes(
    numel: int, source: torch.dtype, wire: WireFormat, block_size: int, errors: torch.dtype | None
) -> float:
    """Bytes that quantising ``numel`` elements in full blocks reads and writes."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (source.itemsize + error_bytes + wire.block_bytes(block_size) / block_size)


def reduce_quantized_bytes(
    numel: int, world_size: int, wire: WireFormat, block_size: int, errors: torch.dtype | None
) -> float:
    """Bytes that reducing one rank's ``numel`` elements, in full blocks, reads and writes."""
    error_bytes = 0 if errors is None else 2 * errors.itemsize
    return numel * (error_bytes + (world_size + 1) * wire.block_bytes(block_size) / block_size)


def dequantize_bytes(numel: int, wire: WireFormat, block_size: int, target: torch.dtype) -> float:
    """Bytes that dequantising ``numel`` elements in full blocks reads and writes."""
    return numel * (target.itemsize + wire.block_bytes(block_size) / block_size)


def commit_errors_bytes(numel: int, errors: torch.dtype) -> int:
    """Bytes that committing ``numel`` elements of error memory reads and writes."""
    return 2 * numel * errors.itemsize


def _draws(blocks: Blocks, block_size: int, rounding: Rounding, salt: int) -> Tensor:
    """The random bits of every element of the blocks: [n, block_size], int64."""
    index = blocks.starts.unsqueeze(1) + torch.arange(block_size, device=blocks.starts.device)
    return random_bits(blocks.keys.unsqueeze(1) + salt, rounding.step, index)


def _encode_with_errors(
    values: Tensor, blocks: Blocks, section: Section, pending: Tensor | None, rounding: Rounding | None
) -> tuple[Tensor | None, Tensor]:
    """Encode blocks, and write their errors, [n * block_size]."""
    block_size = section.table.block_size
    is_stochastic = rounding is not None and rounding.stochastic
    draws = _draws(blocks, block_size, rounding, rounding.salt) if rounding is not None and is_stochastic else None
    scales, payload = encode(values, blocks.counts, section.format, draws)
    if pending is not None:
        error = values - decode(scales, payload, section.format)
        is_valid = torch.arange(block_size, device=values.device) < blocks.counts.unsqueeze(1)
        error = torch.where(is_valid, error, 0.0)
        if pending.dtype == torch.bfloat16:
            assert rounding is not None
            error = round_to_bf16(error, _draws(blocks, block_size, rounding, rounding.error_salt))
        pending.copy_(error.flatten())
    return scales, payload


def _cell_part(cells: Tensor, section: Section, at: int, block_bytes: int) -> Tensor:
    """The scales or the payloads of a section in every cell: a view, [cells, blocks_per_cell, block_bytes]."""
    region = cells[:, at : at + section.blocks_per_cell * block_bytes]
    return region.unflatten(1, (section.blocks_per_cell, block_bytes))


def _payloads(cells: Tensor, section: Section) -> Tensor:
    return _cell_part(cells, section, section.payload_at, section.format.payload_bytes(section.table.block_size))


def _store(cells: Tensor, section: Section, first: int, scales: Tensor | None, payload: Tensor) -> None:
    """Write encoded blocks into ``cells``, [cells, cell_bytes], from block ``first`` of these cells on."""
    index = torch.arange(first, first + payload.shape[0], device=cells.device)
    at = index // section.blocks_per_cell, index % section.blocks_per_cell
    _payloads(cells, section)[at] = payload
    if scales is not None:
        width = section.format.scale_bytes
        _cell_part(cells, section, section.scales_at, width)[at] = scales.view(torch.uint8)


def _decode_cells(cells: Tensor, section: Section, n_blocks: int) -> Tensor:
    """Decode the first ``n_blocks`` blocks of ``cells``, [cells, cell_bytes]: [n_blocks, block_size], fp32."""
    payload = _payloads(cells, section).flatten(0, 1)[:n_blocks].contiguous()
    scales = None
    if section.format.is_scaled:
        of_cells = _cell_part(cells, section, section.scales_at, section.format.scale_bytes)
        scales = of_cells.flatten(0, 1)[:n_blocks].contiguous().view(torch.bfloat16)
    return decode(scales, payload, section.format)


def quantize_reference(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    *,
    scale: float,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`quantize` in plain PyTorch."""
    table = section.table
    values = torch.zeros(table.numel, dtype=torch.float32, device=table.device)
    for tensor, view in zip(tensors, _segments(values, table), strict=True):
        view.copy_(memory_order(tensor))
    values *= torch.tensor(scale, dtype=torch.float32, device=table.device)
    if errors is not None:
        values += errors.to(torch.float32)
    blocks = table.blocks(0, table.n_blocks)
    encoded = _encode_with_errors(values.view(-1, table.block_size), blocks, section, pending, rounding)
    _store(message.flatten(0, 1), section, 0, *encoded)


def _segments(values: Tensor, table: BlockTable) -> list[Tensor]:
    """The elements of each tensor in ``values``, [numel]."""
    return [
        values[first * table.block_size :][:length]
        for first, length in zip(table.first_blocks, table.lengths, strict=True)
    ]


def reduce_quantized_reference(
    received: Tensor,
    section: Section,
    result: Tensor,
    *,
    rank: int,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`reduce_quantized` in plain PyTorch, piece by piece."""
    table = section.table
    pieces, world_size, _ = received.shape
    room = section.blocks_per_cell * table.block_size
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        numel = (last - first) * table.block_size
        if pending is not None:
            pending[piece * room :][:room].zero_()
        if numel == 0:
            continue
        total = torch.zeros(last - first, table.block_size, dtype=torch.float32, device=received.device)
        for cell in received[piece]:
            total += _decode_cells(cell.unsqueeze(0), section, last - first)
        if errors is not None:
            total += errors[piece * room :][:numel].view_as(total).to(torch.float32)
        blocks = table.blocks(first, last)
        is_valid = torch.arange(table.block_size, device=total.device) < blocks.counts.unsqueeze(1)
        total = torch.where(is_valid, total, 0.0)
        of_piece = None if pending is None else pending[piece * room :][:numel]
        encoded = _encode_with_errors(total, blocks, section, of_piece, rounding)
        _store(result[piece : piece + 1], section, 0, *encoded)
        header = result[piece, :4].view(torch.int32)
        header |= (~total.isfinite()).any().to(torch.int32)


def dequantize_reference(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` in plain PyTorch."""
    table = section.table
    values = _decode_cells(gathered.flatten(0, 1), section, table.n_blocks).flatten()
    if table.dtype.itemsize == 2:
        limit = torch.finfo(table.dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    for tensor, view in zip(tensors, _segments(values, table), strict=True):
        memory_order(tensor).copy_(view)


def commit_errors_reference(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """`commit_errors` in plain PyTorch."""
    is_flagged = (gathered[..., :4] != 0).any()
    errors.copy_(torch.where(is_flagged, errors, pending))


def _check_message(tensor: Tensor, name: str, shape: tuple[int | str, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected a contiguous torch.uint8 tensor of "
            f"[{expected}]. Allocate it in the shape that MessageLayout gives."
        )


def _check_section(tensor: Tensor, name: str, section: Section) -> None:
    _check_message(tensor, name, ("pieces", "n", "cell_bytes"))
    table, (pieces, world_size, cell_bytes) = section.table, tensor.shape
    end = section.payload_at + section.blocks_per_cell * section.format.payload_bytes(table.block_size)
    if pieces * world_size * section.blocks_per_cell < table.n_blocks or end > cell_bytes:
        raise ValueError(
            f"{name} has {pieces * world_size} cells of {cell_bytes} bytes; the section needs room for "
            f"{table.n_blocks} blocks, {section.blocks_per_cell} in each cell, which end at byte {end}. Use the "
            "MessageLayout that the section belongs to."
        )


def _check_errors(errors: Tensor | None, pending: Tensor | None, numel: int, rounding: Rounding | None) -> None:
    if errors is None and pending is None:
        return
    if errors is None or pending is None:
        raise ValueError("errors and pending come together; pass both, or None for both: no error feedback.")
    for name, tensor in (("errors", errors), ("pending", pending)):
        if tensor.dtype not in ERROR_DTYPES or tensor.shape != (numel,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected a contiguous 1-D tensor of {numel} elements "
                f"in {' or '.join(map(str, ERROR_DTYPES))}."
            )
    if errors.dtype != pending.dtype:
        raise ValueError(f"errors is {errors.dtype}, pending is {pending.dtype}; expected one dtype.")
    if pending.dtype == torch.bfloat16 and rounding is None:
        raise ValueError("pending is torch.bfloat16, which is rounded stochastically; pass rounding=Rounding(step).")


def quantize(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    *,
    scale: float,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Encode ``tensors * scale + errors`` into the cells of ``message``, and write what encoding lost to ``pending``.

    Args:
        tensors: those that ``section.table`` was built for.
        section: the layout and the format.
        message: uint8, [pieces, n, cell_bytes]. The section's scales and payloads are overwritten.
        scale: multiplies the gradients before anything else; 1 / n for a mean over n ranks.
        errors: the error memory, flat, `BlockTable.numel` elements of fp32 or bf16; None: no error feedback.
        pending: like ``errors``: overwritten by the error of this step, which `commit_errors` makes permanent.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.

    Raises:
        ValueError: an argument does not fit the section.
    """
    table = section.table
    table.check(tensors)
    _check_section(message, "message", section)
    _check_errors(errors, pending, table.numel, rounding)
    if table.n_blocks == 0:
        return
    quantize_reference(tensors, section, message, scale=scale, errors=errors, pending=pending, rounding=rounding)


def reduce_quantized(
    received: Tensor,
    section: Section,
    result: Tensor,
    *,
    rank: int,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Encode ``sum(decode(received)) + errors`` into ``result``, and write what encoding lost to ``pending``.

    The flag in the header of a piece of ``result`` becomes 1 if one of its sums is not finite. The caller sets the
    flags to 0 before the first section.

    Args:
        received: uint8, [pieces, n, cell_bytes]: cell [p, ``rank``] of the message of each of the n ranks.
        section: the layout and the format.
        result: uint8, [pieces, cell_bytes]. The section's scales and payloads are overwritten.
        rank: this rank, from 0 to n - 1.
        errors: this rank's error memory of the second shot, flat, `MessageLayout.shard_numel` elements of fp32 or
            bf16; None: no error feedback.
        pending: like ``errors``: overwritten by the error of this step. It is 0 where cells have no blocks.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.

    Raises:
        ValueError: an argument does not fit the section.
    """
    _check_section(received, "received", section)
    pieces, world_size, cell_bytes = received.shape
    _check_message(result, "result", (pieces, cell_bytes))
    _check_errors(errors, pending, pieces * section.blocks_per_cell * section.table.block_size, rounding)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected a number from 0 to {world_size - 1}, the shards in received.")
    if section.blocks_per_cell == 0:
        return
    reduce_quantized_reference(received, section, result, rank=rank, errors=errors, pending=pending, rounding=rounding)


def dequantize(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """Decode the cells of ``gathered`` into the tensors, in place.

    Finite values saturate at the range of the tensors' dtype if that is fp16 or bf16.

    Args:
        gathered: uint8, [pieces, n, cell_bytes]: piece p of the result of each of the n ranks.
        section: the layout and the format.
        tensors: those that ``section.table`` was built for. Overwritten.

    Raises:
        ValueError: an argument does not fit the section.
    """
    section.table.check(tensors)
    _check_section(gathered, "gathered", section)
    if section.table.n_blocks == 0:
        return
    dequantize_reference(gathered, section, tensors)


def commit_errors(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """Copy ``pending`` to ``errors`` unless a header of ``gathered`` has a flag. A GPU is not synchronised.

    Args:
        gathered: uint8, [pieces, n, cell_bytes].
        pending: flat, of any dtype: the errors of this step, of both shots and all sections.
        errors: the error memories, like ``pending``. Overwritten.

    Raises:
        ValueError: the tensors do not fit one another.
    """
    _check_message(gathered, "gathered", ("pieces", "n", "cell_bytes"))
    if errors.dtype != pending.dtype or errors.shape != pending.shape or errors.dim() != 1:
        raise ValueError(
            f"pending is {pending.dtype} {tuple(pending.shape)}, errors is {errors.dtype} {tuple(errors.shape)}; "
            "expected flat tensors of one dtype and size."
        )
    commit_errors_reference(gathered, pending, errors)
