"""Low-rank passes in Triton: a kernel for both products, one to sum their parts, one to reconstruct.

A program of a product works through a strip of M, 32 x 512 for P or 512 x 32 for Q, and stores a partial sum. A strip
keeps the number of programs high for matrices of few rows or columns; partial sums that are added in a fixed order
need no float atomics, and give the same bits on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dtypes import triton_dtype
from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.lowrank_programs import chunks, load_chunk, load_strip, load_tile, strips, tiles
from gradwire.kernels.matrix_table import (
    MatrixTable,
    Operands,
    load_addresses,
    load_offsets,
    load_sizes,
    reload_rows_and_rank,
)

# Rows and columns of a tile of M: two tiles in fp32 and one of a factor are in flight three times over, within 64 KiB
# of shared memory.
BLOCK = 32
# Rows or columns of M that a program of a product sums over.
STRIP = 512
# Tiles of M in flight, by padded rank, of the product M' P of 16-bit matrices. With Triton's default, 3, its registers
# spill at rank 64 (sm_80, Triton 3.7.1) and at rank 16 (sm_100, Triton 3.6.0).
STAGES_OF_16_BIT = {16: 2, 32: 3, 64: 1}
STAGES = 3
# Columns of the tile that a program of `reconstruct` writes, 32 x 64.
RECONSTRUCT_COLUMNS = 64
# Elements of a factor that one program adds up.
SUM_NUMEL = 1024


@jit
def _load_m(
    source_ptr,  # [n, m]
    target_ptr,  # [n, m]
    error_ptr,  # [n, m] fp32
    offs,  # [tile]
    mask,  # [tile]
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
):
    """A tile of M in fp32: from the target if `project` kept it there, else G + E."""
    if KEPT:
        return tl.load(target_ptr + offs, mask=mask, other=0).to(tl.float32)
    m = tl.load(source_ptr + offs, mask=mask, other=0).to(tl.float32)
    if HAS_ERROR:
        m += tl.load(error_ptr + offs, mask=mask, other=0)
    return m


@jit
def _multiply_strip(
    source,  # address of [n, m]
    target,  # address of [n, m]
    error,  # address of [n, m] fp32
    factor_ptr,  # Q as [r, m] for P, P as [r, n] for Q
    offs_along,  # [BLOCK]: rows of M for P, columns of M for Q
    strip,
    rows,
    columns,
    rank,
    SOURCE: tl.constexpr,
    TO_P: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The product of a strip of M and a factor: [BLOCK, RANK] for P, [RANK, BLOCK] for Q."""
    source_ptr = source.to(tl.pointer_type(SOURCE))
    target_ptr = target.to(tl.pointer_type(SOURCE))
    error_ptr = error.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
        columns = columns // 8 * 8  # the same number, but now the compiler knows that it is a multiple of 8
    along = rows if TO_P else columns  # the side that the result keeps
    across = columns if TO_P else rows  # the side that is summed over
    offs_r = tl.arange(0, RANK)
    mask_r = offs_r < rank
    mask_along = offs_along < along
    total = tl.zeros((BLOCK, RANK) if TO_P else (RANK, BLOCK), dtype=tl.float32)
    for start in range(0, STRIP, BLOCK):
        offs_across = strip * STRIP + start + tl.arange(0, BLOCK)
        mask_across = offs_across < across
        # M is row-major, so rows come first in a tile of it, whichever side is computed.
        if TO_P:
            offs = offs_along[:, None] * columns + offs_across[None, :]
            mask = mask_along[:, None] & mask_across[None, :]
        else:
            offs = offs_across[:, None] * columns + offs_along[None, :]
            mask = mask_across[:, None] & mask_along[None, :]
        m = _load_m(source_ptr, target_ptr, error_ptr, offs, mask, KEEP and not TO_P, HAS_ERROR)  # [BLOCK, BLOCK]
        if TO_P:
            if KEEP:
                tl.store(target_ptr + offs, m, mask=mask)
            q_ptrs = factor_ptr + offs_r[None, :] * across + offs_across[:, None]
            q = tl.load(q_ptrs, mask=mask_r[None, :] & mask_across[:, None], other=0)  # [BLOCK, RANK]
            total = tl.dot(m, q, total, input_precision="ieee")
        else:
            p_ptrs = factor_ptr + offs_r[:, None] * across + offs_across[None, :]
            p = tl.load(p_ptrs, mask=mask_r[:, None] & mask_across[None, :], other=0)  # [RANK, BLOCK]
            total = tl.dot(p, m, total, input_precision="ieee")
    return total


@kernel
def _multiply_kernel(
    addresses_ptr,  # [3, matrices] int64: `MatrixTable.addresses` of source, target and error
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    strips_ptr,  # [4, programs] int64: `strips`
    factor_ptr,  # packed Q for P, packed P for Q, fp32
    partial_ptr,  # the partial sums of each matrix, one after another, [strips, r, n] or [strips, r, m] fp32
    n_matrices,
    n_programs,
    SOURCE: tl.constexpr,
    TO_P: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    """One block of P (TO_P) or of Q, summed over one strip of M. With KEEP, M is stored on the way to P."""
    program = tl.program_id(0).to(tl.int64)
    matrix, block, strip, _ = load_strip(strips_ptr, n_programs, program)
    offs_along = block * BLOCK + tl.arange(0, BLOCK)
    rows, columns, rank = load_sizes(layout_ptr, n_matrices, matrix)
    p_offset, q_offset = load_offsets(layout_ptr, n_matrices, matrix)
    factor_ptr += q_offset if TO_P else p_offset
    source, target, error = load_addresses(addresses_ptr, n_matrices, matrix)
    # The aligned branch moves 16 bytes at a time, the other one element.
    if (source | target | error | columns * 2) % 16 == 0:
        total = _multiply_strip(
            source, target, error, factor_ptr, offs_along, strip, rows, columns, rank,
            SOURCE, TO_P, KEEP, HAS_ERROR, True, RANK, BLOCK, STRIP,
        )  # fmt: skip
    else:
        total = _multiply_strip(
            source, target, error, factor_ptr, offs_along, strip, rows, columns, rank,
            SOURCE, TO_P, KEEP, HAS_ERROR, False, RANK, BLOCK, STRIP,
        )  # fmt: skip
    # Loaded only here: before the loop they would occupy scalar registers throughout, which are scarce on AMD.
    _, _, _, partial_start = load_strip(strips_ptr, n_programs, program)
    if TO_P:
        rows, rank = reload_rows_and_rank(layout_ptr, n_matrices, matrix)
    partial_ptr += partial_start
    offs_r = tl.arange(0, RANK)
    mask_r = offs_r < rank
    if TO_P:
        mask = (offs_along < rows)[:, None] & mask_r[None, :]
        tl.store(partial_ptr + offs_r[None, :] * rows + offs_along[:, None], total, mask=mask)
    else:
        mask = mask_r[:, None] & (offs_along < columns)[None, :]
        tl.store(partial_ptr + offs_r[:, None] * columns + offs_along[None, :], total, mask=mask)


@kernel
def _sum_partials_kernel(
    partial_ptr,  # as `_multiply_kernel` leaves it
    chunks_ptr,  # [5, programs] int64: `chunks`
    out_ptr,  # packed factors in a wire dtype
    n_programs,
    scale: tl.float64,
    CHUNK: tl.constexpr,
):
    """A chunk of a factor: its partial sums added in the order of strips, times ``scale``, cast to the wire dtype."""
    program = tl.program_id(0).to(tl.int64)
    start, size, n_strips, partial_start, offset = load_chunk(chunks_ptr, n_programs, program)
    partial_ptr += partial_start
    out_ptr += offset
    offs = start + tl.arange(0, CHUNK)
    mask = offs < size
    total = tl.load(partial_ptr + offs, mask=mask, other=0)  # [CHUNK]
    strip = 1
    while strip < n_strips:
        total += tl.load(partial_ptr + strip * size + offs, mask=mask, other=0)
        strip += 1
    total *= tl.full((), scale, tl.float32)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _reconstruct_tile(
    source,  # address of [n, m]
    target,  # address of [n, m]
    error,  # address of [n, m] fp32
    out,  # [BLOCK_N, BLOCK_M]: the result
    offs_n,  # [BLOCK_N]
    offs_m,  # [BLOCK_M]
    rows,
    columns,
    finite,
    SOURCE: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    source_ptr = source.to(tl.pointer_type(SOURCE))
    target_ptr = target.to(tl.pointer_type(SOURCE))
    error_ptr = error.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
        columns = columns // 8 * 8
    offs = offs_n[:, None] * columns + offs_m[None, :]
    mask = (offs_n < rows)[:, None] & (offs_m < columns)[None, :]
    if HAS_ERROR:
        m = _load_m(source_ptr, target_ptr, error_ptr, offs, mask, KEPT, True)  # [BLOCK_N, BLOCK_M]
        # M may lie in the target. Where rows are not aligned, the thread that loads an element of M is not the one
        # that overwrites it with the result, and nothing else orders the two: the result does not depend on M.
        tl.debug_barrier()
        tl.store(error_ptr + offs, m - out.to(tl.float32), mask=mask & finite)
    tl.store(target_ptr + offs, out, mask=mask)


@kernel
def _reconstruct_kernel(
    addresses_ptr,  # [3, matrices] int64: `MatrixTable.addresses` of source, target and error
    layout_ptr,  # [5, matrices] int64: `MatrixTable.packed`
    tiles_ptr,  # [3, programs] int64: `tiles`
    p_ptr,  # packed P, of any dtype
    q_ptr,  # packed Q, of any dtype
    finite_ptr,  # [matrices] int32
    n_matrices,
    n_programs,
    SOURCE: tl.constexpr,
    LIMIT: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One tile of the result and of the error memory."""
    program = tl.program_id(0).to(tl.int64)
    matrix, block_n, block_m = load_tile(tiles_ptr, n_programs, program)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, columns, rank = load_sizes(layout_ptr, n_matrices, matrix)
    p_offset, q_offset = load_offsets(layout_ptr, n_matrices, matrix)
    source, target, error = load_addresses(addresses_ptr, n_matrices, matrix)
    finite = tl.load(finite_ptr + matrix) > 0

    offs_r = tl.arange(0, RANK)
    mask_r = offs_r < rank
    p_ptrs = p_ptr + p_offset + offs_r[None, :] * rows + offs_n[:, None]
    p = tl.load(p_ptrs, mask=mask_r[None, :] & (offs_n < rows)[:, None], other=0).to(tl.float32)  # [BLOCK_N, RANK]
    q_ptrs = q_ptr + q_offset + offs_r[:, None] * columns + offs_m[None, :]
    q = tl.load(q_ptrs, mask=mask_r[:, None] & (offs_m < columns)[None, :], other=0).to(tl.float32)  # [RANK, BLOCK_M]
    out = tl.dot(p, q, input_precision="ieee")
    out = tl.where(finite, tl.minimum(tl.maximum(out, -LIMIT), LIMIT), float("nan")).to(SOURCE)
    # The aligned branch moves 16 bytes at a time, the other one element.
    if (source | target | error | columns * 2) % 16 == 0:
        _reconstruct_tile(
            source, target, error, out, offs_n, offs_m, rows, columns, finite, SOURCE, KEPT, HAS_ERROR, True
        )
    else:
        _reconstruct_tile(
            source, target, error, out, offs_n, offs_m, rows, columns, finite, SOURCE, KEPT, HAS_ERROR, False
        )


def _padded_rank(table: MatrixTable) -> int:
    """The rank that the kernels are compiled for: `tl.dot` accepts no side shorter than 16."""
    return max(16, next_power_of_2(table.largest_rank))


def _addresses(operands: Operands) -> Tensor:
    # Without error feedback nothing is read at the third address, but the kernels test its alignment.
    return operands.table.addresses(operands.source, operands.target, operands.error or operands.target)


def _multiply(operands: Operands, factor: Tensor, out: Tensor, scale: float, to_p: bool) -> None:
    """Write ``scale`` M Q or ``scale`` M^T P into ``out``: the partial sums, then their sum."""
    table = operands.table
    device, cache = table.device, table.on_device
    of_strips = cache.get(("strips", to_p), device, lambda: strips(table, to_p, BLOCK, STRIP))
    of_chunks = cache.get(("chunks", to_p), device, lambda: chunks(table, to_p, SUM_NUMEL, STRIP))
    sizes = (table.p if to_p else table.q).sizes
    across = (table.q if to_p else table.p).lengths
    n_partials = sum(-(-length // STRIP) * size for length, size in zip(across, sizes, strict=True))
    partials = torch.empty(n_partials, dtype=torch.float32, device=device)
    rank = _padded_rank(table)
    with torch.cuda.device_of(out):
        _multiply_kernel[(of_strips.shape[1],)](
            addresses_ptr=_addresses(operands),
            layout_ptr=table.packed(),
            strips_ptr=of_strips,
            factor_ptr=factor,
            partial_ptr=partials,
            n_matrices=len(table),
            n_programs=of_strips.shape[1],
            SOURCE=triton_dtype(table.dtype),
            TO_P=to_p,
            KEEP=operands.keep,
            HAS_ERROR=operands.error is not None,
            RANK=rank,
            BLOCK=BLOCK,
            STRIP=STRIP,
            num_warps=4 if rank == 16 else 8,
            num_stages=STAGES if to_p or table.dtype.itemsize > 2 else STAGES_OF_16_BIT[rank],
        )
        _sum_partials_kernel[(of_chunks.shape[1],)](
            partial_ptr=partials,
            chunks_ptr=of_chunks,
            out_ptr=out,
            n_programs=of_chunks.shape[1],
            scale=scale,
            CHUNK=SUM_NUMEL,
            num_warps=4,
        )


def project_triton(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """`project` in two launches."""
    _multiply(operands, q, p, scale, to_p=True)


def backproject_triton(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """`backproject` in two launches."""
    _multiply(operands, p, q, scale, to_p=False)


def reconstruct_triton(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` in one launch."""
    table = operands.table
    of_tiles = table.on_device.get("tiles", table.device, lambda: tiles(table, BLOCK, RECONSTRUCT_COLUMNS))
    with torch.cuda.device_of(p):
        _reconstruct_kernel[(of_tiles.shape[1],)](
            addresses_ptr=_addresses(operands),
            layout_ptr=table.packed(),
            tiles_ptr=of_tiles,
            p_ptr=p,
            q_ptr=q,
            finite_ptr=finite,
            n_matrices=len(table),
            n_programs=of_tiles.shape[1],
            SOURCE=triton_dtype(table.dtype),
            LIMIT=table.limit,
            KEPT=operands.keep,
            HAS_ERROR=operands.error is not None,
            RANK=_padded_rank(table),
            BLOCK_N=BLOCK,
            BLOCK_M=RECONSTRUCT_COLUMNS,
            num_warps=8,
        )
