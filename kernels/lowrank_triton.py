"""Low-rank products in Triton: one kernel for P = M Q and Q = M^T P, and one that adds up its partial sums.

The second kernel's launch also packs the uncompressed gradients.

A program of a product works through a strip of one matrix, tile by tile: along a few rows to compute P or the result,
or down a few columns to compute Q. It stores a partial sum. Strips keep the number of programs high for matrices of few
rows or columns; partial sums that are added in a fixed order need no float atomics, and give the same bits in every
run.

Offsets within a tile are 32 bits wide, on a 64-bit address of its first element.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_fields, triton_dtype
from gradwire.kernels.dispatch import has_tf32
from gradwire.kernels.flatten_triton import flatten_chunk
from gradwire.kernels.matrix_table import (
    ALIGN_NUMEL,
    ELEMENTWISE_RANK,
    MatrixTable,
    Operands,
    chunks,
    padded_rank,
    sides,
    strips,
    tiling,
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


@triton.jit
def as_aligned(x, ALIGNED: tl.constexpr):
    """``x`` itself; if ALIGNED, the compiler learns that it is a multiple of 8."""
    return x // 8 * 8 if ALIGNED else x


@triton.jit
def load_m(
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
def keep_m(
    target,  # address of [n, m]
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    m,  # [tile] fp32
    SOURCE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a tile of M in the target, where `load_m` finds it."""
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
    stride = as_aligned(columns.to(tl.int32), ALIGNED)
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs = offs_n * stride + offs_m  # [ROWS, COLUMNS]
    totals = tl.tuple(())
    for _ in tl.static_range(RANK):
        totals += (tl.zeros((ROWS, COLUMNS), dtype=tl.float32),)
    for start in range(begin, end, STEP):
        row = first if TO_P else start
        column = start if TO_P else first
        n_columns = as_aligned((columns - column).to(tl.int32), ALIGNED)
        mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first_m = row * columns + column
        m = load_m(memory, first_m, offs, mask, SOURCE, KEEP and not TO_P, HAS_ERROR, ALIGNED)
        if KEEP and TO_P:
            keep_m(memory[1], first_m, offs, mask, m, SOURCE, ALIGNED)
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
    stride = as_aligned(columns.to(tl.int32), ALIGNED)
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
        n_columns = as_aligned((columns - column).to(tl.int32), ALIGNED)
        mask_n = offs_block < rows - row
        mask_m = offs_block < n_columns
        mask = mask_n[:, None] & mask_m[None, :]
        first_m = row * columns + column
        m = load_m(memory, first_m, offs, mask, SOURCE, KEEP and not TO_P, HAS_ERROR, ALIGNED)
        if KEEP and TO_P:
            keep_m(memory[1], first_m, offs, mask, m, SOURCE, ALIGNED)
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
    if padded_rank(table) <= ELEMENTWISE_RANK:
        return None
    return "tf32" if table.precision == "tf32" and has_tf32(table.device) else "ieee"


def strip_arguments(table: MatrixTable, to_p: bool) -> dict[str, Any]:
    """The arguments of a kernel whose programs work through strips, for all steps."""
    cut = tiling(table)
    strip_table = table.on_device.get(("strips", to_p), table.device, lambda: strips(table, to_p))
    return {
        "layout_ptr": table.packed(),
        "strips_ptr": strip_table,
        "n_matrices": len(table),
        "n_programs": strip_table.shape[1],
        "SOURCE": triton_dtype(table.dtype),
        "RANK": padded_rank(table),
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
    }


def _plan(table: MatrixTable, to_p: bool) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Number of elements of the partial sums, and the arguments of the two kernels, for all steps."""
    chunk_table = table.on_device.get(("chunks", to_p), table.device, lambda: chunks(table, to_p, SUM_NUMEL))
    last, precision = sides(table, to_p)[-1], dot_precision(table)
    multiply = strip_arguments(table, to_p) | {
        "TO_P": to_p,
        "PRECISION": precision,
        "DOT_WIDTH": DOT_WIDTH,
        "num_warps": 4 if padded_rank(table) <= (32 if precision == "tf32" else 16) else 8,
        "num_stages": STAGES if to_p else STAGES_TO_Q.get((table.dtype.itemsize, precision), STAGES),
    }
    add = {
        "chunks_ptr": chunk_table,
        "n_sums": chunk_table.shape[1],
        "limit": table.limit,
        "SOURCE": triton_dtype(table.dtype),
        "CHUNK": SUM_NUMEL,
        "STRIPS": SUM_STRIPS,
        "ALIGN": ALIGN_NUMEL,
        "PACK": CHUNK_NUMEL,
        "num_warps": 4,
    }
    return last.start + last.n_strips * last.size, multiply, add


def _multiply(operands: Operands, factor: Tensor, out: Tensor, scale: float, to_p: bool) -> None:
    """Write ``scale`` M Q or ``scale`` M^T P into ``out``: the partial sums, then their sum."""
    table, pack = operands.table, operands.uncompressed
    if pack is not None and pack.sent_with is not (table.p if to_p else table.q):
        pack = None
    plan = table.plans.get(to_p) or table.plans.setdefault(to_p, _plan(table, to_p))
    n_partials, multiply, add = plan
    partials = torch.empty(n_partials, dtype=torch.float32, device=table.device)
    n_packs = 0 if pack is None else pack.table.n_chunks
    with torch.cuda.device_of(out):
        _multiply_kernel[(multiply["n_programs"],)](
            addresses_ptr=table.on_device_addresses(operands.addresses),
            factor_ptr=factor,
            partial_ptr=partials,
            KEEP=operands.keep,
            HAS_ERROR=operands.error is not None,
            **multiply,
        )
        _sum_partials_kernel[(add["n_sums"] + n_packs,)](
            partial_ptr=partials,
            out_ptr=out,
            segments_ptr=None if pack is None else pack.table.packed(pack.source),
            packed_ptr=None if pack is None else pack.wire,
            n_segments=0 if pack is None else len(pack.table.lengths),
            n_packs=n_packs,
            scale=scale,
            **add,
        )


project_triton = partial(_multiply, to_p=True)  # in two launches
backproject_triton = partial(_multiply, to_p=False)  # in two launches
