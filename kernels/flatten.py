"""Flatten and unflatten: the gradients of a bucket <-> one flat wire buffer, with scale, saturation and cast.

    flatten      wire[offsets[i] + j] = cast(clamp(g_i[j] * scale, -limit, limit))
    unflatten    g_i[j] = cast(wire[offsets[i] + j] * scale)
                 absmax = max(absmax, max_ij |g_i[j]|)                   optional; NaN if an element is NaN

Each operation is one launch for the whole bucket. Arithmetic is in fp32, or in fp64 if the
gradients are fp64 (for `unflatten`: if the gradients or the wire are). fp64 is rounded to fp32 on
its way to 16 bits, as in PyTorch.

Finite elements are clamped to min(limit, the wire dtype's maximum); inf and NaN pass through. The maximum needs no
float atomics: the bits of non-negative fp32 numbers, read as integers, sort like the numbers, followed by inf and NaN.

Traffic for N elements, with s bytes per gradient element and w bytes per wire element: (s + w) N bytes each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.layouts import WIRE_DTYPES, compute_dtype, memory_order
from gradwire.kernels.segment_table import Run, SegmentTable

LARGEST = {dtype: torch.finfo(dtype).max for dtype in WIRE_DTYPES}


def flatten_reference(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> None:
    """Write ``cast(clamp(tensor * scale, -limit, limit))`` of every tensor into its segment of ``out``.

    A bucket that is flat already is a list of one tensor; ``out`` may then be that tensor itself, scaled in place.

    Args:
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, read as real pairs) on one device.
        table: their layout.
        out: the wire, 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64. Overwritten.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronization.
        limit: the largest magnitude of a finite element on the wire, unless that of the wire dtype is lower.
        counters: int64, [2]: the numbers of non-finite and of saturated elements are added.
    """
    limit = min(limit, LARGEST[out.dtype], LARGEST[table.compute])
    for tensor, wire in zip(tensors, torch.split(out, table.lengths), strict=True):
        saturating_cast(memory_order(tensor).to(table.compute), wire, scale, limit, counters)


def unflatten_reference(
    wire: Tensor,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """Write ``cast(wire * scale)`` of every segment of ``wire`` into its tensor, in place.

    Args:
        wire: 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64.
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, written as real pairs). Overwritten.
        table: their layout.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronization.
        absmax: fp32, [1]: raised to the largest magnitude written, as stored; NaN if a NaN was written.
    """
    compute = compute_dtype(wire.dtype, table.dtype)
    multiplier = torch.as_tensor(scale, dtype=compute, device=wire.device)
    for tensor, segment in zip(tensors, torch.split(wire, table.lengths), strict=True):
        result = memory_order(tensor)
        result.copy_(narrow_reference(segment.to(compute) * multiplier, table.dtype))
        if absmax is not None and result.numel() > 0:
            absmax.copy_(torch.maximum(absmax, result.abs().max().float()))


def saturating_cast(x: Tensor, out: Tensor, scale: float | Tensor, limit: float, counters: Tensor | None) -> None:
    """``out = cast(clamp(x * scale, -limit, limit))``, where inf and NaN pass through; see `flatten_reference`."""
    scaled = x * torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    is_finite = x.isfinite()
    clamped = torch.where(is_finite, scaled.clamp(-limit, limit), scaled)
    out.copy_(narrow_reference(clamped, out.dtype))
    if counters is not None:
        counters[0] += (~is_finite).sum()
        counters[1] += (is_finite & (scaled.abs() > limit)).sum()


def narrow_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast from the dtype of the arithmetic. fp64 is rounded to fp32 on its way to 16 bits, as in PyTorch."""
    return x if dtype == torch.float64 else x.to(torch.float32).to(dtype)


def _scratch(table: SegmentTable, dtype: torch.dtype) -> list[tuple[Run, Tensor, list[Tensor]]]:
    """For each run, uninitialized memory in ``dtype``, 1-D, and its views: in the shapes of the run's
    tensors, or for a slice the memory itself.
    """
    # Kept: for many small tensors, views cost more than the copies.
    if table.scratch[0] != dtype:
        longest = max((run.stop - run.start for run in table.runs), default=0)
        memory = torch.empty(longest, dtype=dtype, device=table.device)
        scratch = []
        for run in table.runs:
            x = memory[: run.stop - run.start]
            whole = range(run.first, 0 if run.is_slice else run.last)
            views = [table.view(i, memory, table.offsets[i] - run.start) for i in whole]
            scratch.append((run, x, views or [x]))
        table.scratch = (dtype, scratch)
    return table.scratch[1]


def _run_slice(table: SegmentTable, run: Run, tensor: Tensor) -> Tensor:
    """The part of its tensor that ``run`` is, 1-D."""
    begin = run.start - table.offsets[run.first]
    return memory_order(tensor)[begin : begin + run.stop - run.start]


def flatten_cpu(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> None:
    """`flatten` on a CPU."""
    if table.is_complex:
        tensors = table.real(tensors)
    scale, limit = float(scale), min(limit, LARGEST[out.dtype], LARGEST[table.compute])
    # Finite elements that do not grow, in their own dtype, cannot saturate: no need to look at them.
    if table.dtype == out.dtype and counters is None and abs(scale) <= 1 and limit == LARGEST[out.dtype]:
        _scale(tensors, table, out, scale)
        return
    multiplier = torch.tensor(scale, dtype=table.compute, device=out.device)  # made once, not in each `mul`
    for run, x, views in _scratch(table, table.compute):
        members = [_run_slice(table, run, tensors[run.first])] if run.is_slice else list(tensors[run.first : run.last])
        if run.is_slice and table.dtype == table.compute:  # one pass less
            torch.mul(members[0], multiplier, out=x)
        else:
            torch._foreach_copy_(views, members)
            x.mul_(multiplier)
        wire = out[run.start : run.stop]
        # Optimistic: saturation is rare, and its exact treatment takes several more passes.
        if _all_within(x, limit):
            wire.copy_(x if x.dtype == wire.dtype else x.float())
        else:
            torch._foreach_copy_(views, members)
            saturating_cast(x, wire, scale, limit, counters)


def _all_within(x: Tensor, limit: float) -> bool:
    """Whether all of ``x`` is finite and within ``limit``."""
    # The sum of squares bounds the largest magnitude at a third of the cost of finding it, unless squares underflow.
    if limit > 1e-15 and torch.dot(x, x).item() < 0.5 * limit * limit:
        return True
    low, high = torch.aminmax(x)
    return -limit <= low.item() and high.item() <= limit


def _scale(tensors: Sequence[Tensor], table: SegmentTable, out: Tensor, scale: float) -> None:
    """`flatten` to the tensors' own dtype where nothing can saturate: large ones in one pass, small ones together."""
    views = table.views(out)
    for run in table.runs:
        if not run.is_slice:
            torch._foreach_copy_(views[run.first : run.last], list(tensors[run.first : run.last]))
            out[run.start : run.stop].mul_(scale)
        elif run.start == table.offsets[run.first]:  # the first slice: all slices of the tensor at once
            stop = run.start + table.lengths[run.first]
            torch.mul(memory_order(tensors[run.first]), scale, out=out[run.start : stop])


def unflatten_cpu(
    wire: Tensor,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """`unflatten` on a CPU."""
    if table.is_complex:
        tensors = table.real(tensors)
    scale = float(scale)
    if scale == 1 and absmax is None:  # a copy casts by itself
        torch._foreach_copy_(list(tensors), table.views(wire))
        return
    for run, x, views in _scratch(table, compute_dtype(wire.dtype, table.dtype)):
        x.copy_(wire[run.start : run.stop]).mul_(scale)
        members = [_run_slice(table, run, tensors[run.first])] if run.is_slice else list(tensors[run.first : run.last])
        torch._foreach_copy_(members, views)
        if absmax is not None:
            low, high = torch.aminmax(x)
            # Rounding is monotonic, so this is the maximum of the rounded elements.
            largest = torch.maximum(-low, high).to(table.dtype)
            absmax.copy_(torch.maximum(absmax, largest.float()))


class FlattenKernels(NamedTuple):
    """The operations on one device, with the arguments of `flatten_reference` and `unflatten_reference`."""

    flatten: Callable[..., None]
    unflatten: Callable[..., None]


def flatten_kernels(table: SegmentTable) -> FlattenKernels:
    """The operations for tensors of a table, chosen at its first use."""
    if table.kernels is None:
        table.kernels = _bound(table.device)
    bound: FlattenKernels = table.kernels
    return bound


def _bound(device: torch.device) -> FlattenKernels:
    if use_triton(device):
        launchers: Any = import_module("gradwire.kernels.flatten_triton")
        return FlattenKernels(launchers.flatten_triton, launchers.unflatten_triton)
    if device.type == "cpu":
        return FlattenKernels(flatten_cpu, unflatten_cpu)
    return FlattenKernels(flatten_reference, unflatten_reference)
