"""Reconstruction in Triton: out = P Q^T and E = M - out in one kernel, and the renewal of factors.

A program of `reconstruct` works through a strip of the result, as for P (`lowrank_triton`), with its rows of P in
registers. Further programs renew the factors meanwhile. Their norms come first, from a kernel whose further programs
unpack the gradients that are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_fields, triton_dtype, uniform_triton
from gradwire.kernels.flatten_triton import unflatten_chunk
from gradwire.kernels.lowrank_triton import as_aligned, load_m, strip_arguments
from gradwire.kernels.matrix_table import (
    ELEMENTWISE_RANK,
    FactorLayout,
    MatrixTable,
    Operands,
    Uncompressed,
    padded_rank,
)
from gradwire.kernels.segment_table import CHUNK_NUMEL

# Elements of a row of a factor that a program handles at a time.
BLOCK_NUMEL = 1024
NUM_WARPS = 8  # 16 elements a thread where a program unpacks a chunk of gradients


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
    stride = as_aligned(columns.to(tl.int32), ALIGNED)
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
        n_columns = as_aligned((columns - start).to(tl.int32), ALIGNED)
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first = row * columns + start
        if HAS_ERROR:  # before the product, which then hides the latency
            m = load_m(memory, first, offs, mask, SOURCE, KEPT, True, ALIGNED)
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


def _plan(table: MatrixTable) -> dict[str, Any]:
    """The arguments that all steps share."""
    is_elementwise = padded_rank(table) <= ELEMENTWISE_RANK
    own = {"LIMIT": table.limit, "ELEMENTWISE": is_elementwise, "num_warps": 4 if is_elementwise else 8}
    return strip_arguments(table, to_p=True) | own


def reconstruct_triton(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` in one launch; with a renewal in two: norms and unpacking, then matrices and factors."""
    table, renewal = operands.table, operands.renewal
    plan = table.plans.get("reconstruct") or table.plans.setdefault("reconstruct", _plan(table))
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
        _reconstruct_kernel[(plan["n_programs"] + row_arguments["n_rows"],)](
            addresses_ptr=table.on_device_addresses(operands.addresses),
            p_ptr=p,
            q_ptr=q,
            KEPT=operands.keep,
            HAS_ERROR=operands.error is not None,
            **plan,
            **row_arguments,
        )
