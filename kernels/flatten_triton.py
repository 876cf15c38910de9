"""Flatten and unflatten in Triton: one launch for the whole bucket, a chunk of one gradient in each program."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_chunk, narrow, triton_dtype
from gradwire.kernels.flatten import LARGEST
from gradwire.kernels.layouts import compute_dtype
from gradwire.kernels.segment_table import CHUNK_NUMEL, SegmentTable

NUM_WARPS = 8


@triton.jit
def _load_scale(scale_ptr, scale, COMPUTE: tl.constexpr):
    """The multiplier: read from the device if there is a pointer, else the argument."""
    if scale_ptr is not None:
        return tl.load(scale_ptr).to(COMPUTE)
    return tl.full((), scale, COMPUTE)


@triton.jit
def _convert(
    x,  # [CHUNK]
    scale,
    limit,
    TO_WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    OUT: tl.constexpr,
):
    """The elements to store; and, TO_WIRE, 1 for each that is not finite, 2^16 for one that saturated, else 0."""
    x = x.to(COMPUTE)
    scaled = x * scale
    if TO_WIRE:
        finite = tl.abs(x) < float("inf")
        above = scaled > limit
        below = scaled < -limit
        scaled = tl.where(finite & above, limit, tl.where(finite & below, -limit, scaled))
        y = narrow(scaled, OUT)
        marks = tl.where(finite, tl.where(above | below, 1 << 16, 0), 1)
    else:
        y = narrow(scaled, OUT)
        marks = y  # not used
    return y, marks


@triton.jit
def move_chunk(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    wire_ptr,  # [numel]
    statistics_ptr,  # TO_WIRE, [2] int64: non-finite, saturated; else [1] int32: bits of the maximum. None: not wanted
    n_segments,
    n_chunks,
    chunk,
    scale,
    limit,
    TO_WIRE: tl.constexpr,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one gradient into its place in the wire (TO_WIRE), or back."""
    address, length, offset, start = load_chunk(table_ptr, n_segments, n_chunks, chunk, 3)
    WIRE: tl.constexpr = wire_ptr.dtype.element_ty
    OUT: tl.constexpr = WIRE if TO_WIRE else GRADIENT
    gradient_ptr = address.to(tl.pointer_type(GRADIENT)) + start  # [remaining]
    # Computed as an integer: AMD's compiler loses the alignment of an offset from an argument below 2 GiB.
    place_ptr = (wire_ptr + offset + start).to(tl.int64).to(tl.pointer_type(WIRE))  # [remaining]
    source_ptr = gradient_ptr if TO_WIRE else place_ptr
    out_ptr = place_ptr if TO_WIRE else gradient_ptr

    remaining = length - start
    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | out_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table makes accesses scalar, so full aligned chunks have their own branch.
    if (remaining >= CHUNK) & aligned:
        x = tl.load(tl.multiple_of(source_ptr, 16) + offs)  # [CHUNK]
        y, marks = _convert(x, scale, limit, TO_WIRE, COMPUTE, OUT)
        tl.store(tl.multiple_of(out_ptr, 16) + offs, y)
    else:
        x = tl.load(source_ptr + offs, mask=mask, other=0)
        y, marks = _convert(x, scale, limit, TO_WIRE, COMPUTE, OUT)
        tl.store(out_ptr + offs, y, mask=mask)
    # The order of atomics does not matter. The default, "acq_rel", would fence the memory of the whole GPU.
    if statistics_ptr is not None and TO_WIRE:
        # One sum for both counts: a chunk has fewer than 2^16 elements, and the masked ones, 0, are not marked.
        marked = tl.sum(marks)
        if marked > 0:
            tl.atomic_add(statistics_ptr, (marked & 0xFFFF).to(tl.int64), sem="relaxed")
            tl.atomic_add(statistics_ptr + 1, (marked >> 16).to(tl.int64), sem="relaxed")
    elif statistics_ptr is not None:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # A masked element is 0 times the scale: NaN if that is inf, so it is masked off here again.
        tl.atomic_max(statistics_ptr, tl.max(tl.where(mask, bits, 0)), sem="relaxed")


@kernel
def _flatten_kernel(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    scale_ptr,  # [1] fp32; None: use `scale`
    wire_ptr,  # [numel]
    statistics_ptr,  # [2] int64: non-finite, saturated; None: do not count
    n_segments,
    n_chunks,
    scale: tl.float64,
    limit: tl.float64,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one gradient."""
    chunk = tl.program_id(0).to(tl.int64)
    multiplier = _load_scale(scale_ptr, scale, COMPUTE)
    limit = tl.full((), limit, COMPUTE)
    move_chunk(
        table_ptr, wire_ptr, statistics_ptr, n_segments, n_chunks, chunk, multiplier, limit,
        True, GRADIENT, COMPUTE, CHUNK,
    )  # fmt: skip


@kernel
def _unflatten_kernel(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    scale_ptr,  # [1] fp32; None: use `scale`
    wire_ptr,  # [numel]
    statistics_ptr,  # [1] int32: the bits of the fp32 maximum; None: do not look for it
    n_segments,
    n_chunks,
    scale: tl.float64,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of the wire."""
    chunk = tl.program_id(0).to(tl.int64)
    multiplier = _load_scale(scale_ptr, scale, COMPUTE)
    move_chunk(
        table_ptr, wire_ptr, statistics_ptr, n_segments, n_chunks, chunk, multiplier, None,
        False, GRADIENT, COMPUTE, CHUNK,
    )  # fmt: skip


def _launch(
    launched: Any,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    wire: Tensor,
    scale: float | Tensor,
    compute: torch.dtype,
    statistics: Tensor | None,
    **arguments: Any,
) -> None:
    """Launch a kernel with a program for each chunk of the bucket."""
    if table.n_chunks == 0:
        return
    is_tensor = isinstance(scale, Tensor)
    with torch.cuda.device_of(wire):
        launched[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            scale_ptr=scale if is_tensor else None,
            wire_ptr=wire,
            statistics_ptr=statistics,
            n_segments=len(table.lengths),
            n_chunks=table.n_chunks,
            scale=1.0 if is_tensor else scale,
            GRADIENT=triton_dtype(table.dtype),
            COMPUTE=triton_dtype(compute),
            CHUNK=CHUNK_NUMEL,
            num_warps=NUM_WARPS,
            **arguments,
        )


def flatten_triton(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> None:
    """`flatten` in one launch."""
    limit = min(limit, LARGEST[out.dtype], LARGEST[table.compute])
    _launch(_flatten_kernel, tensors, table, out, scale, table.compute, counters, limit=limit)


def unflatten_triton(
    wire: Tensor,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """`unflatten` in one launch."""
    bits = None if absmax is None else absmax.view(torch.int32)
    _launch(_unflatten_kernel, tensors, table, wire, scale, compute_dtype(wire.dtype, table.dtype), bits)
