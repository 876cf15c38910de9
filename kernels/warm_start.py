"""Warm start: the factors that the next step projects onto, from those of this step.

    next_c = q_c / |q_c|              so that the next P has columns of the size of the gradient, whatever q's is
    next_c = a random unit vector     where q_c is zero: such a column would stay zero for ever

Random columns come from a counter-based generator, with the matrix's key, the step and the place in the factor as its
counters: equal on all ranks. A factor that is not finite leaves the next one as it was, and clears the matrix's flag.

Traffic: read r (n + m) elements a matrix twice and write them, which is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.counter_random import uniform, uniform_triton
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.matrices import Factor
from gradwire.kernels.platform import use_triton

BLOCK = 1024
# Norms whose squares are far from the ends of fp64's range; outside are only fp64 rows, zeros, and what is not finite.
SAFE = (1e-140, 1e140)


def renew_bytes(numel: int, wire: torch.dtype, following: torch.dtype) -> int:
    """Bytes that renewing ``numel`` elements of factors reads and writes: the wire twice, for norms come first."""
    return numel * (2 * wire.itemsize + following.itemsize)


def renew_reference(
    wire: Tensor, factor: Factor, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """What `renew` computes, written for reading."""
    for i, (q, after) in enumerate(zip(factor.views(wire), factor.views(following), strict=True)):
        finite[i] *= q.isfinite().all()
        drawn = uniform(keys[i], step, torch.arange(q.numel(), device=q.device).view_as(q))
        columns = torch.where((q == 0).all(1, keepdim=True), drawn.to(after.dtype), q.to(after.dtype))
        scaled = columns / columns.abs().amax(1, keepdim=True)
        unit = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        after.copy_(torch.where(finite[i] > 0, unit, after))


@kernel
def _norms_kernel(
    wire_ptr,
    norms_ptr,
    finite_ptr,
    work_ptr,
    n_rows,
    BLOCK: tl.constexpr,
):
    """Largest magnitude of one row of a factor, and its norm divided by that; clears the flag if it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(work_ptr + row)
    length = tl.load(work_ptr + n_rows + row)
    wire_ptr += tl.load(work_ptr + 2 * n_rows + row)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    n_bad = tl.zeros((BLOCK,), dtype=tl.int32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(wire_ptr + offs, mask=offs < length, other=0).to(tl.float32))
        largest = tl.maximum(largest, x)
        n_bad += tl.where(x < float("inf"), 0, 1)
        start += BLOCK
    top = tl.max(largest, axis=0)
    divisor = tl.where(top > 0, top, 1.0)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(wire_ptr + offs, mask=offs < length, other=0).to(tl.float32) / divisor
        squares += x * x
        start += BLOCK
    tl.store(norms_ptr + row, top)
    tl.store(norms_ptr + n_rows + row, tl.sqrt(tl.sum(squares, axis=0)))
    if tl.sum(n_bad, axis=0) > 0:
        tl.atomic_min(finite_ptr + factor, 0, sem="relaxed")  # no order needed: no fence


@jit
def _drawn_norm(key, step, base, length, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    start = 0
    while start < length:
        offs = start + tl.arange(0, BLOCK)
        x = tl.where(offs < length, uniform_triton(key, step, base + offs), 0.0)
        squares += x * x
        start += BLOCK
    return tl.sqrt(tl.sum(squares, axis=0))


@kernel
def _renew_kernel(
    wire_ptr,
    norms_ptr,
    following_ptr,
    finite_ptr,
    work_ptr,
    step_ptr,
    n_rows,
    BLOCK: tl.constexpr,
):
    """One row of the next factor: of unit norm, random where the row is zero."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(work_ptr + row)
    length = tl.load(work_ptr + n_rows + row)
    offset = tl.load(work_ptr + 2 * n_rows + row)
    base = tl.load(work_ptr + 3 * n_rows + row)  # of the row within its factor
    key = tl.load(work_ptr + 4 * n_rows + row)
    step = tl.load(step_ptr)  # not an argument, whose value a CUDA graph would repeat at each replay
    if tl.load(finite_ptr + factor) > 0:
        top = tl.load(norms_ptr + row)
        norm = tl.load(norms_ptr + n_rows + row)
        if top == 0:
            norm = _drawn_norm(key, step, base, length, BLOCK)
        start = 0
        while start < length:
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(wire_ptr + offset + offs, mask=offs < length, other=0).to(tl.float32)
            x = uniform_triton(key, step, base + offs) if top == 0 else x / top
            tl.store(following_ptr + offset + offs, x / norm, mask=offs < length)
            start += BLOCK


def _rows(factor: Factor, keys: Sequence[int]) -> list[list[int]]:
    """The programs: factor, length, offset of the row, its place within the factor, key."""
    programs = [
        (i, length, factor.offsets[i] + row * length, row * length, keys[i])
        for i, (rank, length) in enumerate(zip(factor.ranks, factor.lengths, strict=True))
        for row in range(rank)
    ]
    return [list(column) for column in zip(*programs, strict=True)]


def _renew_triton(
    wire: Tensor, factor: Factor, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    rows = factor.on_device.get(("rows", tuple(keys)), following.device, lambda: _rows(factor, keys))
    n_rows = rows.shape[1]
    norms = torch.empty(2, n_rows, dtype=torch.float32, device=following.device)
    common = {"wire_ptr": wire, "norms_ptr": norms, "finite_ptr": finite, "work_ptr": rows, "n_rows": n_rows}
    with torch.cuda.device_of(following):
        _norms_kernel[(n_rows,)](**common, BLOCK=BLOCK, num_warps=4)
        _renew_kernel[(n_rows,)](**common, following_ptr=following, step_ptr=step, BLOCK=BLOCK, num_warps=4)


def _renew_cpu(
    wire: Tensor, factor: Factor, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    rows, targets = factor.views(wire.to(torch.float64, copy=True)), factor.views(following)
    norms = [torch.linalg.vector_norm(q, dim=1, keepdim=True) for q in rows]
    easy = []
    for i, (norm, is_finite) in enumerate(zip(norms, finite.tolist(), strict=True)):
        if not all(SAFE[0] < of_row < SAFE[1] for (of_row,) in norm.tolist()):
            finite[i] *= rows[i].isfinite().all()
            if finite[i]:
                _renew_carefully(rows[i], targets[i], keys[i], step)
        elif is_finite:
            easy.append(i)
    if easy:
        torch._foreach_div_([rows[i] for i in easy], [norms[i] for i in easy])
        torch._foreach_copy_([targets[i] for i in easy], [rows[i] for i in easy])


def _renew_carefully(q: Tensor, after: Tensor, key: int, step: Tensor) -> None:
    """Renew one finite factor, some of whose rows are zero, or have squares that leave the range of fp64."""
    largest = q.abs().amax(1, keepdim=True).to(after.dtype)
    torch.div(q, torch.where(largest > 0, largest, 1), out=after)
    if not largest.all():
        rows = (largest == 0).nonzero()[:, :1]
        after[rows[:, 0]] = uniform(key, step, rows * q.shape[1] + torch.arange(q.shape[1])).to(after.dtype)
    after.div_(torch.linalg.vector_norm(after, dim=1, keepdim=True))


def renew(wire: Tensor, factor: Factor, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor) -> None:
    """Write the unit columns of every finite factor into ``following``, random ones where they are zero.

    Args:
        wire: the packed factors, as averaged on the wire: fp32, bf16 or fp64.
        factor: their layout.
        keys: of the matrices' random columns.
        step: int64, one element, on the device of the factors: counts the steps, equal on all ranks.
            Kernels read it on the device; a CUDA graph must advance it there.
        following: the packed factors of the next step, fp32 or fp64. Overwritten where the flag is not 0.
        finite: int32, one element a matrix. Set to 0 where the factor is not finite.

    Raises:
        ValueError: a buffer does not fit the layout, or ``step`` is no such tensor.
    """
    factor.check(wire, "wire")
    factor.check(following, "following")
    if step.dtype != torch.int64 or step.numel() != 1 or step.device != following.device:
        raise ValueError(
            f"step is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of torch.int64 on "
            f"{following.device}. Pass torch.tensor([step], device=...)."
        )
    if use_triton(following.device) and following.dtype == torch.float32:
        _renew_triton(wire, factor, keys, step, following, finite)
    elif following.device.type == "cpu":
        _renew_cpu(wire, factor, keys, step, following, finite)
    else:
        renew_reference(wire, factor, keys, step, following, finite)


def draw(factor: Factor, keys: Sequence[int], step: Tensor, following: Tensor) -> None:
    """Fill ``following`` with random unit columns, those of `renew` for zero factors."""
    zeros = torch.zeros_like(following)
    finite = torch.ones(len(keys), dtype=torch.int32, device=following.device)
    renew(zeros, factor, keys, step, following, finite)
