"""Quantization: the two shots of a compressed all-reduce, between gradients and messages of bytes.

    quantize            M = g * scale + E;  message = encode(M);  pending = M - decode(message)
    reduce_quantized    S = sum_i decode(received_i) + E2;  result = encode(S);  pending = S - decode(result)
    sum_quantized       S = sum_i decode(received_i)                    for a reduce-scatter, which sends no result
    dequantize          g = decode(gathered)
    commit_errors       (E, E2) = pending, unless a rank found a number that is not finite

`wire_formats` defines encode and decode, `block_table` where the blocks lie. Rank r sends cell [p, j] of its message to
rank j, reduces the cells [p, r] of all ranks in rank order, and sends the result to all. Each operation but the last is
one launch for one section of a message. Arithmetic is in fp32 for every dtype of the gradients; fp64 is
rounded to fp32 first. Missing elements of partial blocks count as 0, and their errors stay 0.

A message needs no flag: a scale that is NaN, or an element that is not finite, makes the sum of its block not finite.
`reduce_quantized` then raises the flag in the header of its result, which all ranks receive, and `commit_errors` leaves
the error memories of all ranks as they were.

The error of an element of an integer format that does not saturate is at most

    |x - s q| <= s / 2 * (1 + levels * 2^-20)

because x * fl(1 / s) deviates from x / s, which is at most the number of levels, by two roundings: by 2^-23 of it, or
by 2^-21 if 1 / s is subnormal, as for int2 scales above 2^126. Where the scale is lowered so that s * levels is finite,
in the last 2^-7 below fp32's largest number, elements deviate by s * levels / 128 at most.

Traffic for N elements, with s bytes per gradient element, e bytes per element of the error memory (0 without), and
b = bits / 8 + 2 / block_size bytes per element of the message:

    quantize            (s + 2 e + b) N
    reduce_quantized    ((n + 1) b + 2 e) N / n        for n ranks
    sum_quantized       (n b + 4) N / n
    dequantize          (s + b) N
    commit_errors       2 e (N + N / n)

For int4 with blocks of 64, fp32 gradients and many ranks, these are 25.6 N with an error memory in fp32, and 17.6 N
with one in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.block_table import HEADER_BYTES, BlockTable, Section
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.layouts import memory_order
from gradwire.kernels.quantize_cpu import (
    commit_errors_cpu,
    dequantize_cpu,
    quantize_cpu,
    reduce_quantized_cpu,
    sum_quantized_cpu,
)
from gradwire.kernels.wire_formats import Rounding, encode_with_errors


def _store(cells: Tensor, section: Section, encoded: tuple[Tensor | None, Tensor]) -> None:
    """Write encoded blocks into ``cells``, [cells, cell_bytes], from the first slot of the first cell on."""
    scales, payload = encoded
    index = torch.arange(payload.shape[0], device=cells.device)
    at = index // section.blocks_per_cell, index % section.blocks_per_cell
    scale_slots, payload_slots = section.views(cells)
    payload_slots[at] = payload
    if scales is not None and scale_slots is not None:
        scale_slots.view(torch.int16)[at] = scales.squeeze(1).view(torch.int16)


def _decode_cells(cells: Tensor, section: Section, n_blocks: int) -> Tensor:
    """Decode the first ``n_blocks`` blocks of ``cells``, [cells, cell_bytes]: [n_blocks, block_size], fp32."""
    scales, payload = (None if view is None else view.flatten(0, 1)[:n_blocks] for view in section.views(cells))
    assert payload is not None
    return section.format.decode(None if scales is None else scales.unsqueeze(1), payload.contiguous())


def quantize_reference(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    scale: float,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
    cleared: Tensor | None = None,
) -> None:
    """Encode ``tensors * scale + errors`` into the cells of ``message``, and write what encoding lost to ``pending``.

    Args:
        tensors: those that ``section.table`` was built for.
        section: the layout and the format.
        message: uint8, [pieces, n, cell_bytes]. The section's scales and payloads are overwritten.
        scale: multiplies the gradients before anything else; 1 / n for a mean over n ranks.
        errors: the error memory, flat, `BlockTable.numel` elements of fp32 or bf16, 0 where blocks lack elements;
            None: no error feedback.
        pending: error of this step, like ``errors``. Overwritten; `commit_errors` makes it permanent. It may be passed
            without ``errors``.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.
        cleared: uint8, [pieces, cell_bytes]: the ``result`` of `reduce_quantized`. Its headers become 0.
    """
    if cleared is not None:
        cleared[:, :HEADER_BYTES].zero_()
    table = section.table
    values = torch.zeros(table.numel, dtype=torch.float32, device=table.device)
    for tensor, view in zip(tensors, _segments(values, table), strict=True):
        view.copy_(memory_order(tensor))
    values *= torch.tensor(scale, dtype=torch.float32, device=table.device)
    if errors is not None:
        values += errors.to(torch.float32)
    blocks = table.blocks(0, table.n_blocks)
    encoded = encode_with_errors(values.view(-1, table.block_size), blocks, section.format, pending, rounding)
    _store(message.flatten(0, 1), section, encoded)


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
    rank: int,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Encode ``sum(decode(received)) + errors`` into ``result``, and write what encoding lost to ``pending``.

    The flag in the header of a piece of ``result`` becomes 1 if one of its sums is not finite. The caller sets the
    flags to 0 before the first section, as `quantize` can.

    Args:
        received: uint8, [pieces, n, cell_bytes]: cell [p, ``rank``] of the message of each of the n ranks.
        section: the layout and the format.
        result: uint8, [pieces, cell_bytes]. The section's scales and payloads are overwritten.
        rank: this rank, from 0 to n - 1.
        errors: this rank's error memory of the second shot, flat, `MessageLayout.shard_numel` elements of fp32 or
            bf16; None: no error feedback.
        pending: error of this step, like ``errors``, and may be the same tensor. Overwritten, with 0 where cells have
            no blocks.
        rounding: the random numbers; None: round to nearest even. An error memory in bf16 needs them.
    """
    table = section.table
    pieces, world_size, _ = received.shape
    room = section.blocks_per_cell * table.block_size
    totals = torch.empty(pieces * room, dtype=torch.float32, device=received.device)
    sum_quantized_reference(received, section, totals, rank)
    errors, pending = (None if each is None else each.view(pieces, room) for each in (errors, pending))
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        numel = (last - first) * table.block_size
        if pending is not None:
            pending[piece, numel:].zero_()
        if numel == 0:
            continue
        total = totals[piece * room :][:numel].view(-1, table.block_size)
        if errors is not None:
            total += errors[piece, :numel].view_as(total).to(torch.float32)
        blocks = table.blocks(first, last)
        total = torch.where(_is_present(blocks.counts, table), total, 0.0)
        piece_pending = None if pending is None else pending[piece, :numel]
        encoded = encode_with_errors(total, blocks, section.format, piece_pending, rounding)
        _store(result[piece : piece + 1], section, encoded)
        header = result[piece, :4].view(torch.int32)
        header |= (~total.isfinite()).any().to(torch.int32)


def _is_present(counts: Tensor, table: BlockTable) -> Tensor:
    """Which elements of blocks exist: bool [n, block_size], from their numbers of elements, [n]."""
    return torch.arange(table.block_size, device=counts.device) < counts.unsqueeze(1)


def sum_quantized_reference(received: Tensor, section: Section, total: Tensor, rank: int) -> None:
    """``total = sum(decode(received))``, the end of a reduce-scatter.

    Args:
        received: uint8, [pieces, n, cell_bytes]: cell [p, ``rank``] of the message of each of the n ranks.
        section: the layout and the format.
        total: fp32, flat, `MessageLayout.shard_numel` elements. Overwritten, with 0 where cells have no blocks.
        rank: this rank, from 0 to n - 1.
    """
    table = section.table
    pieces, world_size, _ = received.shape
    sums = total.zero_().view(pieces, section.blocks_per_cell, table.block_size)
    for piece in range(pieces):
        first, last = section.cell_blocks(piece * world_size + rank)
        for cell in received[piece]:
            sums[piece, : last - first] += _decode_cells(cell.unsqueeze(0), section, last - first)
        counts = table.blocks(first, last).counts
        sums[piece, : last - first].masked_fill_(~_is_present(counts, table), 0)


def dequantize_reference(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """Decode the cells of ``gathered`` into the tensors, in place.

    Finite values saturate at the range of the tensors' dtype if that is fp16 or bf16.

    Args:
        gathered: uint8, [pieces, n, cell_bytes]: piece p of the result of each of the n ranks.
        section: the layout and the format.
        tensors: those that ``section.table`` was built for. Overwritten.
    """
    table = section.table
    values = _decode_cells(gathered.flatten(0, 1), section, table.n_blocks).flatten()
    if table.dtype.itemsize == 2:
        limit = torch.finfo(table.dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    for tensor, view in zip(tensors, _segments(values, table), strict=True):
        memory_order(tensor).copy_(view)


def commit_errors_reference(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """Copy ``pending`` to ``errors`` unless a header of ``gathered`` has a flag. A GPU is not synchronized.

    Args:
        gathered: uint8, [pieces, n, cell_bytes].
        pending: flat, of any dtype: the errors of this step, of both shots and all sections.
        errors: the error memories, like ``pending``. Overwritten.
    """
    is_flagged = (gathered[..., :4] != 0).any()
    errors.copy_(torch.where(is_flagged, errors, pending))


class QuantizationKernels(NamedTuple):
    """The operations on one device, with the arguments of `quantize_reference` and so on.

    All but ``commit_errors`` need a section with blocks. Messages and error memories are contiguous, and begin at
    multiples of 16 bytes.
    """

    quantize: Callable[..., None]
    reduce_quantized: Callable[..., None]
    sum_quantized: Callable[..., None]
    dequantize: Callable[..., None]
    commit_errors: Callable[..., None]


def bound_quantization(device: torch.device) -> QuantizationKernels:
    """The operations for tensors of ``device``: Triton, CPU code or references, chosen once for all steps."""
    if use_triton(device):
        launchers: Any = import_module("gradwire.kernels.quantize_triton")
        return QuantizationKernels(
            launchers.quantize_triton,
            launchers.reduce_quantized_triton,
            launchers.sum_quantized_triton,
            launchers.dequantize_triton,
            launchers.commit_errors_triton,
        )
    if device.type == "cpu":
        return QuantizationKernels(
            quantize_cpu, reduce_quantized_cpu, sum_quantized_cpu, dequantize_cpu, commit_errors_cpu
        )
    return QuantizationKernels(
        quantize_reference,
        reduce_quantized_reference,
        sum_quantized_reference,
        dequantize_reference,
        commit_errors_reference,
    )
