"""`reduce_quantized` in Triton: a program decodes, sums and encodes 4096 elements of one cell."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.block_codec_triton import (
    aligned,
    encode_blocks,
    load_blocks,
    load_errors,
    store_blocks,
    store_errors,
    unit_bytes,
)
from gradwire.kernels.block_table import Section
from gradwire.kernels.counter_random import random_bits_triton
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.quantization_triton import OPTIONS, place, randomness
from gradwire.kernels.segment_table import CHUNK_NUMEL
from gradwire.kernels.wire_formats import Rounding


@jit
def _reduce_chunk(
    received_ptr,  # [n, cell_bytes]: the received cells of one piece
    result_ptr,  # [cell_bytes]
    flag_ptr,  # [1] int32
    errors_ptr,  # [N * BLOCK]; None: no error feedback
    pending_ptr,  # [N * BLOCK]
    slots,  # [N]
    room,
    counts,  # [N] int32
    index,  # [N, BLOCK] int64
    key,  # [N, 1]
    error_key,  # [N, 1]
    step,
    world_size,
    cell_units,
    scales_unit,
    payload_unit,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sum and encode N blocks of one cell; all of them have all their elements if FULL."""
    mask = counts > 0
    received = received_ptr.to(tl.int64)
    total = tl.zeros((N, BLOCK), tl.float32)
    for _ in range(world_size):
        scales, payload = received + unit_bytes(scales_unit), received + unit_bytes(payload_unit)
        total += load_blocks(scales, payload, slots, mask, FORMAT, BLOCK, FULL)
        received += unit_bytes(cell_units)
    if errors_ptr is not None:
        total += load_errors(errors_ptr, slots < room, BLOCK, N, FULL)
    if not FULL:
        total = tl.where(tl.arange(0, BLOCK)[None, :] < counts[:, None], total, 0.0)
    random = random_bits_triton(key, step, index) if STOCHASTIC else index
    scale, encoded, decoded = encode_blocks(total, counts, random, FORMAT, STOCHASTIC, FULL)
    result = result_ptr.to(tl.int64)
    scales, payload = result + unit_bytes(scales_unit), result + unit_bytes(payload_unit)
    store_blocks(scales, payload, slots, mask, scale, encoded, FORMAT, BLOCK, FULL)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(total) < float("inf"), 0, 1), axis=1), axis=0)
    if n_bad > 0:
        tl.atomic_max(flag_ptr, 1, sem="relaxed")  # no order needed: no fence
    if pending_ptr is not None:
        store_errors(pending_ptr, total - decoded, counts, slots < room, error_key, step, index, FULL)


@kernel
def _reduce_kernel(
    received_ptr,  # [pieces, n, cell_bytes] uint8
    layout_ptr,  # [3, S] int64: `BlockTable.layout`
    segments_ptr,  # [n_blocks] int32: `BlockTable.block_segments`
    errors_ptr,  # [pieces * blocks_per_cell * BLOCK] fp32 or bf16; None: no error feedback
    step_ptr,  # [1] int64; None: nothing is rounded stochastically
    result_ptr,  # [pieces, cell_bytes] uint8
    pending_ptr,  # like errors
    n_segments,
    n_blocks,
    blocks_per_cell,
    chunks_per_cell,
    rank,
    world_size,
    cell_units,
    scales_unit,
    payload_unit,
    salt: tl.int64,
    error_salt: tl.int64,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of this rank's cell in one piece of the message."""
    N: tl.constexpr = CHUNK // BLOCK
    program = tl.program_id(0).to(tl.int64)
    piece = program // chunks_per_cell
    first_slot = (program - piece * chunks_per_cell) * N
    slots = first_slot + tl.arange(0, N)
    first_block = (piece * world_size + rank) * blocks_per_cell
    blocks = first_block + slots
    exists = (slots < blocks_per_cell) & (blocks < n_blocks)
    segments = tl.load(segments_ptr + blocks, mask=exists, other=0).to(tl.int64)
    lengths = tl.load(layout_ptr + segments)
    starts = (blocks - tl.load(layout_ptr + n_segments + segments)) * BLOCK
    counts = tl.where(exists, tl.minimum(lengths - starts, BLOCK), 0).to(tl.int32)
    keys = tl.load(layout_ptr + 2 * n_segments + segments)[:, None]
    index = starts[:, None] + tl.arange(0, BLOCK)[None, :]
    step = program if step_ptr is None else tl.load(step_ptr)
    result_ptr = aligned(result_ptr, piece * unit_bytes(cell_units))
    cells = (
        aligned(received_ptr, piece * world_size * unit_bytes(cell_units)),
        result_ptr,
        result_ptr.to(tl.pointer_type(tl.int32)),
    )
    if errors_ptr is not None:
        first = (piece * blocks_per_cell + first_slot) * BLOCK
        errors_ptr = aligned(errors_ptr, first)
        pending_ptr = aligned(pending_ptr, first)
    memory = (errors_ptr, pending_ptr)
    numbers = (slots, blocks_per_cell, counts, index, keys + salt, keys + error_salt, step)
    units = (world_size, cell_units, scales_unit, payload_unit)
    # A mask keeps accesses scalar, so a chunk of full blocks has a branch of its own.
    if tl.min(counts, axis=0) == BLOCK:
        _reduce_chunk(*cells, *memory, *numbers, *units, FORMAT, STOCHASTIC, BLOCK, N, True)
    else:
        _reduce_chunk(*cells, *memory, *numbers, *units, FORMAT, STOCHASTIC, BLOCK, N, False)


def reduce_quantized_triton(
    received: Tensor,
    section: Section,
    result: Tensor,
    *,
    rank: int,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`reduce_quantized` in one launch."""
    table = section.table
    pieces, world_size, _ = received.shape
    chunks_per_cell = -(-section.blocks_per_cell * table.block_size // CHUNK_NUMEL)
    with torch.cuda.device_of(received):
        _reduce_kernel[(pieces * chunks_per_cell,)](
            received_ptr=received,
            layout_ptr=table.layout,
            segments_ptr=table.block_segments,
            errors_ptr=errors,
            result_ptr=result,
            pending_ptr=pending,
            n_segments=len(table),
            n_blocks=table.n_blocks,
            chunks_per_cell=chunks_per_cell,
            rank=rank,
            world_size=world_size,
            FORMAT=section.format,
            BLOCK=table.block_size,
            **place(section, received),
            **randomness(rounding, pending),
            **OPTIONS,
        )
