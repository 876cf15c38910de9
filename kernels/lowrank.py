"""Low-rank passes: the three times that PowerSGD touches every element of a bucket's matrices, one launch each.

    project       M = G + E,   P' = scale M Q'       G, E: n x m;  Q: r x m;  P: r x n
    backproject   Q = scale P M
    reconstruct   out = P' Q,  E = M - out           if the factors are finite; else out = NaN, and E stays

out saturates at the largest number of the gradients' dtype, and what that cuts off stays in E.

E is the error memory; the update conserves G + E = out + E (new) to the rounding of one subtraction, and that of a
16-bit result is part of the error. E is overwritten in the last pass alone, when it is known on every rank whether all
factors are finite; so a step with an inf or NaN anywhere leaves it as it was, to the bit, without asking the host.

Traffic for N elements of s bytes, e bytes of an error element (the factors, r (n + m) elements, are small beside it):
M kept in the target between the passes (fp32):    (2s + e) + s + (2s + e)  N   = 28 N in fp32
M added up again (16 bit):                         (s + e) + (s + e) + (2s + 2e) N = 24 N with 16-bit gradients

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.flattening import compute_dtype, triton_dtype
from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.matrices import MAX_RANK, Factor, MatrixTable, Operands
from gradwire.kernels.platform import use_triton

Pass = Callable[..., None]

# A program of the products works through a strip of M, 32 x 512 or 512 x 32, in tiles of 32 x 32: two of these in
# fp32, and one more of a factor, are in flight three times over within 64 KiB of shared memory.
BLOCK = 32
STRIP = 512
# A program of `reconstruct` writes one tile of 32 x 64.
TILE_M = 64
# Elements of a factor that one program adds up.
CHUNK = 1024


def lowrank_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that the three passes together read and write for ``numel`` elements of matrices, with error feedback."""
    gradient, error = dtype.itemsize, compute_dtype(dtype).itemsize
    if gradient == error:  # M is kept in the target
        return numel * ((2 * gradient + error) + gradient + (2 * gradient + error))
    return numel * ((gradient + error) + (gradient + error) + (2 * gradient + 2 * error))


def project_reference(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """What `project` computes, written for reading."""
    table = operands.table
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q), table.p.views(p), strict=True)):
        m = operands.source[i].to(table.compute)
        if operands.error is not None:
            m = m + operands.error[i]
        if operands.keep:
            operands.target[i].copy_(m)
        p_i.copy_(scale * (q_i @ m.t()))


def backproject_reference(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """What `backproject` computes, written for reading."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        q_i.copy_(scale * (p_i @ _compensated(operands, i)))


def reconstruct_reference(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """What `reconstruct` computes, written for reading."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        out = (p_i.to(table.compute).t() @ q_i.to(table.compute)).clamp(-table.limit, table.limit).to(table.dtype)
        out = torch.where(finite[i] > 0, out, torch.nan)
        if operands.error is not None:
            error = _compensated(operands, i) - out.to(table.compute)
            operands.error[i].copy_(torch.where(finite[i] > 0, error, operands.error[i]))
        operands.target[i].copy_(out)


def _compensated(operands: Operands, index: int) -> Tensor:
    """M after `project`."""
    if operands.keep:
        return operands.target[index]
    m = operands.source[index].to(operands.table.compute)
    return m if operands.error is None else m + operands.error[index]


@jit
def _load_m(source_ptr, target_ptr, error_ptr, offs, mask, KEPT: tl.constexpr, HAS_ERROR: tl.constexpr):
    """A tile of M in fp32: from the target if `project` kept it there, else added up."""
    if KEPT:
        return tl.load(target_ptr + offs, mask=mask, other=0).to(tl.float32)
    m = tl.load(source_ptr + offs, mask=mask, other=0).to(tl.float32)
    if HAS_ERROR:
        m += tl.load(error_ptr + offs, mask=mask, other=0)
    return m


@jit
def _project_strip(
    source,
    target,
    error,
    q_ptr,
    offs_n,
    first,
    rows,
    columns,
    rank,
    SOURCE: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
):
    source_ptr = source.to(tl.pointer_type(SOURCE))
    target_ptr = target.to(tl.pointer_type(SOURCE))
    error_ptr = error.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
        columns = columns // 8 * 8  # which it is already; now the compiler knows
    offs_r = tl.arange(0, RANK)
    mask_n = offs_n < rows
    p = tl.zeros((BLOCK_N, RANK), dtype=tl.float32)
    for start in range(0, STRIP, BLOCK_M):
        offs_m = first * STRIP + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < columns
        offs = offs_n[:, None] * columns + offs_m[None, :]
        mask = mask_n[:, None] & mask_m[None, :]
        m = _load_m(source_ptr, target_ptr, error_ptr, offs, mask, False, HAS_ERROR)
        if KEEP:
            tl.store(target_ptr + offs, m, mask=mask)
        q_ptrs = q_ptr + offs_r[None, :] * columns + offs_m[:, None]
        q = tl.load(q_ptrs, mask=(offs_r < rank)[None, :] & mask_m[:, None], other=0)
        p = tl.dot(m, q, p, input_precision="ieee")
    return p


@kernel
def _project_kernel(
    pointers_ptr,
    layout_ptr,
    work_ptr,
    q_ptr,
    partial_ptr,
    n_matrices,
    n_programs,
    SOURCE: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Rows of P from one strip of columns of M, into the partial sums."""
    program = tl.program_id(0).to(tl.int64)
    matrix = tl.load(work_ptr + program)
    offs_n = tl.load(work_ptr + n_programs + program) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(work_ptr + 2 * n_programs + program)
    rows = tl.load(layout_ptr + matrix)
    columns = tl.load(layout_ptr + n_matrices + matrix)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix)
    q_ptr += tl.load(layout_ptr + 4 * n_matrices + matrix)
    source = tl.load(pointers_ptr + matrix)
    target = tl.load(pointers_ptr + n_matrices + matrix)
    error = tl.load(pointers_ptr + 2 * n_matrices + matrix)

    # The aligned branch moves 16 bytes at a time, the other one element.
    if (source | target | error | columns * 2) % 16 == 0:
        p = _project_strip(
            source, target, error, q_ptr, offs_n, first, rows, columns, rank,
            SOURCE, KEEP, HAS_ERROR, True, RANK, BLOCK_N, BLOCK_M, STRIP,
        )  # fmt: skip
    else:
        p = _project_strip(
            source, target, error, q_ptr, offs_n, first, rows, columns, rank,
            SOURCE, KEEP, HAS_ERROR, False, RANK, BLOCK_N, BLOCK_M, STRIP,
        )  # fmt: skip
    # Loaded only here, and sizes again: scalar registers are scarce on AMD.
    partial_ptr += tl.load(work_ptr + 3 * n_programs + program)
    rows = tl.load(layout_ptr + matrix, volatile=True)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix, volatile=True)
    offs_r = tl.arange(0, RANK)
    mask = (offs_n < rows)[:, None] & (offs_r < rank)[None, :]
    tl.store(partial_ptr + offs_r[None, :] * rows + offs_n[:, None], p, mask=mask)


@jit
def _backproject_strip(
    source,
    target,
    error,
    p_ptr,
    offs_m,
    first,
    rows,
    columns,
    rank,
    SOURCE: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
):
    source_ptr = source.to(tl.pointer_type(SOURCE))
    target_ptr = target.to(tl.pointer_type(SOURCE))
    error_ptr = error.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
        columns = columns // 8 * 8
    offs_r = tl.arange(0, RANK)
    mask_m = offs_m < columns
    q = tl.zeros((RANK, BLOCK_M), dtype=tl.float32)
    for start in range(0, STRIP, BLOCK_N):
        offs_n = first * STRIP + start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        offs = offs_n[:, None] * columns + offs_m[None, :]
        m = _load_m(source_ptr, target_ptr, error_ptr, offs, mask_n[:, None] & mask_m[None, :], KEPT, HAS_ERROR)
        p_ptrs = p_ptr + offs_r[:, None] * rows + offs_n[None, :]
        p = tl.load(p_ptrs, mask=(offs_r < rank)[:, None] & mask_n[None, :], other=0)
        q = tl.dot(p, m, q, input_precision="ieee")
    return q


@kernel
def _backproject_kernel(
    pointers_ptr,
    layout_ptr,
    work_ptr,
    p_ptr,
    partial_ptr,
    n_matrices,
    n_programs,
    SOURCE: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Columns of Q from one strip of rows of M, into the partial sums."""
    program = tl.program_id(0).to(tl.int64)
    matrix = tl.load(work_ptr + program)
    offs_m = tl.load(work_ptr + n_programs + program) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.load(work_ptr + 2 * n_programs + program)
    partial_ptr += tl.load(work_ptr + 3 * n_programs + program)
    rows = tl.load(layout_ptr + matrix)
    columns = tl.load(layout_ptr + n_matrices + matrix)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix)
    p_ptr += tl.load(layout_ptr + 3 * n_matrices + matrix)
    source = tl.load(pointers_ptr + matrix)
    target = tl.load(pointers_ptr + n_matrices + matrix)
    error = tl.load(pointers_ptr + 2 * n_matrices + matrix)

    if (source | target | error | columns * 2) % 16 == 0:
        q = _backproject_strip(
            source, target, error, p_ptr, offs_m, first, rows, columns, rank,
            SOURCE, KEPT, HAS_ERROR, True, RANK, BLOCK_N, BLOCK_M, STRIP,
        )  # fmt: skip
    else:
        q = _backproject_strip(
            source, target, error, p_ptr, offs_m, first, rows, columns, rank,
            SOURCE, KEPT, HAS_ERROR, False, RANK, BLOCK_N, BLOCK_M, STRIP,
        )  # fmt: skip
    offs_r = tl.arange(0, RANK)
    mask = (offs_r < rank)[:, None] & (offs_m < columns)[None, :]
    tl.store(partial_ptr + offs_r[:, None] * columns + offs_m[None, :], q, mask=mask)


@kernel
def _sum_partials_kernel(partial_ptr, out_ptr, work_ptr, scale: tl.float64, n_programs, CHUNK: tl.constexpr):
    """A chunk of a factor: the sum of its partial sums in the order of strips, times ``scale``, cast to the wire."""
    program = tl.program_id(0).to(tl.int64)
    start = tl.load(work_ptr + program)
    size = tl.load(work_ptr + n_programs + program)
    strips = tl.load(work_ptr + 2 * n_programs + program)
    partial_ptr += tl.load(work_ptr + 3 * n_programs + program)
    out_ptr += tl.load(work_ptr + 4 * n_programs + program)
    offs = start + tl.arange(0, CHUNK)
    mask = offs < size
    total = tl.load(partial_ptr + offs, mask=mask, other=0)
    strip = 1
    while strip < strips:
        total += tl.load(partial_ptr + strip * size + offs, mask=mask, other=0)
        strip += 1
    total *= tl.full((), scale, tl.float32)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _reconstruct_tile(
    source,
    target,
    error,
    out,
    offs_n,
    offs_m,
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
        m = _load_m(source_ptr, target_ptr, error_ptr, offs, mask, KEPT, True)
        # M may lie in the target, and where rows are not aligned, the thread that loads an element of M
        # is not the one that overwrites it with the result, which does not depend on M.
        tl.debug_barrier()
        tl.store(error_ptr + offs, m - out.to(tl.float32), mask=mask & finite)
    tl.store(target_ptr + offs, out, mask=mask)


@kernel
def _reconstruct_kernel(
    pointers_ptr,
    layout_ptr,
    work_ptr,
    p_ptr,
    q_ptr,
    finite_ptr,
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
    """One tile of the result and of the error."""
    program = tl.program_id(0).to(tl.int64)
    matrix = tl.load(work_ptr + program)
    offs_n = tl.load(work_ptr + n_programs + program) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.load(work_ptr + 2 * n_programs + program) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.load(layout_ptr + matrix)
    columns = tl.load(layout_ptr + n_matrices + matrix)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix)
    p_ptr += tl.load(layout_ptr + 3 * n_matrices + matrix)
    q_ptr += tl.load(layout_ptr + 4 * n_matrices + matrix)
    source = tl.load(pointers_ptr + matrix)
    target = tl.load(pointers_ptr + n_matrices + matrix)
    error = tl.load(pointers_ptr + 2 * n_matrices + matrix)
    finite = tl.load(finite_ptr + matrix) > 0

    offs_r = tl.arange(0, RANK)
    mask_r = offs_r < rank
    p_ptrs = p_ptr + offs_r[None, :] * rows + offs_n[:, None]
    p = tl.load(p_ptrs, mask=mask_r[None, :] & (offs_n < rows)[:, None], other=0).to(tl.float32)
    q_ptrs = q_ptr + offs_r[:, None] * columns + offs_m[None, :]
    q = tl.load(q_ptrs, mask=mask_r[:, None] & (offs_m < columns)[None, :], other=0).to(tl.float32)
    out = tl.dot(p, q, input_precision="ieee")
    out = tl.where(finite, tl.minimum(tl.maximum(out, -LIMIT), LIMIT), float("nan")).to(SOURCE)
    if (source | target | error | columns * 2) % 16 == 0:
        _reconstruct_tile(
            source, target, error, out, offs_n, offs_m, rows, columns, finite, SOURCE, KEPT, HAS_ERROR, True
        )
    else:
        _reconstruct_tile(
            source, target, error, out, offs_n, offs_m, rows, columns, finite, SOURCE, KEPT, HAS_ERROR, False
        )


def can_use_triton(table: MatrixTable) -> bool:
    """Whether the kernels take these matrices: up to rank 64, and not fp64."""
    return use_triton(table.device) and table.largest_rank <= MAX_RANK and table.compute == torch.float32


def can_keep(table: MatrixTable) -> bool:
    """Whether `project` had better leave M in the target: where that holds it, and where it saves a read.

    The CPU paths copy M into their scratch in any case, and add there at no cost.
    """
    return can_use_triton(table) and table.dtype == table.compute


def _padded_rank(table: MatrixTable) -> int:
    """The rank as the kernels see it: `tl.dot` takes no side shorter than 16."""
    return max(16, next_power_of_2(table.largest_rank))


def _strips(table: MatrixTable, on_p: bool) -> list[list[int]]:
    """The programs of `_project_kernel` or `_backproject_kernel`: matrix, block, strip, start of the partial sum."""
    programs, base = [], 0
    for i, matrix in enumerate(table.matrices):
        along, across = (matrix.rows, matrix.columns) if on_p else (matrix.columns, matrix.rows)
        size = (table.p if on_p else table.q).sizes[i]
        n_strips = -(-across // STRIP)
        programs += [(i, block, s, base + s * size) for block in range(-(-along // BLOCK)) for s in range(n_strips)]
        base += n_strips * size
    return [list(column) for column in zip(*programs, strict=True)]


def _partial_sums(table: MatrixTable, on_p: bool) -> list[list[int]]:
    """The programs of `_sum_partials_kernel`: start, size, strips, start of the partial sums, offset of the factor."""
    programs, base = [], 0
    for i, matrix in enumerate(table.matrices):
        factor, across = (table.p, matrix.columns) if on_p else (table.q, matrix.rows)
        size, n_strips = factor.sizes[i], -(-across // STRIP)
        programs += [(start, size, n_strips, base, factor.offsets[i]) for start in range(0, size, CHUNK)]
        base += n_strips * size
    return [list(column) for column in zip(*programs, strict=True)]


def _tiles(table: MatrixTable) -> list[list[int]]:
    """The programs of `_reconstruct_kernel`: matrix, block of rows, block of columns."""
    programs = [
        (i, n, m)
        for i, matrix in enumerate(table.matrices)
        for n in range(-(-matrix.rows // BLOCK))
        for m in range(-(-matrix.columns // TILE_M))
    ]
    return [list(column) for column in zip(*programs, strict=True)]


def _pointers(operands: Operands) -> Tensor:
    # Without error feedback the third row is not read, but its alignment is asked for.
    return operands.table.pointers(operands.source, operands.target, operands.error or operands.target)


def _multiply_triton(
    operands: Operands, kernel: Any, known: dict[str, Tensor], out: Tensor, scale: float, on_p: bool, **options: Any
) -> None:
    """Launch `_project_kernel` or `_backproject_kernel`, and add up its partial sums."""
    table = operands.table
    factor = table.p if on_p else table.q
    programs = table.on_device.get(("strips", on_p), table.device, lambda: _strips(table, on_p))
    chunks = table.on_device.get(("sums", on_p), table.device, lambda: _partial_sums(table, on_p))
    sides = [matrix.columns if on_p else matrix.rows for matrix in table.matrices]
    n_partials = sum(-(-side // STRIP) * size for side, size in zip(sides, factor.sizes, strict=True))
    partials = torch.empty(n_partials, dtype=torch.float32, device=table.device)
    rank = _padded_rank(table)
    with torch.cuda.device_of(out):
        kernel[(programs.shape[1],)](
            pointers_ptr=_pointers(operands),
            layout_ptr=table.layout(),
            work_ptr=programs,
            **known,
            partial_ptr=partials,
            n_matrices=len(table),
            n_programs=programs.shape[1],
            SOURCE=triton_dtype(table.dtype),
            HAS_ERROR=operands.error is not None,
            RANK=rank,
            BLOCK_N=BLOCK,
            BLOCK_M=BLOCK,
            STRIP=STRIP,
            **options,
            num_warps=4 if rank == 16 else 8,
        )
        _sum_partials_kernel[(chunks.shape[1],)](
            partial_ptr=partials,
            out_ptr=out,
            work_ptr=chunks,
            scale=scale,
            n_programs=chunks.shape[1],
            CHUNK=CHUNK,
            num_warps=4,
        )


def _project_triton(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    _multiply_triton(operands, _project_kernel, {"q_ptr": q}, p, scale, True, KEEP=operands.keep)


def _backproject_triton(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    _multiply_triton(operands, _backproject_kernel, {"p_ptr": p}, q, scale, False, KEPT=operands.keep)


def _reconstruct_triton(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    table = operands.table
    tiles = table.on_device.get("tiles", table.device, lambda: _tiles(table))
    with torch.cuda.device_of(p):
        _reconstruct_kernel[(tiles.shape[1],)](
            pointers_ptr=_pointers(operands),
            layout_ptr=table.layout(),
            work_ptr=tiles,
            p_ptr=p,
            q_ptr=q,
            finite_ptr=finite,
            n_matrices=len(table),
            n_programs=tiles.shape[1],
            SOURCE=triton_dtype(table.dtype),
            LIMIT=table.limit,
            KEPT=operands.keep,
            HAS_ERROR=operands.error is not None,
            RANK=_padded_rank(table),
            BLOCK_N=BLOCK,
            BLOCK_M=TILE_M,
            num_warps=8,
        )


def _parts(tensor: Tensor, step: int, dim: int = 0) -> Sequence[Tensor]:
    """``tensor.split(step, dim)``, which costs as much as a small product, where there is more than one part."""
    return tensor.split(step, dim) if step < tensor.shape[dim] else (tensor,)


def _blocks_of_m(operands: Operands, index: int) -> Iterator[Tensor]:
    """M, some rows at a time, in the scratch: BLAS may round by alignment, and that of gradients is anybody's."""
    table = operands.table
    step, scratch = table.block_rows[index], table.scratch(index)
    first = _parts((operands.target if operands.keep else operands.source)[index], step)
    if operands.keep or operands.error is None:
        for block in first:
            yield scratch[: len(block)].copy_(block)
    else:
        for block, error in zip(first, _parts(operands.error[index], step), strict=True):
            yield torch.add(block, error, out=scratch[: len(block)])


def _project_cpu(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    table = operands.table
    adding = operands._replace(keep=False)
    products = _products(table.p, p, table.compute)
    for i, (q_i, p_i, product) in enumerate(zip(table.q.views(q), table.p.views(p), products, strict=True)):
        step = table.block_rows[i]
        blocks = zip(_blocks_of_m(adding, i), _parts(product, step, 1), _parts(operands.target[i], step), strict=True)
        for m, columns, target in blocks:
            torch.mm(q_i, m.t(), out=columns)
            if operands.keep:
                target.copy_(m)
        torch.mul(product, scale, out=p_i)


def _products(factor: Factor, wire: Tensor, compute: torch.dtype) -> list[Tensor]:
    """Where factors are computed: in the wire itself if it has that dtype."""
    return factor.views(wire if wire.dtype == compute else torch.empty_like(wire, dtype=compute))


def _backproject_cpu(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    table = operands.table
    products = _products(table.q, q, table.compute)
    for i, (p_i, q_i, product) in enumerate(zip(table.p.views(p), table.q.views(q), products, strict=True)):
        product.zero_()
        for m, columns in zip(_blocks_of_m(operands, i), _parts(p_i, table.block_rows[i], 1), strict=True):
            torch.addmm(product, columns, m, out=product)
        torch.mul(product, scale, out=q_i)


def _reconstruct_cpu(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    table = operands.table
    is_finite = finite.tolist()
    p, q = p.to(table.compute), q.to(table.compute)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        if not is_finite[i]:
            operands.target[i].fill_(torch.nan)
            continue
        step = table.block_rows[i]
        targets = _parts(operands.target[i], step)
        sources = targets if operands.keep else _parts(operands.source[i], step)
        errors = _parts(operands.error[i], step) if operands.error is not None else [None] * len(targets)
        for columns, source, error, target in zip(_parts(p_i, step, 1), sources, errors, targets, strict=True):
            product = torch.mm(columns.t(), q_i, out=table.scratch(i)[: len(target)])
            if table.dtype != table.compute:
                product.clamp_(-table.limit, table.limit)
            if error is None:
                target.copy_(product)
            elif operands.keep:
                torch.sub(source, product, out=error)
                target.copy_(product)
            else:
                error.add_(source)
                error.sub_(target.copy_(product))


def _implementation(table: MatrixTable, triton: Pass, cpu: Pass, reference: Pass) -> Pass:
    if can_use_triton(table):
        return triton
    return cpu if table.device.type == "cpu" else reference


def project(operands: Operands, q: Tensor, p: Tensor, *, scale: float) -> None:
    """M = G + E; P' = scale M Q', for every matrix of a bucket.

    Args:
        operands: the matrices. With ``keep``, the target is overwritten with M; nothing else is modified.
        q: the packed factors Q, fp32 or fp64 as ``table.compute``.
        p: the packed factors P, of a wire dtype: fp32, bf16, or fp64. Overwritten. Not finite in every row in which M
            is not.
        scale: 1 / world size, say.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.check()
    operands.table.q.check(q, "q")
    operands.table.p.check(p, "p")
    run = _implementation(operands.table, _project_triton, _project_cpu, project_reference)
    run(operands, q, p, scale)


def backproject(operands: Operands, p: Tensor, q: Tensor, *, scale: float) -> None:
    """Q = scale P M, for every matrix of a bucket.

    Args:
        operands: the matrices, after `project` if it keeps M. Not modified.
        p: the packed factors P, fp32 or fp64 as ``table.compute``.
        q: the packed factors Q, of a wire dtype. Overwritten.
        scale: 1 / world size, say.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.check()
    operands.table.p.check(p, "p")
    operands.table.q.check(q, "q")
    run = _implementation(operands.table, _backproject_triton, _backproject_cpu, backproject_reference)
    run(operands, p, q, scale)


def reconstruct(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """out = P' Q into the target; E = M - out, for every matrix whose factors are finite.

    Args:
        operands: the matrices, after `project` if it keeps M. Target and error memory are overwritten.
        p: the packed factors P, as they came off the wire or orthogonalised.
        q: the packed factors Q, likewise.
        finite: int32, one element a matrix: 0 leaves its error memory alone and makes its result NaN.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.check()
    operands.table.p.check(p, "p")
    operands.table.q.check(q, "q")
    run = _implementation(operands.table, _reconstruct_triton, _reconstruct_cpu, reconstruct_reference)
    run(operands, p, q, finite)
