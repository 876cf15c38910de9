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
def _saturating_cast(
    x,  # [CHUNK]
    scale,
    limit,
    COMPUTE: tl.constexpr,
    WIRE: tl.constexpr,
):
    """The wire elements, and a mark for each: 1 if it is not finite, 2^16 if it saturated, else 0."""
    x = x.to(COMPUTE)
    scaled = x * scale
    finite = tl.abs(x) < float("inf")
    above = scaled > limit
    below = scaled < -limit
    clamped = tl.where(finite & above, limit, tl.where(finite & below, -limit, scaled))
    return narrow(clamped, WIRE), tl.where(finite, tl.where(above | below, 1 << 16, 0), 1)


@triton.jit
def flatten_chunk(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    wire_ptr,  # [numel]
    counters_ptr,  # [2] int64: non-finite, saturated; None: do not count
    n_segments,
    n_chunks,
    chunk,
    scale,
    limit,
    SOURCE: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one gradient into its place in the wire."""
    address, length, offset, start = load_chunk(table_ptr, n_segments, n_chunks, chunk, 3)
    source_ptr = address.to(tl.pointer_type(SOURCE)) + start  # [remaining]
    remaining = length - start
    WIRE: tl.constexpr = wire_ptr.dtype.element_ty
    # Computed as an integer: AMD's compiler loses the alignment of an offset from an argument below 2 GiB.
    out_ptr = (wire_ptr + offset + start).to(tl.int64).to(tl.pointer_type(WIRE))  # [remaining]

    finite_limit = tl.full((), limit, COMPUTE)
    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | out_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table makes accesses scalar, so full aligned chunks have their own branch.
    if (remaining >= CHUNK) & aligned:
        x = tl.load(tl.multiple_of(source_ptr, 16) + offs)  # [CHUNK]
        y, marks = _saturating_cast(x, scale, finite_limit, COMPUTE, WIRE)
        tl.store(tl.multiple_of(out_ptr, 16) + offs, y)
    else:
        x = tl.load(source_ptr + offs, mask=mask, other=0)
        y, marks = _saturating_cast(x, scale, finite_limit, COMPUTE, WIRE)
        tl.store(out_ptr + offs, y, mask=mask)
    if counters_ptr is not None:
        # One sum for both counts: a chunk has fewer than 2^16 elements, and the masked ones, 0, are not marked.
        marked = tl.sum(marks)
        if marked > 0:
            # The order of additions does not matter. The default, "acq_rel", would fence the memory of the whole GPU.
            tl.atomic_add(counters_ptr, (marked & 0xFFFF).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters_ptr + 1, (marked >> 16).to(tl.int64), sem="relaxed")


@kernel
def _flatten_kernel(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    scale_ptr,  # [1] fp32; None: use `scale`
    wire_ptr,  # [numel]
    counters_ptr,  # [2] int64: non-finite, saturated; None: do not count
    n_segments,
    n_chunks,
    scale: tl.float64,
    limit: tl.float64,
    SOURCE: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one gradient."""
    chunk = tl.program_id(0).to(tl.int64)
    multiplier = _load_scale(scale_ptr, scale, COMPUTE)
    flatten_chunk(
        table_ptr, wire_ptr, counters_ptr, n_segments, n_chunks, chunk, multiplier, limit, SOURCE, COMPUTE, CHUNK
    )


@triton.jit
def unflatten_chunk(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    wire_ptr,  # [numel]
    absmax_ptr,  # [1] int32: the bits of the fp32 maximum; None: do not look for it
    n_segments,
    n_chunks,
    chunk,
    scale,
    TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of the wire into its gradient."""
    address, length, offset, start = load_chunk(table_ptr, n_segments, n_chunks, chunk, 3)
    target_ptr = address.to(tl.pointer_type(TARGET)) + start  # [remaining]
    remaining = length - start
    # Computed as an integer: AMD's compiler loses the alignment of an offset from an argument below 2 GiB.
    source_ptr = (wire_ptr + offset + start).to(tl.int64).to(tl.pointer_type(wire_ptr.dtype.element_ty))  # [remaining]

    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table makes accesses scalar, so full aligned chunks have their own branch.
    if (remaining >= CHUNK) & aligned:
        y = narrow(tl.load(tl.multiple_of(source_ptr, 16) + offs).to(COMPUTE) * scale, TARGET)  # [CHUNK]
        tl.store(tl.multiple_of(target_ptr, 16) + offs, y)
    else:
        y = narrow(tl.load(source_ptr + offs, mask=mask, other=0).to(COMPUTE) * scale, TARGET)
        tl.store(target_ptr + offs, y, mask=mask)
    if absmax_ptr is not None:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # A masked element is 0 times the scale: NaN if that is inf, so it is masked off here again.
        tl.atomic_max(absmax_ptr, tl.max(tl.where(mask, bits, 0)), sem="relaxed")  # order does not matter: no fence


@kernel
def _unflatten_kernel(
    table_ptr,  # [3 S + 2 C] int64: `SegmentTable.packed`
    wire_ptr,  # [numel]
    scale_ptr,  # [1] fp32; None: use `scale`
    absmax_ptr,  # [1] int32: the bits of the fp32 maximum; None: do not look for it
    n_segments,
    n_chunks,
    scale: tl.float64,
    TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of the wire."""
    chunk = tl.program_id(0).to(tl.int64)
    multiplier = _load_scale(scale_ptr, scale, COMPUTE)
    unflatten_chunk(table_ptr, wire_ptr, absmax_ptr, n_segments, n_chunks, chunk, multiplier, TARGET, COMPUTE, CHUNK)


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    wire: Tensor,
    scale: float | Tensor,
    compute: torch.dtype,
    **arguments: Any,
) -> None:
    """Launch a kernel with a program for each chunk of the bucket."""
    if table.n_chunks == 0:
        return
    is_tensor = isinstance(scale, Tensor)
    with torch.cuda.device_of(wire):
        kernel[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            wire_ptr=wire,
            scale_ptr=scale if is_tensor else None,
            n_segments=len(table.lengths),
            n_chunks=table.n_chunks,
            scale=1.0 if is_tensor else scale,
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
    limit, source = min(limit, LARGEST[out.dtype], LARGEST[table.compute]), triton_dtype(table.dtype)
    arguments = {"counters_ptr": counters, "limit": limit, "SOURCE": source}
    _launch(_flatten_kernel, tensors, table, out, scale, table.compute, **arguments)


def unflatten_triton(
    wire: Tensor,
    tensors: Sequence[Tensor],
    table: SegmentTable,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """`unflatten` in one launch."""
    compute, target = compute_dtype(wire.dtype, table.dtype), triton_dtype(table.dtype)
    bits = None if absmax is None else absmax.view(torch.int32)
    _launch(_unflatten_kernel, tensors, table, wire, scale, compute, absmax_ptr=bits, TARGET=target)
