"""References of the quantisation kernels, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.block_table import Blocks, BlockTable, Section
from gradwire.kernels.counter_random import random_bits
from gradwire.kernels.segment_table import memory_order
from gradwire.kernels.wire_formats import Rounding, decode, encode, round_to_bf16


def _draws(blocks: Blocks, block_size: int, rounding: Rounding, salt: int) -> Tensor:
    """The random bits of every element of the blocks: [n, block_size], int64."""
    index = blocks.starts.unsqueeze(1) + torch.arange(block_size, device=blocks.starts.device)
    return random_bits(blocks.keys.unsqueeze(1) + salt, rounding.step, index)


def encode_with_errors(
    values: Tensor, blocks: Blocks, section: Section, pending: Tensor | None, rounding: Rounding | None
) -> tuple[Tensor | None, Tensor]:
    """`wire_formats.encode` of blocks, [n, block_size], which also writes their errors to ``pending``."""
    block_size = section.table.block_size
    is_stochastic = rounding is not None and rounding.stochastic
    draws = _draws(blocks, block_size, rounding, rounding.salt) if rounding is not None and is_stochastic else None
    scales, payload = encode(values, blocks.counts, section.format, draws)
    if pending is not None:
        error = values - decode(scales, payload, section.format)
        is_valid = torch.arange(block_size, device=values.device) < blocks.counts.unsqueeze(1)
        error = torch.where(is_valid, error, 0.0) + 0.0  # the error of -0 is 0, whatever the sign of its code
        if pending.dtype == torch.bfloat16:
            assert rounding is not None
            error = round_to_bf16(error, _draws(blocks, block_size, rounding, rounding.error_salt))
        pending.copy_(error.view_as(pending))
    return scales, payload


def _cell_part(cells: Tensor, section: Section, at: int, block_bytes: int) -> Tensor:
    """The scales or the payloads of a section in every cell: a view, [cells, blocks_per_cell, block_bytes]."""
    region = cells[:, at : at + section.blocks_per_cell * block_bytes]
    return region.view(cells.shape[0], section.blocks_per_cell, block_bytes)


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
    encoded = encode_with_errors(values.view(-1, table.block_size), blocks, section, pending, rounding)
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
        encoded = encode_with_errors(total, blocks, section, of_piece, rounding)
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
