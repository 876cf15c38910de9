"""PowerSGD's passes in Triton: P = M Q and Q = M^T P, then out = P Q^T with the error E, and the renewal of factors.

A program works through a strip of one matrix, tile by tile. For P and for the result, a strip runs along a few rows;
for Q, down a few columns. Strips keep the number of programs high for matrices of few rows or columns.

A product stores a partial sum for each strip. A second kernel adds them up in a fixed order: this needs no float
atomics, and gives the same bits in every run. Its launch also packs the uncompressed gradients.

`reconstruct` keeps its rows of P in registers. Further programs renew the factors meanwhile. Their norms come first,
from a kernel whose further programs unpack the gradients that were sent uncompressed.

Offsets within a tile are 32 bits wide, on a 64-bit address of its first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_fields, triton_dtype, uniform_triton
from gradwire.kernels.dispatch import has_tf32
from gradwire.kernels.flatten import flatten_kernels
from gradwire.kernels.flatten_triton import move_chunk
from gradwire.kernels.matrix_table import (
    ELEMENTWISE_RANK,
    SUM_NUMEL,
    FactorLayout,
    MatrixTable,
    Operands,
    OwnFactor,
    Renewal,
    Uncompressed,
)
from gradwire.kernels.segment_table import CHUNK_NUMEL

# Pipeline stages of products by `tl.dot`. For M^T P, more stages than these would spill registers.
STAGES = 3
STAGES_TO_Q: dict[tuple[int, str | None], int] = {(4, "tf32"): 3, (2, "tf32"): 2, (4, "ieee"): 1, (2, "ieee"): 1}
# Columns of a factor in one `tl.dot`. With 64, M^T P in TF32 has the shape of Hopper's and Blackwell's asynchronous
# products, which need more than 64 KiB of shared memory; in fp32 it spills.
DOT_WIDTH = 32
# Partial sums that a program adds up at a time.
SUM_STRIPS = 4
# `renew`: elements of a row of a factor that a program handles at a time.
BLOCK_NUMEL = 1024
NUM_WARPS = 8  # 16 elements a thread where a program unpacks a chunk of gradients


@triton.jit
def _as_aligned(x, ALIGNED: tl.constexpr):
    """``x`` itself; if ALIGNED, the compiler learns that it is a multiple of 8."""
    return x // 8 * 8 if ALIGNED else x


@dataclass(frozen=True)
class Pass:
    """What the kernels of one pass over the matrices of a bucket are compiled for."""

    to_p: bool  # whether strips run along rows: for P, and for the result; for Q, they run down columns
    has_error: bool
    source: Any  # Triton dtype of gradients and results
    rank: int  # `MatrixTable.padded_rank`
    rows: int  # of a tile of M
    columns: int
    width: int  # columns of a factor in one `tl.dot`; 1: no `tl.dot`
    precision: str | None = None  # of `tl.dot`
    keeps: bool = False  # whether the pass stores M in the target
    is_kept: bool = False  # whether an earlier pass did
    limit: float = inf  # largest magnitude of the result
    own: str | None = None  # the factor, "p" or "q", of which this rank's own differs from the received one


@triton.jit
def _load_m(
    memory,  # addresses of source, target and error, [n, m]
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    PASS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of M in fp32: from the target if it was kept there, else G + E, which is stored there to be kept."""
    source, target, error = memory
    source_ptr = (target if PASS.is_kept else source).to(tl.pointer_type(PASS.source)) + first
    target_ptr = target.to(tl.pointer_type(PASS.source)) + first
    error_ptr = error.to(tl.pointer_type(tl.float32)) + first
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
    m = tl.load(source_ptr + offs, mask=mask, other=0).to(tl.float32)
    if PASS.has_error and not PASS.is_kept:
        m += tl.load(error_ptr + offs, mask=mask, other=0)
    if PASS.keeps:
        tl.store(target_ptr + offs, m, mask=mask)
    return m


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
def _multiply_strip(
    memory,  # addresses of source, target and error, [n, m]
    factor,  # address of a factor, fp32: Q, [r, m], to compute P; P, [r, n], to compute Q
    first,  # row of M to compute P, column to compute Q
    end,  # column of M to compute P, row to compute Q
    sizes,  # rows, columns, rank
    begin,  # like end
    PASS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a tile, or half of them
):
    """The product of a factor and a strip of M, in parts of `Pass.width` columns of the factor.

    By `tl.dot`, [WIDTH, BLOCK]: Q M^T for P^T, P^T M for Q^T. Without it, a thread keeps a sum for each of its elements
    of a tile and each column. These are added up once, after the loop: for P, [ROWS]; for Q, [ROWS, COLUMNS], by the
    caller.
    """
    rows, columns, rank = sizes
    TO_P: tl.constexpr = PASS.to_p
    WIDTH: tl.constexpr = PASS.width
    PARTS: tl.constexpr = PASS.rank // PASS.width
    ROWS: tl.constexpr = PASS.rows
    STEP: tl.constexpr = PASS.columns if PASS.to_p else PASS.rows
    across = columns if TO_P else rows  # the side that is summed over
    stride = _as_aligned(columns.to(tl.int32), ALIGNED)
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs = offs_n * stride + offs_m  # [ROWS, COLUMNS]
    factor_ptr = factor.to(tl.pointer_type(tl.float32))
    totals = tl.tuple(())
    for _ in tl.static_range(PARTS):
        totals += (tl.zeros((ROWS if WIDTH == 1 else WIDTH, COLUMNS), dtype=tl.float32),)
    for start in range(begin, end, STEP):
        row = first if TO_P else start
        column = start if TO_P else first
        mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
        mask_m = offs_m < _as_aligned((columns - column).to(tl.int32), ALIGNED)
        m = _load_m(memory, row * columns + column, offs, mask_n & mask_m, PASS, ALIGNED)
        added = tl.tuple(())  # a loop carries a tuple as a whole: its elements cannot be replaced one by one
        for part in tl.static_range(PARTS):
            if WIDTH == 1:
                # The columns added to the rank are copies of the last, whose sums are not stored.
                column_ptr = factor_ptr + (tl.minimum(part, rank - 1) * across + start)
                if TO_P:
                    if ALIGNED:
                        column_ptr = tl.multiple_of(column_ptr, 16)
                    x = tl.load(column_ptr + offs_m, mask=mask_m, other=0)  # [1, COLUMNS]
                else:
                    x = tl.load(column_ptr + offs_n, mask=mask_n, other=0)  # [ROWS, 1]
                added += (totals[part] + m * x,)
            else:
                offs_r = part * WIDTH + tl.arange(0, WIDTH)
                part_ptrs = factor_ptr + start + offs_r.to(tl.int64) * (stride if TO_P else across)
                if TO_P and ALIGNED:
                    part_ptrs = tl.multiple_of(part_ptrs, 16)
                offs_across = tl.arange(0, STEP)[None, :]
                mask = (offs_r < rank)[:, None] & (mask_m if TO_P else offs_across < rows - row)
                x = tl.load(part_ptrs[:, None] + offs_across, mask=mask, other=0)  # [WIDTH, BLOCK]
                # TF32 is enough: the error memory is computed from the result as it was sent, however factors round.
                added += (tl.dot(x, tl.trans(m) if TO_P else m, totals[part], input_precision=PASS.precision),)
        totals = added
    if TO_P and WIDTH == 1:
        sums = tl.tuple(())
        for r in tl.static_range(PARTS):
            sums += (_sum_rows(totals[r], ROWS, COLUMNS),)
        totals = sums
    return totals


@kernel
def _multiply_kernel(
    addresses_ptr,  # [3, matrices] int64: `Operands.addresses`
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    strips_ptr,  # [5, programs] int64: `Product.strips`
    factor_ptr,  # packed Q for P, packed P for Q, fp32
    partial_ptr,  # the partial sums of each matrix, one after another, [strips, r, n] or [strips, r, m] fp32
    n_matrices,
    n_programs,
    PASS: tl.constexpr,
):
    """One block of P or of Q, summed over one strip of M."""
    program = tl.program_id(0).to(tl.int64)
    matrix, first, begin, end = load_fields(strips_ptr, n_programs, program, 0, 4)
    sizes = load_fields(layout_ptr, n_matrices, matrix, 0, 3)
    rows, columns, rank = sizes
    p_offset, q_offset = load_fields(layout_ptr, n_matrices, matrix, 3, 5)
    memory = load_fields(addresses_ptr, n_matrices, matrix, 0, 3)
    TO_P: tl.constexpr = PASS.to_p
    WIDTH: tl.constexpr = PASS.width
    PARTS: tl.constexpr = PASS.rank // PASS.width
    COLUMNS: tl.constexpr = PASS.columns
    HALF: tl.constexpr = PASS.columns // 2
    # An integer: AMD's compiler forgets the alignment of a pointer derived from an argument.
    factor = (factor_ptr + (q_offset if TO_P else p_offset)).to(tl.int64)
    strip = (memory, factor, first, end, sizes)
    if WIDTH == 1:
        partial_ptr += load_fields(strips_ptr, n_programs, program, 4, 5)[0]
    # The aligned branch moves 16 bytes at a time, the other one element. Without `tl.dot`, both add in the same order,
    # so that the bits do not depend on the alignment.
    if (memory[0] | memory[1] | memory[2] | factor | columns * 2) % 16 == 0:
        totals = _multiply_strip(*strip, begin, PASS, True, COLUMNS)
    elif TO_P and WIDTH == 1:
        # Half a tile at a time: an address and a mask per element take registers.
        left = _multiply_strip(*strip, begin, PASS, False, HALF)
        right = _multiply_strip(*strip, begin + HALF, PASS, False, HALF)
        totals = tl.tuple(())
        for r in tl.static_range(PARTS):
            totals += (left[r] + right[r],)
    else:
        totals = _multiply_strip(*strip, begin, PASS, False, COLUMNS)
    if WIDTH > 1:
        # Loaded only here: before the loop they would occupy scalar registers throughout, which are scarce on AMD.
        partial_ptr += load_fields(strips_ptr, n_programs, program, 4, 5)[0]
        if TO_P:
            rows = load_fields(layout_ptr, n_matrices, matrix, 0, 1, VOLATILE=True)[0]
            rank = load_fields(layout_ptr, n_matrices, matrix, 2, 3, VOLATILE=True)[0]
    along = rows if TO_P else columns
    offs_along = tl.arange(0, PASS.rows if TO_P else COLUMNS)
    mask_along = offs_along < along - first
    for part in tl.static_range(PARTS):
        if WIDTH == 1:
            total = totals[part] if TO_P else tl.sum(totals[part], axis=0)
            tl.store(partial_ptr + (part * along + first) + offs_along, total, mask=mask_along & (part < rank))
        else:
            offs_r = part * WIDTH + tl.arange(0, WIDTH)
            column_ptrs = partial_ptr + first + offs_r.to(tl.int64) * along
            mask = (offs_r < rank)[:, None] & mask_along[None, :]
            tl.store(column_ptrs[:, None] + offs_along[None, :], totals[part], mask=mask)


@kernel
def _sum_partials_kernel(
    partial_ptr,  # output of `_multiply_kernel`
    chunks_ptr,  # [5, sums] int64: `Product.chunks`
    out_ptr,  # packed factors in a wire dtype
    sent_ptr,  # like out: a copy; None: none
    n_sums,
    scale: tl.float64,
    limit: tl.float64,
    CHUNK: tl.constexpr,
    STRIPS: tl.constexpr,
    ALIGN: tl.constexpr,
    n_others=0,  # chunks of gradients that are not compressed; the rest as in `_others`
    segments_ptr=None,
    wire_ptr=None,
    n_segments=0,
    DTYPE: tl.constexpr = None,
    OTHERS_CHUNK: tl.constexpr = None,
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
        if sent_ptr is not None:
            tl.store(sent_ptr + offset + offs, result.to(out_ptr.dtype.element_ty), mask=mask)
    if segments_ptr is not None and program >= n_sums:
        move_chunk(
            segments_ptr, wire_ptr, None, n_segments, n_others, program - n_sums, multiplier,
            tl.full((), limit, tl.float32), True, DTYPE, tl.float32, OTHERS_CHUNK,
        )  # fmt: skip


def dot_precision(table: MatrixTable) -> str | None:
    """The precision of `tl.dot`, or None where products are formed without it, in fp32."""
    if table.padded_rank <= ELEMENTWISE_RANK:
        return None
    return "tf32" if table.precision == "tf32" and has_tf32(table.device) else "ieee"


def _strips(operands: Operands, to_p: bool, **options: Any) -> dict[str, Any]:
    """The arguments that the kernels whose programs work through strips have in common."""
    table, cut = operands.table, operands.table.tiling
    strip_table = table.on_device.get(("strips", to_p), table.device, lambda: table.products[to_p].strips)
    return {
        "addresses_ptr": table.on_device_addresses(operands.addresses),
        "layout_ptr": table.packed(),
        "strips_ptr": strip_table,
        "n_matrices": len(table),
        "n_programs": strip_table.shape[1],
        "PASS": Pass(
            to_p=to_p,
            has_error=operands.error is not None,
            source=triton_dtype(table.dtype),
            rank=table.padded_rank,
            rows=cut.rows,
            columns=cut.columns,
            **options,
        ),
    }


def _others(others: Uncompressed | None, *, of_target: bool = False) -> dict[str, Any]:
    """The arguments of the programs that move a chunk of the uncompressed gradients each, to or from their wire."""
    if others is None:
        return {"n_others": 0}
    table, tensors = (others.target_table, others.target) if of_target else (others.table, others.source)
    return {
        "n_others": table.n_chunks,
        "segments_ptr": table.packed(tensors),
        "wire_ptr": others.wire,
        "n_segments": len(table),
        "DTYPE": triton_dtype(table.dtype),
        "OTHERS_CHUNK": CHUNK_NUMEL,
    }


def _multiply(operands: Operands, factor: Tensor, out: Tensor, scale: float, to_p: bool) -> None:
    """Write ``scale`` M Q or ``scale`` M^T P into ``out``: the partial sums, then their sum."""
    table, others = operands.table, operands.uncompressed
    layout, own = table.p if to_p else table.q, operands.own
    is_sent_now = others is not None and others.sent_with is layout
    product, precision = table.products[to_p], dot_precision(table)
    partials = torch.empty(product.numel, dtype=torch.float32, device=table.device)
    chunk_table = table.on_device.get(("chunks", to_p), table.device, lambda: product.chunks)
    n_sums = chunk_table.shape[1]
    with torch.cuda.device_of(out):
        keeps, is_kept = operands.keep and to_p, operands.keep and not to_p
        width = 1 if precision is None else min(table.padded_rank, DOT_WIDTH)
        strip_arguments = _strips(operands, to_p, keeps=keeps, is_kept=is_kept, precision=precision, width=width)
        _multiply_kernel[(strip_arguments["n_programs"],)](
            factor_ptr=factor,
            partial_ptr=partials,
            num_warps=4 if table.padded_rank <= (32 if precision == "tf32" else 16) else 8,
            num_stages=STAGES if to_p else STAGES_TO_Q.get((table.dtype.itemsize, precision), STAGES),
            **strip_arguments,
        )
        packing = _others(others if is_sent_now else None)
        _sum_partials_kernel[(n_sums + packing["n_others"],)](
            partial_ptr=partials,
            chunks_ptr=chunk_table,
            out_ptr=out,
            sent_ptr=own.sent if own is not None and own.layout is layout else None,
            n_sums=n_sums,
            scale=scale,
            limit=table.limit,
            CHUNK=SUM_NUMEL,
            STRIPS=SUM_STRIPS,
            ALIGN=layout.align,
            num_warps=4,
            **packing,
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
    factors_ptr,  # packed, of any dtype
    rows_ptr,  # [5, rows] int64: `_rows`
    norms_ptr,  # [2, rows] fp32
    sent_ptr,  # packed, fp32: `OwnFactor.sent`, from which its residual is subtracted; None: it has none
    residual_ptr,  # likewise
    finite_ptr,  # [matrices] int32
    step_ptr,  # [1] int64: the number of the step, to advance; None: leave it
    n_rows,
    advance_to: tl.int64,  # negative: one more than the number in memory
    BLOCK: tl.constexpr,
    n_others=0,  # chunks of gradients that are not compressed; the rest as in `_others`
    segments_ptr=None,
    wire_ptr=None,
    n_segments=0,
    DTYPE: tl.constexpr = None,
    OTHERS_CHUNK: tl.constexpr = None,
):
    """The largest magnitude of a row and its norm divided by that, or a chunk of a gradient that is not compressed."""
    program = tl.program_id(0).to(tl.int64)
    if step_ptr is not None and program == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1 if advance_to < 0 else advance_to)
    if program < n_rows:
        factor, length, offset, _, _ = load_fields(rows_ptr, n_rows, program, 0, 5)
        row_ptr = factors_ptr + offset
        largest = tl.zeros((BLOCK,), dtype=tl.float32)
        n_bad = tl.zeros((BLOCK,), dtype=tl.int32)
        start = 0
        while start < length:
            offs = start + tl.arange(0, BLOCK)
            x = tl.abs(tl.load(row_ptr + offs, mask=offs < length, other=0).to(tl.float32))  # [BLOCK]
            largest = tl.maximum(largest, x)
            n_bad += tl.where(x < float("inf"), 0, 1)
            if sent_ptr is not None:
                residual = tl.load(residual_ptr + offset + offs, mask=offs < length)
                mine = tl.load(sent_ptr + offset + offs, mask=offs < length)
                tl.store(sent_ptr + offset + offs, mine - residual, mask=offs < length)
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
        move_chunk(
            segments_ptr, wire_ptr, None, n_segments, n_others, program - n_rows, 1.0, None,
            False, DTYPE, tl.float32, OTHERS_CHUNK,
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
def _renew_row(
    factors_ptr,  # packed, of any dtype
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
            x = tl.load(factors_ptr + offset + offs, mask=offs < length, other=0).to(tl.float32)  # [BLOCK]
            x = uniform_triton(key, step, first + offs) if top == 0 else x / top
            tl.store(following_ptr + offset + offs, x / norm, mask=offs < length)
            start += BLOCK


@kernel
def _renew_kernel(
    factors_ptr,
    rows_ptr,
    norms_ptr,
    finite_ptr,
    step_ptr,
    following_ptr,
    n_rows,
    BLOCK: tl.constexpr,
):
    """One row of the next factor: `_renew_row`."""
    row = tl.program_id(0).to(tl.int64)
    _renew_row(factors_ptr, rows_ptr, norms_ptr, finite_ptr, step_ptr, following_ptr, n_rows, row, BLOCK)


@triton.jit
def _difference(
    received,  # a tile of a factor, fp32
    own,  # address of the factor in ``OwnFactor.sent``, and the world size
    first,  # int64
    offs,  # int32, from there
    mask,
    SENT: tl.constexpr,
    ALIGNED: tl.constexpr = False,
):
    """A tile of the received factor less this rank's own."""
    sent, world_size = own
    sent_ptr = sent.to(tl.pointer_type(SENT)) + first
    if ALIGNED:
        sent_ptr = tl.multiple_of(sent_ptr, 16)
    return received - tl.load(sent_ptr + offs, mask=mask, other=0).to(tl.float32) * world_size


@triton.jit
def _reconstruct_strip(
    memory,  # addresses of source, target and error, [n, m]
    p_ptr,  # [r, n], of any dtype
    q,  # address of [r, m]
    own,  # as in `_difference`; of ``PASS.own``
    row,
    begin,  # column
    end,
    sizes,  # rows, columns, rank
    finite,
    Q_DTYPE: tl.constexpr,
    SENT: tl.constexpr,
    PASS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a tile, or half of them
):
    """The result and the error of a strip of M."""
    _, target, error = memory
    rows, columns, rank = sizes
    RANK: tl.constexpr = PASS.rank
    ROWS: tl.constexpr = PASS.rows
    stride = _as_aligned(columns.to(tl.int32), ALIGNED)
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs_r = tl.arange(0, RANK)
    offs = offs_n * stride + offs_m
    mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
    p_columns = tl.tuple(())
    own_columns = tl.tuple(())
    p = 0.0
    own_p = 0.0
    # P is loaded once: it stays in registers while the strip runs along the columns of M.
    if PASS.width == 1:
        for r in tl.static_range(RANK):
            at_p, mask_p = r * rows + row, mask_n & (r < rank)
            p_r = tl.load(p_ptr + at_p + offs_n, mask=mask_p, other=0).to(tl.float32)  # [ROWS, 1]
            p_columns += (p_r,)
            if PASS.own == "p":
                own_columns += (_difference(p_r, own, at_p, offs_n, mask_p, SENT),)
    else:
        at_p, mask_p = row + (offs_r.to(tl.int64) * rows)[None, :], mask_n & (offs_r < rank)[None, :]
        p = tl.load(p_ptr + at_p + offs_n, mask=mask_p, other=0).to(tl.float32)  # [ROWS, RANK]
        if PASS.own == "p":
            own_p = _difference(p, own, at_p, offs_n, mask_p, SENT)
    for start in range(begin, end, COLUMNS):
        n_columns = _as_aligned((columns - start).to(tl.int32), ALIGNED)
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first = row * columns + start
        if PASS.has_error:  # before the product, which then hides the latency
            m = _load_m(memory, first, offs, mask, PASS, ALIGNED)
        if PASS.width == 1:
            out = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for r in tl.static_range(RANK):
                at_q, mask_q = r * columns + start, mask_m & (r < rank)
                q_column_ptr = q.to(tl.pointer_type(Q_DTYPE)) + at_q
                if ALIGNED:
                    q_column_ptr = tl.multiple_of(q_column_ptr, 16)
                q_r = tl.load(q_column_ptr + offs_m, mask=mask_q, other=0).to(tl.float32)  # [1, COLUMNS]
                out += p_columns[r] * q_r
                if PASS.own == "p":
                    m += own_columns[r] * q_r
                if PASS.own == "q":
                    m += p_columns[r] * _difference(q_r, own, at_q, offs_m, mask_q, SENT, ALIGNED)
        else:
            at_q, mask_q = start + (offs_r.to(tl.int64) * columns)[:, None], (offs_r < rank)[:, None] & mask_m
            q_tile = tl.load(q.to(tl.pointer_type(Q_DTYPE)) + at_q + offs_m, mask=mask_q, other=0).to(tl.float32)
            out = tl.dot(p, q_tile, input_precision="ieee")  # q_tile: [RANK, COLUMNS]
        out = tl.where(finite, tl.minimum(tl.maximum(out, -PASS.limit), PASS.limit), float("nan")).to(PASS.source)
        target_ptr = target.to(tl.pointer_type(PASS.source)) + first
        error_ptr = error.to(tl.pointer_type(tl.float32)) + first
        if ALIGNED:
            target_ptr = tl.multiple_of(target_ptr, 16)
            error_ptr = tl.multiple_of(error_ptr, 16)
        if PASS.has_error:
            # M may lie in the target. In unaligned rows, one thread loads an element of M and another overwrites it.
            # The result does not depend on M, so no data dependency orders load and store: hence the barrier.
            tl.debug_barrier()
            m -= out.to(tl.float32)
        tl.store(target_ptr + offs, out, mask=mask)
        # After the result, whose registers are free by now: q_tile is read again, from the cache.
        if PASS.own is not None and PASS.width > 1:
            at_q, mask_q = start + (offs_r.to(tl.int64) * columns)[:, None], (offs_r < rank)[:, None] & mask_m
            q_tile = tl.load(q.to(tl.pointer_type(Q_DTYPE)) + at_q + offs_m, mask=mask_q, other=0).to(tl.float32)
            if PASS.own == "p":
                m = tl.dot(own_p, q_tile, m, input_precision="ieee")
            else:
                q_tile = _difference(q_tile, own, at_q, offs_m, mask_q, SENT)
                m = tl.dot(p, q_tile, m, input_precision="ieee")
        if PASS.has_error:
            tl.store(error_ptr + offs, m, mask=mask & finite)


@kernel
def _reconstruct_kernel(
    addresses_ptr,  # [3, matrices] int64: `Operands.addresses`
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    strips_ptr,  # [5, programs] int64: `Product.strips` of P
    p_ptr,  # packed P, of any dtype
    q_ptr,  # packed Q, of any dtype
    sent_ptr,  # `OwnFactor.sent`, packed, of any dtype; None: no own factor
    finite_ptr,  # [matrices] int32
    n_matrices,
    n_programs,
    world_size,
    PASS: tl.constexpr,
    n_rows=0,  # rows to renew; the rest as in `_renew_row`
    factors_ptr=None,
    rows_ptr=None,
    norms_ptr=None,
    step_ptr=None,
    following_ptr=None,
    BLOCK: tl.constexpr = None,
):
    """One strip of the result and of the error memory, or a row of the next factor."""
    program = tl.program_id(0).to(tl.int64)
    # Factors are small: their programs fill the tail of the launch, and cost no launch of their own.
    if factors_ptr is not None and program >= n_programs:
        row = program - n_programs
        _renew_row(factors_ptr, rows_ptr, norms_ptr, finite_ptr, step_ptr, following_ptr, n_rows, row, BLOCK)
    if program < n_programs:
        matrix, row, begin, end = load_fields(strips_ptr, n_programs, program, 0, 4)
        sizes = load_fields(layout_ptr, n_matrices, matrix, 0, 3)
        p_offset, q_offset = load_fields(layout_ptr, n_matrices, matrix, 3, 5)
        memory = load_fields(addresses_ptr, n_matrices, matrix, 0, 3)
        finite = tl.load(finite_ptr + matrix) > 0
        q = (q_ptr + q_offset).to(tl.int64)  # a number, as in `_multiply_kernel`
        Q_DTYPE: tl.constexpr = q_ptr.dtype.element_ty
        COLUMNS: tl.constexpr = PASS.columns
        HALF: tl.constexpr = PASS.columns // 2
        own_offset = p_offset if PASS.own == "p" else q_offset
        sent = q if sent_ptr is None else (sent_ptr + own_offset).to(tl.int64)
        SENT: tl.constexpr = None if sent_ptr is None else sent_ptr.dtype.element_ty
        own = (sent, world_size)
        strip = (memory, p_ptr + p_offset, q, own, row, begin, end, sizes, finite)
        # The aligned branch moves 16 bytes at a time, the other one element.
        if (memory[0] | memory[1] | memory[2] | q | sizes[1] * 2) % 16 == 0:
            _reconstruct_strip(*strip, Q_DTYPE, SENT, PASS, True, COLUMNS)
        else:
            # Half a tile at a time, because an address and a mask for every element take registers. Processes may take
            # different branches and get the same bits: every element is a sum over r, in order, in both.
            _reconstruct_strip(*strip, Q_DTYPE, SENT, PASS, False, HALF)


def _launch_norms(
    factors: Tensor,
    keys: Sequence[int],
    renewal: Renewal,
    finite: Tensor,
    *,
    advances: bool,
    others: dict[str, Any],
    own: OwnFactor | None = None,
) -> dict[str, Any]:
    """The norms of the rows to renew, in one launch that subtracts the residual of ``own``, too.

    Returns the arguments of `_renew_row`, except the row.
    """
    layout, device = renewal.layout, renewal.following.device
    rows = layout.on_device.get(("rows", tuple(keys)), device, lambda: _rows(layout, keys))
    n_rows = rows.shape[1]
    row_arguments = {
        "factors_ptr": factors,
        "rows_ptr": rows,
        "norms_ptr": torch.empty(2, n_rows, dtype=torch.float32, device=device),
        "finite_ptr": finite,
        "n_rows": n_rows,
        "BLOCK": BLOCK_NUMEL,
    }
    sent, residual = (None, None) if own is None or own.residual is None else (own.sent, own.residual)
    _norms_kernel[(n_rows + others["n_others"],)](
        sent_ptr=sent,
        residual_ptr=residual,
        step_ptr=renewal.step if advances else None,
        advance_to=-1 if renewal.advance_to is None else renewal.advance_to,
        num_warps=NUM_WARPS,
        **row_arguments,
        **others,
    )
    return row_arguments | {"step_ptr": renewal.step, "following_ptr": renewal.following}


def renew_triton(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """`renew` in two launches."""
    renewal = Renewal(layout, following, step, None)
    with torch.cuda.device_of(following):
        row_arguments = _launch_norms(wire, keys, renewal, finite, advances=False, others=_others(None))
        _renew_kernel[(row_arguments["n_rows"],)](**row_arguments, num_warps=NUM_WARPS)


def reconstruct_triton(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` in one launch; with a renewal in two: norms and unpacking, then matrices and factors."""
    table, renewal, others = operands.table, operands.renewal, operands.uncompressed
    is_elementwise = table.padded_rank <= ELEMENTWISE_RANK
    with torch.cuda.device_of(p):
        row_arguments = {"finite_ptr": finite, "n_rows": 0}
        if renewal is not None:
            factors, unpacking = p if renewal.layout is table.p else q, _others(others, of_target=True)
            row_arguments = _launch_norms(
                factors, table.keys, renewal, finite, advances=True, others=unpacking, own=operands.own
            )
        elif others is not None:
            flatten_kernels(others.table).unflatten(others.wire, others.target, others.target_table, 1.0, None)
        width = 1 if is_elementwise else table.padded_rank
        own = operands.own
        side = None if own is None else "p" if own.layout is table.p else "q"
        strip_arguments = _strips(operands, to_p=True, is_kept=operands.keep, limit=table.limit, width=width, own=side)
        _reconstruct_kernel[(strip_arguments["n_programs"] + row_arguments["n_rows"],)](
            p_ptr=p,
            q_ptr=q,
            sent_ptr=None if own is None else own.sent,
            world_size=1 if own is None else own.world_size,
            num_warps=4 if is_elementwise else 8,
            **strip_arguments,
            **row_arguments,
        )
