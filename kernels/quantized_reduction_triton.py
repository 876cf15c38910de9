"""`reduce_quantized` in Triton: a program decodes, sums and encodes 1024 elements of one cell."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.block_codec_triton import (
    encode_blocks,
    load_blocks,
    load_errors,
    store_blocks,
    store_errors,
    unit_bytes,
)
from gradwire.kernels.block_table import Section
from gradwire.kernels.counter_random import random_bits_triton
from gradwire.kernels.language import kernel, tl
from gradwire.kernels.quantization_triton import OPTIONS, place, randomness
from gradwire.kernels.wire_formats import Rounding

# Elements per program: sums, their random numbers and the received codes are in registers at once.
REDUCE_NUMEL = 1024


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
    # Blocks are counted in int32, as in `_locate`.
    piece = program.to(tl.int32) // chunks_per_cell
    first_slot = (program.to(tl.int32) - piece * chunks_per_cell) * N
    slots = first_slot + tl.arange(0, N)
    blocks = (piece * world_size + rank) * blocks_per_cell + slots
    exists = (slots < blocks_per_cell) & (blocks < n_blocks)

    # Whole blocks are masked, never parts of them, so accesses stay wide.
    cell_bytes = unit_bytes(cell_units)
    received = received_ptr.to(tl.int64) + (piece * world_size).to(tl.int64) * cell_bytes
    total = tl.zeros((N, BLOCK), tl.float32)
    peer = 0
    while peer < world_size:
        scales, payload = received + unit_bytes(scales_unit), received + unit_bytes(payload_unit)
        total += load_blocks(scales, payload, slots, exists, FORMAT, BLOCK, False)
        received += cell_bytes
        peer += 1

    # Read after the loop, which needs the registers.
    segments = tl.load(segments_ptr + blocks, mask=exists, other=0).to(tl.int64)
    lengths = tl.load(layout_ptr + segments)
    starts = (blocks - tl.load(layout_ptr + n_segments + segments)) * BLOCK  # [N] int64
    counts = tl.where(exists, tl.minimum(lengths - starts, BLOCK), 0).to(tl.int32)
    keys = tl.load(layout_ptr + 2 * n_segments + segments)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    index = starts[:, None] + columns  # [N, BLOCK]
    step = program if step_ptr is None else tl.load(step_ptr)
    has_room = slots < blocks_per_cell
    errors_at = (piece * blocks_per_cell + first_slot).to(tl.int64) * BLOCK
    if errors_ptr is not None:
        ERROR: tl.constexpr = errors_ptr.dtype.element_ty
        total += load_errors((errors_ptr + errors_at).to(tl.int64), has_room, ERROR, BLOCK, N, False)
    total = tl.where(columns < counts[:, None], total, 0.0)

    random = random_bits_triton(keys + salt, step, index) if STOCHASTIC else index
    scale, encoded, decoded = encode_blocks(total, counts, random, FORMAT, STOCHASTIC, False)
    result = result_ptr.to(tl.int64) + piece.to(tl.int64) * cell_bytes
    scales, payload = result + unit_bytes(scales_unit), result + unit_bytes(payload_unit)
    store_blocks(scales, payload, slots, exists, scale, encoded, FORMAT, BLOCK, False)
    if errors_ptr is not None:
        pending = (pending_ptr + errors_at).to(tl.int64)
        store_errors(pending, total - decoded, counts, has_room, keys + error_salt, step, index, ERROR, False)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(total) < float("inf"), 0, 1), axis=1), axis=0)
    if n_bad > 0:
        tl.atomic_max(result.to(tl.pointer_type(tl.int32)), 1, sem="relaxed")  # no order needed: no fence


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
    chunks_per_cell = -(-section.blocks_per_cell * table.block_size // REDUCE_NUMEL)
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
            CHUNK=REDUCE_NUMEL,
        )
