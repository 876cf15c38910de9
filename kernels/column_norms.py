"""Column norms: the factors of this step, scaled to unit columns for the next step.

    next_c = q_c / |q_c|              so that the columns of the next P have the magnitude of the gradient, whatever Q's
    next_c = a random unit vector     where q_c is zero: otherwise that column would stay zero

Random columns come from a counter-based generator. Its counters are the key of the matrix, the step
and the place in the factor, so all ranks draw the same. A factor that is not finite leaves the next
step's factor unchanged and clears the flag of its matrix.

Factors are stored transposed (`matrix_table`): column c is row c of an r x m block of memory.

Traffic: r m elements per factor, read twice and written once. It is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.counter_random import uniform, uniform_triton
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.dtypes import triton_dtype
from gradwire.kernels.flattening import unflatten_chunk
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.matrix_table import FactorLayout, Uncompressed
from gradwire.kernels.segment_table import CHUNK_NUMEL

# Elements that a program handles at a time.
BLOCK_NUMEL = 1024
NUM_WARPS = 8  # 16 elements a thread where a program unpacks a chunk of gradients
# Norms whose squares are far from the ends of fp64's range. Outside lie some rows in fp64, zeros, and non-finite rows.
SAFE_NORMS = (1e-140, 1e140)


def renew_bytes(numel: int, wire: torch.dtype, following: torch.dtype) -> int:
    """Bytes that renewing ``numel`` elements of factors reads and writes: the wire twice, because norms come first."""
    return numel * (2 * wire.itemsize + following.itemsize)


def renew_reference(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """`renew` in plain PyTorch, factor by factor."""
    for i, (q, after) in enumerate(zip(layout.views(wire), layout.views(following), strict=True)):
        finite[i] *= q.isfinite().all()
        drawn = uniform(keys[i], step, torch.arange(q.numel(), device=q.device).view_as(q))
        columns = torch.where((q == 0).all(1, keepdim=True), drawn.to(after.dtype), q.to(after.dtype))
        scaled = columns / columns.abs().amax(1, keepdim=True)
        unit = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        after.copy_(torch.where(finite[i] > 0, unit, after))


def _rows(layout: FactorLayout, keys: Sequence[int]) -> list[list[int]]:
    """The programs, [5, programs]: factor, length, offset of the row in the buffer and in its factor, key."""
    programs = [
        (i, length, layout.offsets[i] + row * length, row * length, keys[i])
        for i, (rank, length) in enumerate(zip(layout.ranks, layout.lengths, strict=True))
        for row in range(rank)
    ]
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def _load_row(rows_ptr, n_rows, row):
    """Decode one program of `_rows`."""
    factor = tl.load(rows_ptr + row)
    length = tl.load(rows_ptr + n_rows + row)
    offset = tl.load(rows_ptr + 2 * n_rows + row)
    first = tl.load(rows_ptr + 3 * n_rows + row)
    key = tl.load(rows_ptr + 4 * n_rows + row)
    return factor, length, offset, first, key


@jit
def _norms_row(
    wire_ptr,  # packed factors, of any dtype
    rows_ptr,  # [5, rows] int64: `_rows`
    norms_ptr,  # [2, rows] fp32
    finite_ptr,  # [matrices] int32
    n_rows,
    row,
    BLOCK: tl.constexpr,
):
    """Largest magnitude of a row, and its norm divided by that. Clears the flag if the row is not finite."""
    factor, length, offset, _, _ = _load_row(rows_ptr, n_rows, row)
    wire_ptr += offset
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    n_bad = tl.zeros((BLOCK,), dtype=tl.int32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(wire_ptr + offs, mask=offs < length, other=0).to(tl.float32))  # [BLOCK]
        largest = tl.maximum(largest, x)
        n_bad += tl.where(x < float("inf"), 0, 1)
        start += BLOCK
    top = tl.max(largest, axis=0)
    divisor = tl.where(top > 0, top, 1.0)  # else squares would overflow or underflow
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(wire_ptr + offs, mask=offs < length, other=0).to(tl.float32) / divisor
        squares += x * x
        start += BLOCK
    tl.store(norms_ptr + row, top)
    tl.store(norms_ptr + (n_rows + row), tl.sqrt(tl.sum(squares, axis=0)))
    if tl.sum(n_bad, axis=0) > 0:
        tl.atomic_min(finite_ptr + factor, 0, sem="relaxed")  # no order needed: no fence


@kernel
def _norms_kernel(
    wire_ptr,  # packed factors, of any dtype
    rows_ptr,  # [5, rows] int64: `_rows`
    norms_ptr,  # [2, rows] fp32
    finite_ptr,  # [matrices] int32
    step_ptr,  # [1] int64: the number of the step, to advance; None: leave it
    segments_ptr,  # int64: `SegmentTable.packed` of the gradients to unpack; None: there are none
    packed_ptr,  # their part of the wire
    n_rows,
    n_segments,
    n_unpacks,
    advance_to: tl.int64,  # negative: one more than the number in memory
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """The norm of a row, or a chunk of a gradient that is not compressed."""
    program = tl.program_id(0).to(tl.int64)
    if step_ptr is not None and program == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1 if advance_to < 0 else advance_to)
    if program < n_rows:
        _norms_row(wire_ptr, rows_ptr, norms_ptr, finite_ptr, n_rows, program, BLOCK)
    if segments_ptr is not None and program >= n_rows:
        unflatten_chunk(
            segments_ptr, packed_ptr, None, n_segments, n_unpacks, program - n_rows, 1.0,
            TARGET, tl.float32, UNPACK,
        )  # fmt: skip


@jit
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


@jit
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
    factor, length, offset, first, key = _load_row(rows_ptr, n_rows, row)
    step = tl.load(step_ptr)
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


class Renewal(NamedTuple):
    """A factor to `renew` in a step that does other things in the same launches.

    Attributes:
        wire, layout, keys, step, following: as in `renew`.
        advance_to: what ``step`` is set to first; None: one more than it is, as in a CUDA graph, which repeats numbers.
    """

    wire: Tensor
    layout: FactorLayout
    keys: Sequence[int]
    step: Tensor
    following: Tensor
    advance_to: int | None


def check_renewal(wire: Tensor, layout: FactorLayout, step: Tensor, following: Tensor) -> None:
    """Raise ValueError unless the tensors fit the layout, and ``step`` is one number."""
    layout.check(wire, "wire")
    layout.check(following, "following")
    if step.dtype != torch.int64 or step.numel() != 1 or step.device != following.device:
        raise ValueError(
            f"step is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of torch.int64 on "
            f"{following.device}. Pass torch.tensor([step], device=...)."
        )


def norms_triton(
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
    """The norms of the rows to renew, and the flags of factors that are not finite: one launch.

    Args:
        wire, layout, keys, step, following, finite: as in `renew`.
        advances: whether ``step`` changes.
        advance_to: as in `Renewal`.
        unpack: gradients to copy from the wire into their targets.

    Returns:
        The arguments of `renew_row`, except the row.
    """
    rows = layout.on_device.get(("rows", tuple(keys)), following.device, lambda: _rows(layout, keys))
    n_rows, n_unpacks = rows.shape[1], 0 if unpack is None else unpack.table.n_chunks
    norms = torch.empty(2, n_rows, dtype=torch.float32, device=following.device)
    of_rows = {
        "wire_ptr": wire,
        "rows_ptr": rows,
        "norms_ptr": norms,
        "finite_ptr": finite,
        "n_rows": n_rows,
        "BLOCK": BLOCK_NUMEL,
    }
    _norms_kernel[(n_rows + n_unpacks,)](
        step_ptr=step if advances else None,
        segments_ptr=None if unpack is None else unpack.target_table.packed(unpack.target),
        packed_ptr=None if unpack is None else unpack.wire,
        n_segments=0 if unpack is None else len(unpack.table),
        n_unpacks=n_unpacks,
        advance_to=-1 if advance_to is None else advance_to,
        TARGET=None if unpack is None else triton_dtype(unpack.table.dtype),
        UNPACK=CHUNK_NUMEL,
        num_warps=NUM_WARPS,
        **of_rows,
    )
    return of_rows | {"step_ptr": step, "following_ptr": following}


def _renew_triton(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    with torch.cuda.device_of(following):
        of_rows = norms_triton(wire, layout, keys, step, following, finite)
        _renew_kernel[(of_rows["n_rows"],)](**of_rows, num_warps=NUM_WARPS)


def _renew_cpu(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    rows, targets = layout.views(wire.to(torch.float64, copy=True)), layout.views(following)
    norms = [torch.linalg.vector_norm(q, dim=1, keepdim=True) for q in rows]
    easy = []
    for i, (norm, is_finite) in enumerate(zip(norms, finite.tolist(), strict=True)):
        if not all(SAFE_NORMS[0] < of_row < SAFE_NORMS[1] for (of_row,) in norm.tolist()):
            finite[i] *= rows[i].isfinite().all()
            if finite[i]:
                _renew_carefully(rows[i], targets[i], keys[i], step)
        elif is_finite:
            easy.append(i)
    if easy:
        torch._foreach_div_([rows[i] for i in easy], [norms[i] for i in easy])
        torch._foreach_copy_([targets[i] for i in easy], [rows[i] for i in easy])


def _renew_carefully(q: Tensor, after: Tensor, key: int, step: Tensor) -> None:
    """Renew a finite factor with rows that are zero, or whose squares leave the range of fp64."""
    largest = q.abs().amax(1, keepdim=True).to(after.dtype)
    torch.div(q, torch.where(largest > 0, largest, 1), out=after)
    if not largest.all():
        rows = (largest == 0).nonzero()[:, :1]
        after[rows[:, 0]] = uniform(key, step, rows * q.shape[1] + torch.arange(q.shape[1])).to(after.dtype)
    after.div_(torch.linalg.vector_norm(after, dim=1, keepdim=True))


def renew(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """Write the unit columns of every finite factor into ``following``, and random ones where they are zero.

    Args:
        wire: the packed factors, averaged over the ranks: fp32, bf16 or fp64.
        layout: of the factors.
        keys: of the matrices' random columns.
        step: int64, one element, on the device of the factors: the number of the step, equal on all ranks. Kernels
            read it on the device, where a CUDA graph must advance it.
        following: the packed factors of the next step, fp32 or fp64. Overwritten where the flag is not 0.
        finite: int32, one element per matrix. Set to 0 where the factor is not finite.

    Raises:
        ValueError: a buffer does not fit the layout, or ``step`` is not such a tensor.
    """
    check_renewal(wire, layout, step, following)
    if use_triton(following.device) and following.dtype == torch.float32:
        _renew_triton(wire, layout, keys, step, following, finite)
    elif following.device.type == "cpu":
        _renew_cpu(wire, layout, keys, step, following, finite)
    else:
        renew_reference(wire, layout, keys, step, following, finite)


def draw(layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor) -> None:
    """Fill ``following`` with random unit columns: those that `renew` draws for zero factors."""
    zeros = torch.zeros_like(following)
    finite = torch.ones(len(keys), dtype=torch.int32, device=following.device)
    renew(zeros, layout, keys, step, following, finite)
