"""PowerSGD's passes in Triton: P = M Q and Q = M^T P, then out = P Q^T with E = M - out, and the renewal of factors.

A program works through a strip of one matrix, tile by tile. For P and for the result, a strip runs along a few rows;
for Q, down a few columns. Strips keep the number of programs high for matrices of few rows or columns.

A product stores a partial sum for each strip. A second kernel adds them up in a fixed order: this needs no float
atomics, and gives the same bits in every run. Its launch also packs the uncompressed gradients.

`reconstruct` keeps its rows of P in registers. Further programs renew the factors meanwhile. Their norms come first,
from a kernel whose further programs unpack the gradients that were sent uncompressed.

Offsets within a tile are 32 bits wide, on a 64-bit address of its first element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_fields, triton_dtype, uniform_triton
from gradwire.kernels.dispatch import has_tf32
from gradwire.kernels.flatten_triton import flatten_chunk, unflatten_chunk
from gradwire.kernels.matrix_table import (
    ALIGN_NUMEL,
    ELEMENTWISE_RANK,
    FactorLayout,
    MatrixTable,
    Operands,
    Uncompressed,
    chunks,
    strips,
)
from gradwire.kernels.segment_table import CHUNK_NUMEL

# Pipeline stages of products by `tl.dot`. For M^T P, more stages than these would spill registers.
STAGES = 3
STAGES_TO_Q: dict[tuple[int, str | None], int] = {(4, "tf32"): 3, (2, "tf32"): 2, (4, "ieee"): 1, (2, "ieee"): 1}
# Columns of a factor in one `tl.dot`. With 64, M^T P in TF32 has the shape of Hopper's and Blackwell's asynchronous
# products, which need more than 64 KiB of shared memory; in fp32 it spills.
DOT_WIDTH = 32
# A program adds up a chunk of this many elements of a factor, this many partial sums at a time.
SUM_NUMEL = 256
SUM_STRIPS = 4
# `renew`: elements of a row of a factor that a program handles at a time.
BLOCK_NUMEL = 1024
NUM_WARPS = 8  # 16 elements a thread where a program unpacks a chunk of gradients


@triton.jit
def _as_aligned(x, ALIGNED: tl.constexpr):
    """``x`` itself; if ALIGNED, the compiler learns that it is a multiple of 8."""
    return x // 8 * 8 if ALIGNED else x


@triton.jit
def _load_m(
    memory,  # addresses of source, target and error, [n, m]
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    SOURCE: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of M in fp32: from the target if `project` kept it there, else G + E."""
    source, target, error = memory
    source_ptr = (target if KEPT else source).to(tl.pointer_type(SOURCE)) + first
    error_ptr = error.to(tl.pointer_type(tl.float32)) + first
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
    m = tl.load(source_ptr + offs, mask=mask, other=0).to(tl.float32)
    if HAS_ERROR and not KEPT:
        m += tl.load(error_ptr + offs, mask=mask, other=0)
    return m


@triton.jit
def _keep_m(
    target,  # address of [n, m]
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    m,  # [tile] fp32
    SOURCE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a tile of M in the target, where `_load_m` finds it."""
    target_ptr = target.to(tl.pointer_type(SOURCE)) + first
    if ALIGNED:
        target_ptr = tl.multiple_of(target_ptr, 16)
    tl.store(target_ptr + offs, m, mask=mask)


@triton.jit
def _sum_rows(
    x,  # [ROWS, COLUMNS]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sum of each row: of neighbors, of neighboring sums, and so on, whichever thread holds which element."""
    for i in tl.static_range(1, COLUMNS.bit_length()):
        x = tl.sum(tl.reshape(x, (ROWS, COLUMNS >> i, 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _multiply_elementwise(
    memory,  # addresses of source, target and error, [n, m]
    factor,  # address of a factor, fp32: Q, [r, m], to compute P; P, [r, n], to compute Q
    first,  # row of M to compute P, column to compute Q
    end,  # column of M to compute P, row to compute Q
    sizes,  # rows, columns, rank
    begin,  # like end
    SOURCE: tl.constexpr,
    TO_P: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,  # distance between two tiles of the strip
):
    """The products of a strip of M and each column of a factor, without `tl.dot`: [ROWS] for P.

    A thread keeps a sum for each of its elements of a tile and each column: these are added up once, after the loop;
    for Q, [ROWS, COLUMNS], by the caller.
    """
    rows, columns, rank = sizes
    across = columns if TO_P else rows  # the side that is summed over
    stride = _as_aligned(columns.to(tl.int32), ALIGNED)
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs = offs_n * stride + offs_m  # [ROWS, COLUMNS]
    totals = tl.tuple(())
    for _ in tl.static_range(RANK):
        totals += (tl.zeros((ROWS, COLUMNS), dtype=tl.float32),)
    for start in range(begin, end, STEP):
        row = first if TO_P else start
        column = start if TO_P else first
        n_columns = _as_aligned((columns - column).to(tl.int32), ALIGNED)
        mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first_m = row * columns + column
        m = _load_m(memory, first_m, offs, mask, SOURCE, KEEP and not TO_P, HAS_ERROR, ALIGNED)
        if KEEP and TO_P:
            _keep_m(memory[1], first_m, offs, mask, m, SOURCE, ALIGNED)
        added = tl.tuple(())  # a loop carries a tuple as a whole: its elements cannot be replaced one by one
        for r in tl.static_range(RANK):
            # The columns added to the rank are copies of the last, whose sums are not stored.
            column_ptr = factor.to(tl.pointer_type(tl.float32)) + (tl.minimum(r, rank - 1) * across + start)
            if TO_P:
                if ALIGNED:
                    column_ptr = tl.multiple_of(column_ptr, 16)
                x = tl.load(column_ptr + offs_m, mask=mask_m, other=0)  # [1, COLUMNS]
            else:
                x = tl.load(column_ptr + offs_n, mask=mask_n, other=0)  # [ROWS, 1]
            added += (totals[r] + m * x,)
        totals = added
    if TO_P:
        sums = tl.tuple(())
        for r in tl.static_range(RANK):
            sums += (_sum_rows(totals[r], ROWS, COLUMNS),)
        totals = sums
    return totals


@triton.jit
def _multiply_dot(
    memory,  # addresses of source, target and error, [n, m]
    factor,  # address of a factor, fp32: Q, [r, m], to compute P; P, [r, n], to compute Q
    first,  # row of M to compute P, column to compute Q
    end,  # column of M to compute P, row to compute Q
    sizes,  # rows, columns, rank
    begin,  # like end
    SOURCE: tl.constexpr,
    TO_P: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The product of a factor and a strip of M by `tl.dot`, in parts [WIDTH, BLOCK]: Q M^T for P^T, P^T M for Q^T."""
    rows, columns, rank = sizes
    across = columns if TO_P else rows  # the side that is summed over
    stride = _as_aligned(columns.to(tl.int32), ALIGNED)
    offs_block = tl.arange(0, BLOCK)
    offs_r = tl.arange(0, WIDTH)
    offs = offs_block[:, None] * stride + offs_block[None, :]  # [BLOCK, BLOCK]
    factor_ptr = factor.to(tl.pointer_type(tl.float32))
    totals = tl.tuple(())
    for _ in tl.static_range(RANK // WIDTH):
        totals += (tl.zeros((WIDTH, BLOCK), dtype=tl.float32),)
    for start in range(begin, end, BLOCK):
        row = first if TO_P else start
        column = start if TO_P else first
        n_columns = _as_aligned((columns - column).to(tl.int32), ALIGNED)
        mask_n = offs_block < rows - row
        mask_m = offs_block < n_columns
        mask = mask_n[:, None] & mask_m[None, :]
        first_m = row * columns + column
        m = _load_m(memory, first_m, offs, mask, SOURCE, KEEP and not TO_P, HAS_ERROR, ALIGNED)
        if KEEP and TO_P:
            _keep_m(memory[1], first_m, offs, mask, m, SOURCE, ALIGNED)
        added = tl.tuple(())
        for part in tl.static_range(RANK // WIDTH):
            columns_of_part = part * WIDTH + offs_r
            mask_r = columns_of_part < rank
            part_ptrs = factor_ptr + start + columns_of_part.to(tl.int64) * (stride if TO_P else across)
            if TO_P and ALIGNED:
                part_ptrs = tl.multiple_of(part_ptrs, 16)
            mask_x = mask_r[:, None] & (mask_m if TO_P else mask_n)[None, :]
            x = tl.load(part_ptrs[:, None] + offs_block[None, :], mask=mask_x, other=0)  # [WIDTH, BLOCK]
            # TF32 is enough: the error memory is computed from the result as it was sent, whatever rounded the factors.
            added += (tl.dot(x, tl.trans(m) if TO_P else m, totals[part], input_precision=PRECISION),)
        totals = added
    return totals


@kernel
def _multiply_kernel(
    addresses_ptr,  # [3, matrices] int64: `Operands.addresses`
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    strips_ptr,  # [5, programs] int64: `strips`
    factor_ptr,  # packed Q for P, packed P for Q, fp32
    partial_ptr,  # the partial sums of each matrix, one after another, [strips, r, n] or [strips, r, m] fp32
    n_matrices,
    n_programs,
    SOURCE: tl.constexpr,
    TO_P: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    PRECISION: tl.constexpr,  # input precision of `tl.dot`; None: no `tl.dot`
    RANK: tl.constexpr,
    DOT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block of P (TO_P) or of Q, summed over one strip of M. With KEEP, M is stored on the way to P."""
    program = tl.program_id(0).to(tl.int64)
    matrix, first, begin, end = load_fields(strips_ptr, n_programs, program, 0, 4)
    sizes = load_fields(layout_ptr, n_matrices, matrix, 0, 3)
    rows, columns, rank = sizes
    p_offset, q_offset = load_fields(layout_ptr, n_matrices, matrix, 3, 5)
    memory = load_fields(addresses_ptr, n_matrices, matrix, 0, 3)
    # An integer: AMD's compiler forgets the alignment of a pointer derived from an argument.
    factor = (factor_ptr + (q_offset if TO_P else p_offset)).to(tl.int64)
    strip = (memory, factor, first, end, sizes)
    # The aligned branch moves 16 bytes at a time, the other one element.
    is_aligned = (memory[0] | memory[1] | memory[2] | factor | columns * 2) % 16 == 0
    if PRECISION is None:
        partial_ptr += load_fields(strips_ptr, n_programs, program, 4, 5)[0]
        # Both branches add in the same order, so that the bits do not depend on the alignment.
        STEP: tl.constexpr = COLUMNS if TO_P else ROWS
        HALF: tl.constexpr = COLUMNS // 2
        if is_aligned:
            totals = _multiply_elementwise(
                *strip, begin, SOURCE, TO_P, KEEP, HAS_ERROR, True, RANK, ROWS, COLUMNS, STEP
            )
        elif TO_P:
            # Half a tile at a time: an address and a mask per element take registers.
            left = _multiply_elementwise(*strip, begin, SOURCE, TO_P, KEEP, HAS_ERROR, False, RANK, ROWS, HALF, STEP)
            right = _multiply_elementwise(
                *strip, begin + HALF, SOURCE, TO_P, KEEP, HAS_ERROR, False, RANK, ROWS, HALF, STEP
            )
            totals = tl.tuple(())
            for r in tl.static_range(RANK):
                totals += (left[r] + right[r],)
        else:
            totals = _multiply_elementwise(
                *strip, begin, SOURCE, TO_P, KEEP, HAS_ERROR, False, RANK, ROWS, COLUMNS, STEP
            )
        along = rows if TO_P else columns
        offs_along = tl.arange(0, ROWS if TO_P else COLUMNS)
        mask_along = offs_along < along - first
        for r in tl.static_range(RANK):
            total = totals[r] if TO_P else tl.sum(totals[r], axis=0)
            tl.store(partial_ptr + (r * along + first) + offs_along, total, mask=mask_along & (r < rank))
    else:
        WIDTH: tl.constexpr = min(RANK, DOT_WIDTH)
        if is_aligned:
            totals = _multiply_dot(*strip, begin, SOURCE, TO_P, KEEP, HAS_ERROR, True, PRECISION, RANK, WIDTH, ROWS)
        else:
            totals = _multiply_dot(*strip, begin, SOURCE, TO_P, KEEP, HAS_ERROR, False, PRECISION, RANK, WIDTH, ROWS)
        # Loaded only here: before the loop they would occupy scalar registers throughout, which are scarce on AMD.
        partial_ptr += load_fields(strips_ptr, n_programs, program, 4, 5)[0]
        if TO_P:
            rows = load_fields(layout_ptr, n_matrices, matrix, 0, 1, VOLATILE=True)[0]
            rank = load_fields(layout_ptr, n_matrices, matrix, 2, 3, VOLATILE=True)[0]
        along = rows if TO_P else columns
        offs_along = tl.arange(0, ROWS)
        mask_along = offs_along < along - first
        for part in tl.static_range(RANK // WIDTH):
            offs_r = part * WIDTH + tl.arange(0, WIDTH)
            column_ptrs = partial_ptr + first + offs_r.to(tl.int64) * along
            mask = (offs_r < rank)[:, None] & mask_along[None, :]
            tl.store(column_ptrs[:, None] + offs_along[None, :], totals[part], mask=mask)


@kernel
def _sum_partials_kernel(
    partial_ptr,  # output of `_multiply_kernel`
    chunks_ptr,  # [5, sums] int64: `chunks`
    out_ptr,  # packed factors in a wire dtype
    segments_ptr,  # int64: `SegmentTable.packed` of the gradients to pack; None: there are none
    packed_ptr,  # the wire of these gradients
    n_sums,
    n_segments,
    n_packs,
    scale: tl.float64,
    limit: tl.float64,
    SOURCE: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIPS: tl.constexpr,
    ALIGN: tl.constexpr,
    PACK: tl.constexpr,
):
    """A chunk of a factor, or a chunk of a gradient that is not compressed: both scaled, and cast to the wire dtype."""
    program = tl.program_id(0).to(tl.int64)
    multiplier = tl.full((), scale, tl.float32)
    if program < n_sums:
        start, size, n_strips, partial_start, offset = load_fields(chunks_ptr, n_sums, program, 0, 5)
        offs = start + tl.arange(0, CHUNK)
        mask = offs < size
        offs_s = tl.arange(0, STRIPS)
        partial_ptrs = partial_ptr + partial_start + (offs_s.to(tl.int64)[:, None] * size + offs[None, :])
        total = tl.zeros((STRIPS, CHUNK), dtype=tl.float32)
        first = 0
        while first < n_strips:  # in a fixed order
            total += tl.load(partial_ptrs, mask=(first + offs_s < n_strips)[:, None] & mask[None, :], other=0)
            partial_ptrs += STRIPS * size
            first += STRIPS
        result = tl.sum(total, axis=0) * multiplier  # [CHUNK]
        # Zeros up to the next factor: the whole wire is sent.
        mask = offs < (size + ALIGN - 1) // ALIGN * ALIGN
        tl.store(out_ptr + offset + offs, result.to(out_ptr.dtype.element_ty), mask=mask)
    if segments_ptr is not None and program >= n_sums:
        flatten_chunk(
            segments_ptr, packed_ptr, None, n_segments, n_packs, program - n_sums, multiplier, limit,
            SOURCE, tl.float32, PACK,
        )  # fmt: skip


def dot_precision(table: MatrixTable) -> str | None:
    """The precision of `tl.dot`, or None where products are formed without it, in fp32."""
    if table.padded_rank <= ELEMENTWISE_RANK:
        return None
    return "tf32" if table.precision == "tf32" and has_tf32(table.device) else "ieee"


def _strip_arguments(operands: Operands, to_p: bool) -> dict[str, Any]:
    """The arguments that the kernels whose programs work through strips have in common."""
    table, cut = operands.table, operands.table.tiling
    strip_table = table.on_device.get(("strips", to_p), table.device, lambda: strips(table, to_p))
    return {
        "addresses_ptr": table.on_device_addresses(operands.addresses),
        "layout_ptr": table.packed(),
        "strips_ptr": strip_table,
        "n_matrices": len(table),
        "n_programs": strip_table.shape[1],
        "SOURCE": triton_dtype(table.dtype),
        "HAS_ERROR": operands.error is not None,
        "RANK": table.padded_rank,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
    }


def _multiply(operands: Operands, factor: Tensor, out: Tensor, scale: float, to_p: bool) -> None:
    """Write ``scale`` M Q or ``scale`` M^T P into ``out``: the partial sums, then their sum."""
    table, pack = operands.table, operands.uncompressed
    if pack is not None and pack.sent_with is not (table.p if to_p else table.q):
        pack = None
    last, precision = table.sides[to_p][-1], dot_precision(table)
    partials = torch.empty(last.start + last.n_strips * last.size, dtype=torch.float32, device=table.device)
    chunk_table = table.on_device.get(("chunks", to_p), table.device, lambda: chunks(table, to_p, SUM_NUMEL))
    n_sums, n_packs = chunk_table.shape[1], 0 if pack is None else pack.table.n_chunks
    with torch.cuda.device_of(out):
        strip_arguments = _strip_arguments(operands, to_p)
        _multiply_kernel[(strip_arguments["n_programs"],)](
            factor_ptr=factor,
            partial_ptr=partials,
            TO_P=to_p,
            KEEP=operands.keep,
            PRECISION=precision,
            DOT_WIDTH=DOT_WIDTH,
            num_warps=4 if table.padded_rank <= (32 if precision == "tf32" else 16) else 8,
            num_stages=STAGES if to_p else STAGES_TO_Q.get((table.dtype.itemsize, precision), STAGES),
            **strip_arguments,
        )
        _sum_partials_kernel[(n_sums + n_packs,)](
            partial_ptr=partials,
            chunks_ptr=chunk_table,
            out_ptr=out,
            segments_ptr=None if pack is None else pack.table.packed(pack.source),
            packed_ptr=None if pack is None else pack.wire,
            n_sums=n_sums,
            n_segments=0 if pack is None else len(pack.table.lengths),
            n_packs=n_packs,
            scale=scale,
            limit=table.limit,
            SOURCE=triton_dtype(table.dtype),
            CHUNK=SUM_NUMEL,
            STRIPS=SUM_STRIPS,
            ALIGN=ALIGN_NUMEL,
            PACK=CHUNK_NUMEL,
            num_warps=4,
        )


project_triton = partial(_multiply, to_p=True)  # in two launches
backproject_triton = partial(_multiply, to_p=False)  # in two launches


def _rows(layout: FactorLayout, keys: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """The programs. Fields: factor, length, offset of the row in the buffer and in its factor, key."""
    return [
        (i, length, layout.offsets[i] + row * length, row * length, keys[i])
        for i, (rank, length) in enumerate(zip(layout.ranks, layout.lengths, strict=True))
        for row in range(rank)
    ]


@kernel
def _norms_kernel(
    wire_ptr,  # packed factors, of any dtype
    rows_ptr,  # [5, rows] int64: `_rows`
    norms_ptr,  # [2, rows] fp32
    finite_ptr,  # [matrices] int32
    step_ptr,  # [1] int64: the number of the step, to advance; None: leave it
    segments_ptr,  # int64: `SegmentTable.packed` of the gradients to unpack; None: there are none
    packed_ptr,  # the wire of these gradients
    n_rows,
    n_segments,
    n_unpacks,
    advance_to: tl.int64,  # negative: one more than the number in memory
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """The largest magnitude of a row and its norm divided by that, or a chunk of a gradient that is not compressed."""
    program = tl.program_id(0).to(tl.int64)
    if step_ptr is not None and program == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1 if advance_to < 0 else advance_to)
    if program < n_rows:
        factor, length, offset, _, _ = load_fields(rows_ptr, n_rows, program, 0, 5)
        row_ptr = wire_ptr + offset
        largest = tl.zeros((BLOCK,), dtype=tl.float32)
        n_bad = tl.zeros((BLOCK,), dtype=tl.int32)
        start = 0
        while start < length:
            offs = start + tl.arange(0, BLOCK)
            x = tl.abs(tl.load(row_ptr + offs, mask=offs < length, other=0).to(tl.float32))  # [BLOCK]
            largest = tl.maximum(largest, x)
            n_bad += tl.where(x < float("inf"), 0, 1)
            start += BLOCK
        top = tl.max(largest, axis=0)
        divisor = tl.where(top > 0, top, 1.0)  # without it, squares would overflow or underflow
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        start = 0
        while start < length:
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + offs, mask=offs < length, other=0).to(tl.float32) / divisor
            squares += x * x
            start += BLOCK
        tl.store(norms_ptr + program, top)
        tl.store(norms_ptr + (n_rows + program), tl.sqrt(tl.sum(squares, axis=0)))
        if tl.sum(n_bad, axis=0) > 0:
            tl.atomic_min(finite_ptr + factor, 0, sem="relaxed")  # order does not matter: no fence
    if segments_ptr is not None and program >= n_rows:
        unflatten_chunk(
            segments_ptr, packed_ptr, None, n_segments, n_unpacks, program - n_rows, 1.0,
            TARGET, tl.float32, UNPACK,
        )  # fmt: skip


@triton.jit
def _drawn_norm(key, step, first, length, BLOCK: tl.constexpr):
    """The norm of a random row."""
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.where(offs < length, uniform_triton(key, step, first + offs), 0.0)  # [BLOCK]
        squares += x * x
        start += BLOCK
    return tl.sqrt(tl.sum(squares, axis=0))


@triton.jit
def renew_row(
    wire_ptr,  # packed factors, of any dtype
    rows_ptr,  # [5, rows] int64: `_rows`
    norms_ptr,  # [2, rows] fp32: as `_norms_kernel` leaves it
    finite_ptr,  # [matrices] int32
    step_ptr,  # [1] int64: in memory, because a CUDA graph repeats the values of arguments
    following_ptr,  # packed factors, fp32
    n_rows,
    row,
    BLOCK: tl.constexpr,
):
    """One row of the next factor: of unit norm, and random where the row is zero."""
    factor, length, offset, first, key = load_fields(rows_ptr, n_rows, row, 0, 5)
    step = tl.load(step_ptr)
    # `_norms_kernel`, an earlier launch, has cleared the flag of a factor that is not finite: its last value stays.
    if tl.load(finite_ptr + factor) > 0:
        top = tl.load(norms_ptr + row)
        norm = tl.load(norms_ptr + (n_rows + row))
        if top == 0:
            norm = _drawn_norm(key, step, first, length, BLOCK)
        start = 0
        while start < length:
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(wire_ptr + offset + offs, mask=offs < length, other=0).to(tl.float32)  # [BLOCK]
            x = uniform_triton(key, step, first + offs) if top == 0 else x / top
            tl.store(following_ptr + offset + offs, x / norm, mask=offs < length)
            start += BLOCK


@kernel
def _renew_kernel(
    wire_ptr,
    rows_ptr,
    norms_ptr,
    finite_ptr,
    step_ptr,
    following_ptr,
    n_rows,
    BLOCK: tl.constexpr,
):
    """One row of the next factor: `renew_row`."""
    row = tl.program_id(0).to(tl.int64)
    renew_row(wire_ptr, rows_ptr, norms_ptr, finite_ptr, step_ptr, following_ptr, n_rows, row, BLOCK)


@triton.jit
def _reconstruct_strip(
    memory,  # addresses of source, target and error, [n, m]
    p_ptr,  # [r, n], of any dtype
    q,  # address of [r, m]
    row,
    begin,  # column
    end,
    sizes,  # rows, columns, rank
    finite,
    SOURCE: tl.constexpr,
    Q_DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The result and the error of a strip of M."""
    _, target, error = memory
    rows, columns, rank = sizes
    stride = _as_aligned(columns.to(tl.int32), ALIGNED)
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs_r = tl.arange(0, RANK)
    offs = offs_n * stride + offs_m
    mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
    p_columns = tl.tuple(())
    p = 0.0
    # P is loaded once: it stays in registers while the strip runs along the columns of M.
    if ELEMENTWISE:
        for r in tl.static_range(RANK):
            p_r = tl.load(p_ptr + (r * rows + row) + offs_n, mask=mask_n & (r < rank), other=0)  # [ROWS, 1]
            p_columns += (p_r.to(tl.float32),)
    else:
        p_ptrs = p_ptr + row + (offs_r.to(tl.int64) * rows)[None, :] + offs_n
        p = tl.load(p_ptrs, mask=mask_n & (offs_r < rank)[None, :], other=0).to(tl.float32)  # [ROWS, RANK]
    for start in range(begin, end, COLUMNS):
        n_columns = _as_aligned((columns - start).to(tl.int32), ALIGNED)
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first = row * columns + start
        if HAS_ERROR:  # before the product, which then hides the latency
            m = _load_m(memory, first, offs, mask, SOURCE, KEPT, True, ALIGNED)
        if ELEMENTWISE:
            out = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for r in tl.static_range(RANK):
                q_column_ptr = q.to(tl.pointer_type(Q_DTYPE)) + (r * columns + start)
                if ALIGNED:
                    q_column_ptr = tl.multiple_of(q_column_ptr, 16)
                q_r = tl.load(q_column_ptr + offs_m, mask=mask_m & (r < rank), other=0)  # [1, COLUMNS]
                out += p_columns[r] * q_r.to(tl.float32)
        else:
            q_ptrs = q.to(tl.pointer_type(Q_DTYPE)) + start + (offs_r.to(tl.int64) * columns)[:, None] + offs_m
            q_tile = tl.load(q_ptrs, mask=(offs_r < rank)[:, None] & mask_m, other=0).to(tl.float32)  # [RANK, COLUMNS]
            out = tl.dot(p, q_tile, input_precision="ieee")
        out = tl.where(finite, tl.minimum(tl.maximum(out, -LIMIT), LIMIT), float("nan")).to(SOURCE)
        target_ptr = target.to(tl.pointer_type(SOURCE)) + first
        error_ptr = error.to(tl.pointer_type(tl.float32)) + first
        if ALIGNED:
            target_ptr = tl.multiple_of(target_ptr, 16)
            error_ptr = tl.multiple_of(error_ptr, 16)
        if HAS_ERROR:
            # M may lie in the target. In unaligned rows, one thread loads an element of M and another overwrites it.
            # The result does not depend on M, so no data dependency orders load and store: hence the barrier.
            tl.debug_barrier()
            tl.store(error_ptr + offs, m - out.to(tl.float32), mask=mask & finite)
        tl.store(target_ptr + offs, out, mask=mask)


@kernel
def _reconstruct_kernel(
    addresses_ptr,  # [3, matrices] int64: `Operands.addresses`
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    strips_ptr,  # [5, programs] int64: `strips` of P
    p_ptr,  # packed P, of any dtype
    q_ptr,  # packed Q, of any dtype
    finite_ptr,  # [matrices] int32
    wire_ptr,  # the packed factors to renew; None: there are none. It and the next four are those of `renew_row`
    rows_ptr,
    norms_ptr,
    step_ptr,
    following_ptr,
    n_matrices,
    n_programs,
    n_rows,
    SOURCE: tl.constexpr,
    LIMIT: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One strip of the result and of the error memory, or a row of the next factor."""
    program = tl.program_id(0).to(tl.int64)
    # Factors are small: their programs fill the tail of the launch, and cost no launch of their own.
    if wire_ptr is not None and program >= n_programs:
        row = program - n_programs
        renew_row(wire_ptr, rows_ptr, norms_ptr, finite_ptr, step_ptr, following_ptr, n_rows, row, BLOCK)
    if program < n_programs:
        matrix, row, begin, end = load_fields(strips_ptr, n_programs, program, 0, 4)
        sizes = load_fields(layout_ptr, n_matrices, matrix, 0, 3)
        p_offset, q_offset = load_fields(layout_ptr, n_matrices, matrix, 3, 5)
        memory = load_fields(addresses_ptr, n_matrices, matrix, 0, 3)
        finite = tl.load(finite_ptr + matrix) > 0
        q = (q_ptr + q_offset).to(tl.int64)  # a number, as in `_multiply_kernel`
        # The aligned branch moves 16 bytes at a time, the other one element.
        if (memory[0] | memory[1] | memory[2] | q | sizes[1] * 2) % 16 == 0:
            _reconstruct_strip(
                memory, p_ptr + p_offset, q, row, begin, end, sizes, finite,
                SOURCE, q_ptr.dtype.element_ty, LIMIT, KEPT, HAS_ERROR, True, ELEMENTWISE, RANK, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            # Half a tile at a time, because an address and a mask for every element take registers. Processes may take
            # different branches and get the same bits: every element is a sum over r, in order, in both.
            _reconstruct_strip(
                memory, p_ptr + p_offset, q, row, begin, end, sizes, finite,
                SOURCE, q_ptr.dtype.element_ty, LIMIT, KEPT, HAS_ERROR, False, ELEMENTWISE, RANK, ROWS, COLUMNS // 2,
            )  # fmt: skip


def _norms(
    wire: Tensor,
    layout: FactorLayout,
    keys: Sequence[int],
    step: Tensor,
    following: Tensor,
    finite: Tensor,
    *,
    advances: bool = False,
    advance_to: int | None = None,
    unpack: Uncompressed | None = None,
) -> dict[str, Any]:
    """The norms of the rows to renew, in one launch. Returns the arguments of `renew_row`, except the row."""
    rows = layout.on_device.get(("rows", tuple(keys)), following.device, lambda: _rows(layout, keys))
    n_rows, n_unpacks = rows.shape[1], 0 if unpack is None else unpack.table.n_chunks
    row_arguments = {
        "wire_ptr": wire,
        "rows_ptr": rows,
        "norms_ptr": torch.empty(2, n_rows, dtype=torch.float32, device=following.device),
        "finite_ptr": finite,
        "n_rows": n_rows,
        "BLOCK": BLOCK_NUMEL,
    }
    _norms_kernel[(n_rows + n_unpacks,)](
        step_ptr=step if advances else None,
        segments_ptr=None if unpack is None else unpack.target_table.packed(unpack.target),
        packed_ptr=None if unpack is None else unpack.wire,
        n_segments=0 if unpack is None else len(unpack.table.lengths),
        n_unpacks=n_unpacks,
        advance_to=-1 if advance_to is None else advance_to,
        TARGET=None if unpack is None else triton_dtype(unpack.table.dtype),
        UNPACK=CHUNK_NUMEL,
        num_warps=NUM_WARPS,
        **row_arguments,
    )
    return row_arguments | {"step_ptr": step, "following_ptr": following}


def renew_triton(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """`renew` in two launches."""
    with torch.cuda.device_of(following):
        row_arguments = _norms(wire, layout, keys, step, following, finite)
        _renew_kernel[(row_arguments["n_rows"],)](**row_arguments, num_warps=NUM_WARPS)


# Arguments of a launch that renews no factors.
NO_ROWS: dict[str, Any] = {
    "wire_ptr": None,
    "rows_ptr": None,
    "norms_ptr": None,
    "step_ptr": None,
    "following_ptr": None,
    "n_rows": 0,
    "BLOCK": 1,
}


def reconstruct_triton(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` in one launch; with a renewal in two: norms and unpacking, then matrices and factors."""
    table, renewal = operands.table, operands.renewal
    is_elementwise = table.padded_rank <= ELEMENTWISE_RANK
    with torch.cuda.device_of(p):
        row_arguments: Mapping[str, Any] = {"finite_ptr": finite, **NO_ROWS}
        if renewal is not None:
            row_arguments = _norms(
                p if renewal.layout is table.p else q,
                renewal.layout,
                table.keys,
                renewal.step,
                renewal.following,
                finite,
                advances=True,
                advance_to=renewal.advance_to,
                unpack=operands.uncompressed,
            )
        elif (others := operands.uncompressed) is not None:
            others.table.kernels.unflatten(others.wire, others.target, others.target_table, 1.0, None)
        strip_arguments = _strip_arguments(operands, to_p=True)
        _reconstruct_kernel[(strip_arguments["n_programs"] + row_arguments["n_rows"],)](
            p_ptr=p,
            q_ptr=q,
            LIMIT=table.limit,
            KEPT=operands.keep,
            ELEMENTWISE=is_elementwise,
            num_warps=4 if is_elementwise else 8,
            **strip_arguments,
            **row_arguments,
        )
