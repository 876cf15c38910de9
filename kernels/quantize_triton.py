"""Quantization in Triton: a program handles one chunk of 4096 elements, as a tile of blocks.

A program of `reduce_quantized` or `sum_quantized` works on 1024 elements of one cell, or fewer with many ranks. Message
offsets are counted in *units* of 16 bytes, so the compiler knows their alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.block_table import ALIGN_BYTES, Section
from gradwire.kernels.common_triton import kernel, load_chunk, triton_dtype
from gradwire.kernels.layouts import next_power_of_2
from gradwire.kernels.segment_table import CHUNK_NUMEL
from gradwire.kernels.wire_formats import Rounding
from gradwire.kernels.wire_formats_triton import (
    elements,
    encode_blocks,
    load_blocks,
    load_errors,
    load_tile,
    locate_blocks,
    store_blocks,
    store_errors,
    store_tile,
    sum_blocks,
    unit_bytes,
)

NUM_WARPS = 8
# Elements that the branch for partial or unaligned chunks handles at a time: the largest block.
TAIL_NUMEL = 1024
# Elements per program of `reduce_quantized`: sums, random numbers and received codes are in registers at once.
REDUCE_NUMEL = 1024
MANY_PEERS = 64  # from which on programs and chunks are a quarter as large
# Peers whose cells `reduce_quantized` and `sum_quantized` read at a time.
MAX_PEERS = 8
# Headers that a program of `commit_errors` reads at a time.
FLAGS_NUMEL = 128


@triton.jit
def _quantize_tiles(
    source,  # address of [remaining]
    errors,  # address of [blocks * BLOCK]
    pending,  # address of [blocks * BLOCK]
    place,  # the last arguments of `locate_blocks`
    first_block,  # int32
    remaining,  # int32
    start,
    multiplier,
    error_key,
    step,
    SOURCE: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_ERRORS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode a chunk of one gradient tile by tile. No element is missing if FULL."""
    N: tl.constexpr = TILE // BLOCK
    ITEM: tl.constexpr = SOURCE.primitive_bitwidth // 8
    ERROR_ITEM: tl.constexpr = 0 if ERROR is None else ERROR.primitive_bitwidth // 8
    rows = tl.arange(0, N)
    offs = rows[:, None] * BLOCK + tl.arange(0, BLOCK // FORMAT.planes)[None, :]
    first = 0
    while first < remaining:
        source_ptr = (source + first * ITEM).to(tl.pointer_type(SOURCE))
        counts = tl.minimum(tl.maximum(remaining - first - rows * BLOCK, 0), BLOCK)
        mask = counts > 0
        if FULL:
            source_ptr = tl.multiple_of(source_ptr, 16)
        values = load_tile(source_ptr + offs, counts, FORMAT.planes, FULL).to(tl.float32) * multiplier
        if HAS_ERRORS:
            values += load_errors(errors + first * ERROR_ITEM, mask, ERROR, BLOCK, FORMAT.planes, N, FULL)
        scale, encoded, decoded = encode_blocks(values, counts, FORMAT, FULL)
        scales, payload, slots = locate_blocks(first_block + first // BLOCK, N, FULL, *place)
        store_blocks(scales, payload, slots, mask, scale, encoded, FORMAT, BLOCK, FULL)
        if ERROR is not None:
            index = start + first + rows[:, None] * BLOCK + elements(BLOCK, FORMAT.planes)  # [N, BLOCK]
            error, numbers = values - decoded, (error_key, step, index)
            address = pending + first * ERROR_ITEM
            store_errors(address, error, counts, mask, *numbers, ERROR, FORMAT.planes, FULL)
        first += TILE


@kernel
def _quantize_kernel(
    table_ptr,  # [4 S + 2 C] int64: the packed table of `BlockTable.segments`
    errors_ptr,  # [numel] fp32 or bf16; None: there are none
    step_ptr,  # [1] int64; None: the errors are not rounded
    message_ptr,  # [pieces, n, cell_bytes] uint8
    pending_ptr,  # [numel], like errors; None: no error feedback
    cleared_ptr,  # [n_pieces, cell_bytes] uint8: its headers become 0; None: there is none
    n_segments,
    n_chunks,
    n_pieces,
    blocks_per_cell,
    cell_units,
    scales_unit,
    payload_unit,
    scale: tl.float64,
    error_salt: tl.int64,
    SOURCE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One chunk of one gradient into the message."""
    chunk = tl.program_id(0).to(tl.int64)
    address, length, first_block, key, start = load_chunk(table_ptr, n_segments, n_chunks, chunk, 4)
    source = (address.to(tl.pointer_type(SOURCE)) + start).to(tl.int64)
    remaining = tl.minimum(length - start, CHUNK).to(tl.int32)
    first_block += start // BLOCK
    step = start if step_ptr is None else tl.load(step_ptr)
    place = (message_ptr.to(tl.int64), blocks_per_cell, cell_units, scales_unit, payload_unit)
    numbers = (start, tl.full((), scale, tl.float32), key + error_salt, step)
    # Pointers are passed as integers: AMD's compiler loses the alignment of offsets from an argument below 2 GiB.
    ERROR: tl.constexpr = None if pending_ptr is None else pending_ptr.dtype.element_ty
    HAS_ERRORS: tl.constexpr = errors_ptr is not None
    errors = source if errors_ptr is None else (errors_ptr + first_block * BLOCK).to(tl.int64)
    pending = source if pending_ptr is None else (pending_ptr + first_block * BLOCK).to(tl.int64)
    tensors = (source, errors, pending, place, first_block.to(tl.int32))
    # A mask that depends on the table makes accesses scalar, so full aligned chunks have their own branch. Scalar
    # accesses take many registers, so the other branch works on smaller tiles.
    if (remaining == CHUNK) & (source % 16 == 0) & (blocks_per_cell >= TILE // BLOCK):
        _quantize_tiles(*tensors, CHUNK, *numbers, SOURCE, ERROR, HAS_ERRORS, FORMAT, BLOCK, TILE, True)
    else:
        _quantize_tiles(*tensors, remaining, *numbers, SOURCE, ERROR, HAS_ERRORS, FORMAT, BLOCK, TAIL, False)
    if cleared_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if chunk == 0:
            headers_ptr = cleared_ptr.to(tl.pointer_type(tl.int32))
            words = tl.arange(0, 4).to(tl.int64)
            piece = 0
            while piece < n_pieces:
                tl.store(headers_ptr + (words + piece * unit_bytes(cell_units) // 4), tl.zeros((4,), tl.int32))
                piece += 1


@triton.jit
def _dequantize_chunk(
    target,  # address of [remaining]
    scales,  # [N]: addresses in the cells
    payload,  # [N]
    slots,  # [N]
    remaining,  # int32
    TARGET: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    FULL: tl.constexpr,
):
    """Decode a chunk of one gradient, which has all its elements if FULL."""
    rows = tl.arange(0, N)
    offs = rows[:, None] * BLOCK + tl.arange(0, BLOCK // FORMAT.planes)[None, :]
    values = load_blocks(scales, payload, slots, rows * BLOCK < remaining, FORMAT, BLOCK, FULL)
    target_ptr = target.to(tl.pointer_type(TARGET))
    if TARGET.primitive_bitwidth == 16:
        # Formats with scales reach beyond fp16: finite numbers must not become inf.
        limit = 65504.0 if TARGET == tl.float16 else 3.3895313892515355e38
        saturated = tl.minimum(tl.maximum(values, -limit), limit)
        values = tl.where(tl.abs(values) < float("inf"), saturated, values)
    values = values.to(TARGET)
    if FULL:
        target_ptr = tl.multiple_of(target_ptr, 16)
    counts = tl.minimum(tl.maximum(remaining - rows * BLOCK, 0), BLOCK)
    store_tile(target_ptr + offs, counts, values, FORMAT.planes, FULL)


@kernel
def _dequantize_kernel(
    table_ptr,  # [4 S + 2 C] int64: the packed table of `BlockTable.segments`
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
    address, length, first_block, _, start = load_chunk(table_ptr, n_segments, n_chunks, chunk, 4)
    target = (address.to(tl.pointer_type(TARGET)) + start).to(tl.int64)
    remaining = tl.minimum(length - start, CHUNK).to(tl.int32)
    first_block = (first_block + start // BLOCK).to(tl.int32)
    N: tl.constexpr = CHUNK // BLOCK
    place = (gathered_ptr.to(tl.int64), blocks_per_cell, cell_units, scales_unit, payload_unit)
    # A mask that depends on the table makes accesses scalar, so full aligned chunks have their own branch.
    if (remaining == CHUNK) & (target % 16 == 0) & (blocks_per_cell >= N):
        cell = locate_blocks(first_block, N, True, *place)
        _dequantize_chunk(target, *cell, remaining, TARGET, FORMAT, BLOCK, N, True)
    else:
        cell = locate_blocks(first_block, N, False, *place)
        _dequantize_chunk(target, *cell, remaining, TARGET, FORMAT, BLOCK, N, False)


@triton.jit
def _contents(layout_ptr, segments_ptr, blocks, exists, n_segments, BLOCK: tl.constexpr):
    """For blocks, [N]: number of elements, segment, and first element in the segment."""
    segments = tl.load(segments_ptr + blocks, mask=exists, other=0).to(tl.int64)
    lengths = tl.load(layout_ptr + segments)
    starts = (blocks - tl.load(layout_ptr + n_segments + segments)) * BLOCK  # int64
    return tl.where(exists, tl.minimum(lengths - starts, BLOCK), 0).to(tl.int32), segments, starts


@kernel
def _reduce_kernel(
    received_ptr,  # [pieces, n, cell_bytes] uint8
    layout_ptr,  # [3, S] int64: `BlockTable.layout`
    segments_ptr,  # [n_blocks] int32: `BlockTable.block_segments`
    errors_ptr,  # [pieces * blocks_per_cell * BLOCK] fp32 or bf16; None: no error feedback
    step_ptr,  # [1] int64; None: the errors are not rounded
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
    error_salt: tl.int64,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PEERS: tl.constexpr,
):
    """One chunk of this rank's cell in one piece of the message."""
    N: tl.constexpr = CHUNK // BLOCK
    program = tl.program_id(0).to(tl.int64)
    cells = (n_blocks, blocks_per_cell, chunks_per_cell, rank, world_size, cell_units, scales_unit, payload_unit)
    total, piece, slots, blocks, exists = sum_blocks(received_ptr, program, *cells, FORMAT, BLOCK, N, PEERS)

    # Read after the loop, which needs the registers.
    counts, segments, starts = _contents(layout_ptr, segments_ptr, blocks, exists, n_segments, BLOCK)
    keys = tl.load(layout_ptr + 2 * n_segments + segments)[:, None]
    columns = elements(BLOCK, FORMAT.planes)
    index = starts[:, None] + columns  # [N, BLOCK]
    step = program if step_ptr is None else tl.load(step_ptr)
    has_room = slots < blocks_per_cell
    first_slot = (program.to(tl.int32) - piece * chunks_per_cell) * N
    errors_at = (piece * blocks_per_cell + first_slot).to(tl.int64) * BLOCK
    if errors_ptr is not None:
        # The errors have room for whole cells, so slots without a block are read and written, too: as zeros.
        ERROR: tl.constexpr = errors_ptr.dtype.element_ty
        total += load_errors((errors_ptr + errors_at).to(tl.int64), has_room, ERROR, BLOCK, FORMAT.planes, N, False)
    total = tl.where(columns < counts[:, None], total, 0.0)

    scale, encoded, decoded = encode_blocks(total, counts, FORMAT, False)
    result = result_ptr.to(tl.int64) + piece.to(tl.int64) * unit_bytes(cell_units)
    scales, payload = result + unit_bytes(scales_unit), result + unit_bytes(payload_unit)
    store_blocks(scales, payload, slots, exists, scale, encoded, FORMAT, BLOCK, False)
    if errors_ptr is not None:
        pending = (pending_ptr + errors_at).to(tl.int64)
        numbers = (keys + error_salt, step, index)
        store_errors(pending, total - decoded, counts, has_room, *numbers, ERROR, FORMAT.planes, False)
    # A non-finite scale or element of any rank arrives here as a non-finite sum.
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(total) < float("inf"), 0, 1), axis=1), axis=0)
    if n_bad > 0:
        tl.atomic_max(result.to(tl.pointer_type(tl.int32)), 1, sem="relaxed")  # order does not matter: no fence


@kernel
def _sum_kernel(
    received_ptr,  # [pieces, n, cell_bytes] uint8
    layout_ptr,  # [3, S] int64: `BlockTable.layout`
    segments_ptr,  # [n_blocks] int32: `BlockTable.block_segments`
    total_ptr,  # [pieces * blocks_per_cell * BLOCK] fp32
    n_segments,
    n_blocks,
    blocks_per_cell,
    chunks_per_cell,
    rank,
    world_size,
    cell_units,
    scales_unit,
    payload_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PEERS: tl.constexpr,
):
    """One chunk of this rank's cell in one piece of the message; 0 where blocks or elements are missing."""
    N: tl.constexpr = CHUNK // BLOCK
    program = tl.program_id(0).to(tl.int64)
    cells = (n_blocks, blocks_per_cell, chunks_per_cell, rank, world_size, cell_units, scales_unit, payload_unit)
    total, piece, slots, blocks, exists = sum_blocks(received_ptr, program, *cells, FORMAT, BLOCK, N, PEERS)
    counts, _, _ = _contents(layout_ptr, segments_ptr, blocks, exists, n_segments, BLOCK)
    total = tl.where(elements(BLOCK, FORMAT.planes) < counts[:, None], total, 0.0)
    WIDTH: tl.constexpr = BLOCK // FORMAT.planes
    at = (piece * blocks_per_cell + slots).to(tl.int64)[:, None] * BLOCK + tl.arange(0, WIDTH)[None, :]
    store_tile(total_ptr + at, tl.where(slots < blocks_per_cell, BLOCK, 0), total, FORMAT.planes, False)


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
    # Every program reads all flags: they are few, and another launch to combine them would cost more.
    n_flags = tl.zeros((FLAGS,), tl.int32)
    first = 0
    while first < n_cells:
        cells = first + tl.arange(0, FLAGS).to(tl.int64)
        flags = tl.load(flags_ptr + cells * unit_bytes(cell_units) // 4, mask=cells < n_cells, other=0)
        n_flags += tl.where(flags != 0, 1, 0)
        first += FLAGS
    if tl.sum(n_flags, axis=0) == 0:
        remaining = numel - chunk * CHUNK
        # Computed as integers: AMD's compiler loses the alignment of offsets from an argument below 2 GiB.
        ELEMENT: tl.constexpr = errors_ptr.dtype.element_ty
        source_ptr = (pending_ptr + chunk * CHUNK).to(tl.int64).to(tl.pointer_type(ELEMENT))
        target_ptr = (errors_ptr + chunk * CHUNK).to(tl.int64).to(tl.pointer_type(ELEMENT))
        offs = tl.arange(0, CHUNK)
        if (remaining >= CHUNK) & ((source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0):
            tl.store(tl.multiple_of(target_ptr, 16) + offs, tl.load(tl.multiple_of(source_ptr, 16) + offs))
        else:
            mask = offs < remaining
            tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask, other=0), mask=mask)


def _place(section: Section, message: Tensor) -> dict[str, int]:
    """The arguments that locate a block."""
    return {
        "blocks_per_cell": section.blocks_per_cell,
        "cell_units": message.shape[-1] // ALIGN_BYTES,
        "scales_unit": section.scales_at // ALIGN_BYTES,
        "payload_unit": section.payload_at // ALIGN_BYTES,
    }


def _randomness(rounding: Rounding | None, pending: Tensor | None) -> dict[str, Any]:
    """The arguments of the random numbers. A kernel that needs none is compiled without a step."""
    is_needed = pending is not None and pending.dtype == torch.bfloat16
    return {
        "step_ptr": rounding.step if rounding is not None and is_needed else None,
        "error_salt": 0 if rounding is None else rounding.error_salt,
    }


# Multiply and add stay separate instructions: the same bits as on a CPU.
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}


def quantize_triton(
    tensors: Sequence[Tensor],
    section: Section,
    message: Tensor,
    scale: float,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
    cleared: Tensor | None = None,
) -> None:
    """`quantize` in one launch."""
    table, random = section.table, _randomness(rounding, pending)
    with torch.cuda.device_of(message):
        _quantize_kernel[(table.n_chunks,)](
            table_ptr=table.segments.packed(tensors),
            errors_ptr=errors,
            message_ptr=message,
            pending_ptr=pending,
            cleared_ptr=cleared,
            n_segments=len(table.lengths),
            n_chunks=table.n_chunks,
            n_pieces=message.shape[0],
            scale=scale,
            SOURCE=triton_dtype(table.dtype),
            FORMAT=section.format,
            BLOCK=table.block_size,
            **_place(section, message),
            **random,
            **OPTIONS,
            CHUNK=CHUNK_NUMEL,
            TILE=CHUNK_NUMEL if random["step_ptr"] is None else CHUNK_NUMEL // 2,
            TAIL=TAIL_NUMEL,
        )


def _sum_arguments(received: Tensor, section: Section, rank: int) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the common arguments of the kernels that sum received cells."""
    table, (pieces, world_size, _) = section.table, received.shape
    # Many peers leave a cell few elements: smaller chunks keep enough programs to hide the latency of the loads.
    chunk = REDUCE_NUMEL if world_size < MANY_PEERS else max(REDUCE_NUMEL // 4, table.block_size)
    chunks_per_cell = -(-section.blocks_per_cell * table.block_size // chunk)
    return (pieces * chunks_per_cell,), {
        "received_ptr": received,
        "layout_ptr": table.layout,
        "segments_ptr": table.block_segments,
        "n_segments": len(table.lengths),
        "n_blocks": table.n_blocks,
        "chunks_per_cell": chunks_per_cell,
        "rank": rank,
        "world_size": world_size,
        "FORMAT": section.format,
        "BLOCK": table.block_size,
        "CHUNK": chunk,
        "PEERS": next_power_of_2(world_size) if world_size < MAX_PEERS else MAX_PEERS,
        **_place(section, received),
        **OPTIONS,
        "num_warps": (NUM_WARPS if section.format.planes == 1 else NUM_WARPS // 2) * chunk // REDUCE_NUMEL,
    }


def reduce_quantized_triton(
    received: Tensor,
    section: Section,
    result: Tensor,
    rank: int,
    errors: Tensor | None = None,
    pending: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """`reduce_quantized` in one launch."""
    memory = {"errors_ptr": errors, "result_ptr": result, "pending_ptr": pending}
    with torch.cuda.device_of(received):
        grid, arguments = _sum_arguments(received, section, rank)
        _reduce_kernel[grid](**arguments, **memory, **_randomness(rounding, pending))


def sum_quantized_triton(received: Tensor, section: Section, total: Tensor, rank: int) -> None:
    """`sum_quantized` in one launch."""
    with torch.cuda.device_of(received):
        grid, arguments = _sum_arguments(received, section, rank)
        _sum_kernel[grid](total_ptr=total, **arguments)


def dequantize_triton(gathered: Tensor, section: Section, tensors: Sequence[Tensor]) -> None:
    """`dequantize` in one launch."""
    table = section.table
    with torch.cuda.device_of(gathered):
        _dequantize_kernel[(table.n_chunks,)](
            table_ptr=table.segments.packed_results(tensors),
            gathered_ptr=gathered,
            n_segments=len(table.lengths),
            n_chunks=table.n_chunks,
            TARGET=triton_dtype(table.dtype),
            FORMAT=section.format,
            BLOCK=table.block_size,
            **_place(section, gathered),
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
