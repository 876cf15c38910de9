"""Quantisation in Triton: a program handles one chunk of 4096 elements, as a tile of blocks.

Addresses in a message are computed from counts of 16 bytes, *units*, which tells the compiler their alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from gradwire.kernels.block_table import ALIGN_BYTES, Section, load_block_chunk
from gradwire.kernels.counter_random import random_bits_triton
from gradwire.kernels.dtypes import triton_dtype
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.segment_table import CHUNK_NUMEL
from gradwire.kernels.wire_formats import Rounding

NUM_WARPS = 8
# Elements that the branch for partial or unaligned chunks handles at a time: the largest block.
TAIL_NUMEL = 1024
# Headers that a program of `commit_errors` reads at a time.
FLAGS_NUMEL = 128


@jit
def _locate(message, blocks, blocks_per_cell, cell_units, scales_unit, payload_unit):
    """Where blocks lie: the addresses of the scales and the payloads of their cells, and their slots there; [N].

    Blocks are counted in int32: 2^31 of the smallest are 64 Gi elements.
    """
    cells = blocks // blocks_per_cell  # in 32 bits: a division of 64 bits takes a hundred instructions
    slots = blocks - cells * blocks_per_cell
    starts = message + cells.to(tl.int64) * unit_bytes(cell_units)
    return starts + unit_bytes(scales_unit), starts + unit_bytes(payload_unit), slots


@jit
def _quantize_part(
    source,  # address of [remaining]
    errors,  # address of [N * BLOCK]
    pending,  # address of [N * BLOCK]
    message,  # address
    blocks_per_cell,
    cell_units,
    scales_unit,
    payload_unit,
    first_block,  # int32
    remaining,  # int32
    start,
    multiplier,
    key,
    error_key,
    step,
    SOURCE: tl.constexpr,
    ERROR: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode a part of a chunk, which has all its elements if FULL."""
    N: tl.constexpr = PART // BLOCK
    source_ptr = source.to(tl.pointer_type(SOURCE))
    rows = tl.arange(0, N)
    offs = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [N, BLOCK]
    counts = tl.minimum(tl.maximum(remaining - rows * BLOCK, 0), BLOCK)
    mask = counts > 0
    if FULL:
        values = tl.load(tl.multiple_of(source_ptr, 16) + offs)
    else:
        values = tl.load(source_ptr + offs, mask=offs < remaining, other=0)
    values = values.to(tl.float32) * multiplier
    if ERROR is not None:
        values += load_errors(errors, mask, ERROR, BLOCK, N, FULL)
    index = start + offs
    random = random_bits_triton(key, step, index) if STOCHASTIC else offs
    scale, encoded, decoded = encode_blocks(values, counts, random, FORMAT, STOCHASTIC, FULL)
    scales, payload, slots = _locate(
        message, first_block + rows, blocks_per_cell, cell_units, scales_unit, payload_unit
    )
    store_blocks(scales, payload, slots, mask, scale, encoded, FORMAT, BLOCK, FULL)
    if ERROR is not None:
        store_errors(pending, values - decoded, counts, mask, error_key, step, index, ERROR, FULL)


@jit
def _quantize_parts(
    source,  # address of [remaining]
    errors,  # address of [blocks * BLOCK]
    pending,  # address of [blocks * BLOCK]
    message,  # address
    blocks_per_cell,
    cell_units,
    scales_unit,
    payload_unit,
    first_block,  # int32
    remaining,  # int32
    start,
    multiplier,
    key,
    error_key,
    step,
    SOURCE: tl.constexpr,
    ERROR: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode a chunk of one gradient, part by part."""
    ERROR_BYTES: tl.constexpr = 0 if ERROR is None else ERROR.primitive_bitwidth // 8
    place = (message, blocks_per_cell, cell_units, scales_unit, payload_unit)
    numbers = (multiplier, key, error_key, step)
    while remaining > 0:
        at = (first_block, remaining, start)
        memory = (source, errors, pending)
        _quantize_part(*memory, *place, *at, *numbers, SOURCE, ERROR, FORMAT, STOCHASTIC, BLOCK, PART, FULL)
        source += PART * SOURCE.primitive_bitwidth // 8
        errors += PART * ERROR_BYTES
        pending += PART * ERROR_BYTES
        first_block += PART // BLOCK
        remaining -= PART
        start += PART


@kernel
def _quantize_kernel(
    table_ptr,  # [4 S + 2 C] int64: `BlockTable.packed`
    errors_ptr,  # [numel] fp32 or bf16; None: no error feedback
    step_ptr,  # [1] int64; None: nothing is rounded stochastically
    message_ptr,  # [pieces, n, cell_bytes] uint8
    pending_ptr,  # [numel], like errors
    n_segments,
    n_chunks,
    blocks_per_cell,
    cell_units,
    scales_unit,
    payload_unit,
    scale: tl.float64,
    salt: tl.int64,
    error_salt: tl.int64,
    SOURCE: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One chunk of one gradient into the message."""
    chunk = tl.program_id(0).to(tl.int64)
    address, length, first_block, key, start = load_block_chunk(table_ptr, n_segments, n_chunks, chunk)
    source = (address.to(tl.pointer_type(SOURCE)) + start).to(tl.int64)
    remaining = tl.minimum(length - start, CHUNK).to(tl.int32)
    first_block += start // BLOCK
    step = start if step_ptr is None else tl.load(step_ptr)
    place = (message_ptr.to(tl.int64), blocks_per_cell, cell_units, scales_unit, payload_unit)
    key_salted, error_key = key + salt, key + error_salt
    multiplier = tl.full((), scale, tl.float32)
    numbers = (first_block.to(tl.int32), remaining, start, multiplier, key_salted, error_key, step)
    # Pointers travel as numbers: as an offset from an argument below 2 GiB, AMD's compiler would lose their alignment.
    ERROR: tl.constexpr = None if errors_ptr is None else errors_ptr.dtype.element_ty
    errors = source if errors_ptr is None else (errors_ptr + first_block * BLOCK).to(tl.int64)
    pending = source if errors_ptr is None else (pending_ptr + first_block * BLOCK).to(tl.int64)
    memory = (source, errors, pending)
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own. Scalar
    # accesses take many registers, so the other branch works on smaller parts of the chunk.
    if (remaining == CHUNK) & (source % 16 == 0):
        _quantize_parts(*memory, *place, *numbers, SOURCE, ERROR, FORMAT, STOCHASTIC, BLOCK, PART, True)
    else:
        _quantize_parts(*memory, *place, *numbers, SOURCE, ERROR, FORMAT, STOCHASTIC, BLOCK, TAIL, False)


@jit
def _dequantize_chunk(
    target,  # address of [remaining]
    scales,  # [N]: addresses in the cells
    payload,  # [N]
    slots,  # [N]
    remaining,
    TARGET: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Decode a chunk of one gradient, which has all its elements if FULL."""
    rows = tl.arange(0, CHUNK // BLOCK)
    offs = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [N, BLOCK]
    values = load_blocks(scales, payload, slots, rows * BLOCK < remaining, FORMAT, BLOCK, FULL)
    target_ptr = target.to(tl.pointer_type(TARGET))
    if TARGET.primitive_bitwidth == 16:
        limit = 65504.0 if TARGET == tl.float16 else 3.3895313892515355e38
        saturated = tl.minimum(tl.maximum(values, -limit), limit)
        values = tl.where(tl.abs(values) < float("inf"), saturated, values)
    values = values.to(TARGET)
    if FULL:
        tl.store(tl.multiple_of(target_ptr, 16) + offs, values)
    else:
        tl.store(target_ptr + offs, values, mask=offs < remaining)


@kernel
def _dequantize_kernel(
    table_ptr,  # [4 S + 2 C] int64: `BlockTable.packed`
    gathered_ptr,  # [pieces, n, cell_bytes] uint8
    n_segments,
    n_chunks,
    blocks_per_cell,
    cell_units,
    scales_unit,
    payload_unit,
    TARGET: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of the message into its gradient."""
    chunk = tl.program_id(0).to(tl.int64)
    address, length, first_block, _, start = load_block_chunk(table_ptr, n_segments, n_chunks, chunk)
    target = (address.to(tl.pointer_type(TARGET)) + start).to(tl.int64)
    remaining = tl.minimum(length - start, CHUNK).to(tl.int32)
    blocks = (first_block + start // BLOCK).to(tl.int32) + tl.arange(0, CHUNK // BLOCK)
    cell = _locate(gathered_ptr.to(tl.int64), blocks, blocks_per_cell, cell_units, scales_unit, payload_unit)
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own.
    if (remaining == CHUNK) & (target % 16 == 0):
        _dequantize_chunk(target, *cell, remaining, TARGET, FORMAT, BLOCK, CHUNK, True)
    else:
        _dequantize_chunk(target, *cell, remaining, TARGET, FORMAT, BLOCK, CHUNK, False)


@kernel
def _commit_errors_kernel(
    gathered_ptr,  # [cells, cell_bytes] uint8
    pending_ptr,  # [numel]
    errors_ptr,  # [numel]
    n_cells,
    cell_units,
    numel,
    FLAGS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of the error memories, if no cell has a flag."""
    chunk = tl.program_id(0).to(tl.int64)
    flags_ptr = gathered_ptr.to(tl.pointer_type(tl.int32))
    n_flags = tl.zeros((FLAGS,), tl.int32)
    first = 0
    while first < n_cells:
        cells = first + tl.arange(0, FLAGS).to(tl.int64)
        flags = tl.load(flags_ptr + cells * unit_bytes(cell_units) // 4, mask=cells < n_cells, other=0)
        n_flags += tl.where(flags != 0, 1, 0)
        first += FLAGS
    if tl.sum(n_flags, axis=0) == 0:
        remaining = numel - chunk * CHUNK
        # Computed as numbers: as offsets from an argument below 2 GiB, AMD's compiler would lose their alignment.
        ELEMENT: tl.constexpr = errors_ptr.dtype.element_ty
        source_ptr = (pending_ptr + chunk * CHUNK).to(tl.int64).to(tl.pointer_type(ELEMENT))
        target_ptr = (errors_ptr + chunk * CHUNK).to(tl.int64).to(tl.pointer_type(ELEMENT))
        offs = tl.arange(0, CHUNK)
        if (remaining >= CHUNK) & ((source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0):
            tl.store(tl.multiple_of(target_ptr, 16) + offs, tl.load(tl.multiple_of(source_ptr, 16) + offs))
        else:
            mask = offs < remaining
            tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask, other=0), mask=mask)


def place(section: Section, message: Tensor) -> dict[str, int]:
    """The arguments that locate a block."""
    return {
        "blocks_per_cell": section.blocks_per_cell,
        "cell_units": message.shape[-1] // ALIGN_BYTES,
        "scales_unit": section.scales_at // ALIGN_BYTES,
        "payload_unit": section.payload_at // ALIGN_BYTES,
    }


def randomness(rounding: Rounding | None, pending: Tensor | None) -> dict[str, Any]:
    """The arguments of the random numbers. A kernel that needs none is compiled without a step."""
    is_stochastic = rounding is not None and rounding.stochastic
    is_needed = is_stochastic or (pending is not None and pending.dtype == torch.bfloat16)
    return {
        "step_ptr": rounding.step if rounding is not None and is_needed else None,
        "salt": 0 if rounding is None else rounding.salt,
        "error_salt": 0 if rounding is None else rounding.error_salt,
        "STOCHASTIC": is_stochastic,
    }


# Multiply and add stay separate instructions: the same bits as on a CPU.
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}


def quantize_triton(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    *,
    scale: float,
    errors: Tensor | None,
    pending: Tensor | None,
    rounding: Rounding | None,
) -> None:
    """`quantize` in one launch."""
    table, random = section.table, randomness(rounding, pending)
    with torch.cuda.device_of(message):
        _quantize_kernel[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            errors_ptr=errors,
            message_ptr=message,
            pending_ptr=pending,
            n_segments=len(table),
            n_chunks=table.n_chunks,
            scale=scale,
            SOURCE=triton_dtype(table.dtype),
            FORMAT=section.format,
            BLOCK=table.block_size,
            **place(section, message),
            **random,
            **OPTIONS,
            CHUNK=CHUNK_NUMEL,
            PART=CHUNK_NUMEL if random["step_ptr"] is None else CHUNK_NUMEL // 2,
            TAIL=TAIL_NUMEL,
        )


def dequantize_triton(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` in one launch."""
    table = section.table
    with torch.cuda.device_of(gathered):
        _dequantize_kernel[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            gathered_ptr=gathered,
            n_segments=len(table),
            n_chunks=table.n_chunks,
            TARGET=triton_dtype(table.dtype),
            FORMAT=section.format,
            BLOCK=table.block_size,
            **place(section, gathered),
            **OPTIONS,
            CHUNK=CHUNK_NUMEL,
        )


def commit_errors_triton(gathered: Tensor, pending: Tensor, errors: Tensor) -> None:
    """`commit_errors` in one launch."""
    pieces, world_size, cell_bytes = gathered.shape
    with torch.cuda.device_of(gathered):
        _commit_errors_kernel[(-(-errors.numel() // CHUNK_NUMEL),)](
            gathered_ptr=gathered,
            pending_ptr=pending,
            errors_ptr=errors,
            n_cells=pieces * world_size,
            cell_units=cell_bytes // ALIGN_BYTES,
            numel=errors.numel(),
            FLAGS=FLAGS_NUMEL,
            CHUNK=CHUNK_NUMEL,
            num_warps=NUM_WARPS,
        )
