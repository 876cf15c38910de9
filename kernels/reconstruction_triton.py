"""Reconstruction in Triton: out = P Q^T and E = M - out, in one kernel.

A program works through a strip of the result, as for P (`lowrank_programs`), with its rows of P in registers. Further
programs may renew the factors (`column_norms`) meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.column_norms import Renewal, norms_triton, renew_row
from gradwire.kernels.dtypes import triton_dtype
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.lowrank_programs import (
    ELEMENTWISE_RANK,
    load_m,
    load_strip,
    padded_rank,
    strips,
    tiling,
)
from gradwire.kernels.matrix_table import MatrixTable, Operands, Uncompressed, load_addresses, load_offsets, load_sizes


@jit
def _reconstruct_strip(
    source,  # address of [n, m]
    target,  # address of [n, m]
    error,  # address of [n, m] fp32
    p_ptr,  # [r, n], of any dtype
    q,  # address of [r, m]
    row,
    begin,  # column
    end,
    rows,
    columns,
    rank,
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
    stride = columns.to(tl.int32)
    if ALIGNED:
        stride = stride // 8 * 8  # the same number, but now the compiler knows that it is a multiple of 8
    offs_n = tl.arange(0, ROWS)[:, None]
    offs_m = tl.arange(0, COLUMNS)[None, :]
    offs_r = tl.arange(0, RANK)
    offs = offs_n * stride + offs_m
    mask_n = offs_n < tl.minimum(rows - row, ROWS).to(tl.int32)
    p_columns = tl.tuple(())
    p = 0.0
    if ELEMENTWISE:
        for r in tl.static_range(RANK):
            p_r = tl.load(p_ptr + (r * rows + row) + offs_n, mask=mask_n & (r < rank), other=0)  # [ROWS, 1]
            p_columns += (p_r.to(tl.float32),)
    else:
        p_ptrs = p_ptr + row + (offs_r.to(tl.int64) * rows)[None, :] + offs_n
        p = tl.load(p_ptrs, mask=mask_n & (offs_r < rank)[None, :], other=0).to(tl.float32)  # [ROWS, RANK]
    for start in range(begin, end, COLUMNS):
        n_columns = (columns - start).to(tl.int32)
        if ALIGNED:
            n_columns = n_columns // 8 * 8
        mask_m = offs_m < n_columns
        mask = mask_n & mask_m
        first = row * columns + start
        if HAS_ERROR:  # before the product, which then hides the latency
            m = load_m(source, target, error, first, offs, mask, SOURCE, KEPT, True, ALIGNED)
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
            # M may lie in the target. Where rows are not aligned, the thread that loads an element of M is not the one
            # that overwrites it with the result, and nothing else orders the two: the result does not depend on M.
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
    if wire_ptr is not None and program >= n_programs:
        row = program - n_programs
        renew_row(wire_ptr, rows_ptr, norms_ptr, finite_ptr, step_ptr, following_ptr, n_rows, row, BLOCK)
    if program < n_programs:
        matrix, row, begin, end = load_strip(strips_ptr, n_programs, program)
        rows, columns, rank = load_sizes(layout_ptr, n_matrices, matrix)
        p_offset, q_offset = load_offsets(layout_ptr, n_matrices, matrix)
        source, target, error = load_addresses(addresses_ptr, n_matrices, matrix)
        finite = tl.load(finite_ptr + matrix) > 0
        q = (q_ptr + q_offset).to(tl.int64)  # a number, as in `_multiply_kernel`
        # The aligned branch moves 16 bytes at a time, the other one element.
        if (source | target | error | q | columns * 2) % 16 == 0:
            _reconstruct_strip(
                source, target, error, p_ptr + p_offset, q, row, begin, end, rows, columns, rank, finite,
                SOURCE, q_ptr.dtype.element_ty, LIMIT, KEPT, HAS_ERROR, True, ELEMENTWISE, RANK, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            # Half a tile at a time, because an address and a mask for every element take registers. Processes may take
            # different branches and get the same bits: every element is a sum over r, in order, in both.
            _reconstruct_strip(
                source, target, error, p_ptr + p_offset, q, row, begin, end, rows, columns, rank, finite,
                SOURCE, q_ptr.dtype.element_ty, LIMIT, KEPT, HAS_ERROR, False, ELEMENTWISE, RANK, ROWS, COLUMNS // 2,
            )  # fmt: skip


# The arguments of a launch that renews no factors.
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
    """`reconstruct` in one launch."""
    with torch.cuda.device_of(p):
        _launch(operands, p, q, {"finite_ptr": finite, **NO_ROWS})


def reconstruct_and_renew_triton(
    operands: Operands, p: Tensor, q: Tensor, finite: Tensor, renewal: Renewal, unpack: Uncompressed | None
) -> None:
    """`reconstruct_and_renew` in two launches: norms and uncompressed gradients, then matrices and factors."""
    with torch.cuda.device_of(p):
        of_rows = norms_triton(*renewal[:5], finite, advances=True, advance_to=renewal.advance_to, unpack=unpack)
        _launch(operands, p, q, of_rows)


def _plan(table: MatrixTable) -> dict[str, Any]:
    """The arguments that launches have in common from step to step."""
    rank, cut = padded_rank(table), tiling(table)
    of_strips = table.on_device.get(("strips", True), table.device, lambda: strips(table, to_p=True))
    return {
        "layout_ptr": table.packed(),
        "strips_ptr": of_strips,
        "n_matrices": len(table),
        "n_programs": of_strips.shape[1],
        "SOURCE": triton_dtype(table.dtype),
        "LIMIT": table.limit,
        "ELEMENTWISE": rank <= ELEMENTWISE_RANK,
        "RANK": rank,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "num_warps": 4 if rank <= ELEMENTWISE_RANK else 8,
    }


def _launch(operands: Operands, p: Tensor, q: Tensor, of_rows: Mapping[str, Any]) -> None:
    table = operands.table
    plan = table.plans.get("reconstruct") or table.plans.setdefault("reconstruct", _plan(table))
    _reconstruct_kernel[(plan["n_programs"] + of_rows["n_rows"],)](
        addresses_ptr=table.on_device_addresses(operands.addresses),
        p_ptr=p,
        q_ptr=q,
        KEPT=operands.keep,
        HAS_ERROR=operands.error is not None,
        **plan,
        **of_rows,
    )
