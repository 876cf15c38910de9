"""Flatten: gather the gradients of a bucket into one wire buffer. Unflatten: scatter the buffer back into them.

    flatten      wire[offsets[i] + j] = cast(clamp(g_i[j] * scale, -limit, limit))
    unflatten    g_i[j] = cast(wire[offsets[i] + j] * scale)
                 absmax = max(absmax, max_ij |g_i[j]|)                   optional; NaN if an element is NaN

Each operation is one launch for the whole bucket. Arithmetic is in fp32, or in fp64 if the
gradients are fp64 (for `unflatten`: if the gradients or the wire are). fp64 is rounded to fp32 on
its way to 16 bits, as in PyTorch.

A finite element saturates at ``limit``, by default the largest finite value of the wire dtype; inf and NaN pass
through. The maximum needs no float atomics: the bits of non-negative fp32 numbers, read as integers, sort like the
numbers, followed by inf and NaN.

Traffic for N elements, with s bytes per gradient element and w bytes per wire element: (s + w) N bytes each way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.dtypes import (
    WIRE_DTYPES,
    compute_dtype,
    narrow,
    narrow_reference,
    saturating_cast,
    triton_dtype,
)
from gradwire.kernels.flattening_cpu import flatten_cpu, unflatten_cpu
from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.segment_table import CHUNK_NUMEL, Fitting, SegmentTable, load_chunk, memory_order

NUM_WARPS = 8


def flatten_bytes(numel: int, source: torch.dtype, wire: torch.dtype) -> int:
    """Bytes that flattening ``numel`` elements reads and writes."""
    return numel * (source.itemsize + wire.itemsize)


def unflatten_bytes(numel: int, wire: torch.dtype, target: torch.dtype) -> int:
    """Bytes that unflattening ``numel`` elements reads and writes."""
    return numel * (wire.itemsize + target.itemsize)


def flatten_reference(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor,
    limit: float,
    counters: Tensor | None,
) -> None:
    """`flatten` in plain PyTorch, tensor by tensor."""
    for tensor, wire in zip(tensors, torch.split(out, table.lengths), strict=True):
        saturating_cast(memory_order(tensor).to(compute_dtype(tensor.dtype.to_real())), wire, scale, limit, counters)


def unflatten_reference(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    """`unflatten` in plain PyTorch, tensor by tensor."""
    compute = compute_dtype(wire.dtype, table.dtype)
    multiplier = torch.as_tensor(scale, dtype=compute, device=wire.device)
    for tensor, segment in zip(tensors, torch.split(wire, table.lengths), strict=True):
        result = memory_order(tensor)
        result.copy_(narrow_reference(segment.to(compute) * multiplier, table.dtype))
        if absmax is not None and result.numel() > 0:
            absmax.copy_(torch.maximum(absmax, result.abs().max().float()))


@jit
def _load_scale(scale_ptr, scale, COMPUTE: tl.constexpr):
    """The multiplier: read from the device if there is a pointer, else the argument."""
    if scale_ptr is not None:
        return tl.load(scale_ptr).to(COMPUTE)
    return tl.full((), scale, COMPUTE)


@jit
def _saturating_cast(
    x,  # [CHUNK]
    scale,
    limit,
    COMPUTE: tl.constexpr,
    WIRE: tl.constexpr,
):
    """Scale, saturate and cast.

    Also return a mark per element: 1 if it is not finite, 2^16 if it saturated, else 0.
    """
    x = x.to(COMPUTE)
    scaled = x * scale
    finite = tl.abs(x) < float("inf")
    above = scaled > limit
    below = scaled < -limit
    clamped = tl.where(finite & above, limit, tl.where(finite & below, -limit, scaled))
    return narrow(clamped, WIRE), tl.where(finite, tl.where(above | below, 1 << 16, 0), 1)


@jit
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
    address, offset, length, start = load_chunk(table_ptr, n_segments, n_chunks, chunk)
    source_ptr = address.to(tl.pointer_type(SOURCE)) + start  # [remaining]
    remaining = length - start
    WIRE: tl.constexpr = wire_ptr.dtype.element_ty
    # Computed as a number: as an offset from an argument below 2 GiB, AMD's compiler would lose its alignment.
    out_ptr = (wire_ptr + offset + start).to(tl.int64).to(tl.pointer_type(WIRE))  # [remaining]

    finite_limit = tl.full((), limit, COMPUTE)
    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | out_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own.
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
            # Sums need no order. The default semantics, "acq_rel", fences the memory of the whole GPU.
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


@jit
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
    address, offset, length, start = load_chunk(table_ptr, n_segments, n_chunks, chunk)
    target_ptr = address.to(tl.pointer_type(TARGET)) + start  # [remaining]
    remaining = length - start
    # Computed as a number: as an offset from an argument below 2 GiB, AMD's compiler would lose its alignment.
    source_ptr = (wire_ptr + offset + start).to(tl.int64).to(tl.pointer_type(wire_ptr.dtype.element_ty))  # [remaining]

    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own.
    if (remaining >= CHUNK) & aligned:
        y = narrow(tl.load(tl.multiple_of(source_ptr, 16) + offs).to(COMPUTE) * scale, TARGET)  # [CHUNK]
        tl.store(tl.multiple_of(target_ptr, 16) + offs, y)
    else:
        y = narrow(tl.load(source_ptr + offs, mask=mask, other=0).to(COMPUTE) * scale, TARGET)
        tl.store(target_ptr + offs, y, mask=mask)
    if absmax_ptr is not None:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # A masked element is 0 times the scale: NaN if that is inf, so it is masked off here again.
        tl.atomic_max(absmax_ptr, tl.max(tl.where(mask, bits, 0)), sem="relaxed")  # no order needed: no fence


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


def _flatten_triton(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor,
    limit: float,
    counters: Tensor | None,
) -> None:
    is_tensor = isinstance(scale, Tensor)
    with torch.cuda.device_of(out):
        _flatten_kernel[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            scale_ptr=scale if is_tensor else None,
            wire_ptr=out,
            counters_ptr=counters,
            n_segments=len(table),
            n_chunks=table.n_chunks,
            scale=1.0 if is_tensor else scale,
            limit=limit,
            SOURCE=triton_dtype(table.dtype),
            COMPUTE=triton_dtype(compute_dtype(table.dtype)),
            CHUNK=CHUNK_NUMEL,
            num_warps=NUM_WARPS,
        )


def _unflatten_triton(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    is_tensor = isinstance(scale, Tensor)
    with torch.cuda.device_of(wire):
        _unflatten_kernel[(table.n_chunks,)](
            table_ptr=table.packed(tensors),
            wire_ptr=wire,
            scale_ptr=scale if is_tensor else None,
            absmax_ptr=None if absmax is None else absmax.view(torch.int32),
            n_segments=len(table),
            n_chunks=table.n_chunks,
            scale=1.0 if is_tensor else scale,
            TARGET=triton_dtype(table.dtype),
            COMPUTE=triton_dtype(compute_dtype(wire.dtype, table.dtype)),
            CHUNK=CHUNK_NUMEL,
            num_warps=NUM_WARPS,
        )


def _check_wire_dtype(wire: Tensor) -> None:
    if wire.dtype not in WIRE_DTYPES:
        raise ValueError(f"The wire is {wire.dtype}; expected one of {', '.join(map(str, WIRE_DTYPES))}.")


def flatten(
    tensors: Sequence[Tensor],
    out: Tensor,
    *,
    table: SegmentTable | None = None,
    scale: float | Tensor = 1.0,
    limit: float | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Write ``cast(clamp(tensor * scale, -limit, limit))`` of every tensor into its segment of ``out``.

    A bucket that is flat already is a list of one tensor; ``out`` may then be that tensor itself, scaled in place.

    Args:
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, read as real pairs) on one device.
        out: the wire, 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64. Overwritten.
        table: the layout. Build it once for a list that recurs; by default it is built for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronisation.
        limit: the largest magnitude of a finite element on the wire; by default that of the wire dtype.
        counters: int64, [2]: the numbers of non-finite and of saturated elements are added.

    Returns:
        ``out``.

    Raises:
        ValueError: the tensors or ``out`` do not fit the table, or ``out`` has another dtype than those named.
    """
    _check_wire_dtype(out)
    if table is None:
        table = SegmentTable(tensors)
        tensors = Fitting(tensors, table)
    table.check(tensors, out)
    if table.numel == 0:
        return out
    largest = min(torch.finfo(out.dtype).max, torch.finfo(compute_dtype(table.dtype)).max)
    finite_limit = largest if limit is None else min(limit, largest)
    arguments = (tensors, table, out, scale, finite_limit, counters)
    if use_triton(out.device):
        _flatten_triton(*arguments)
    elif out.device.type == "cpu":
        flatten_cpu(*arguments)
    else:
        flatten_reference(*arguments)
    return out


def unflatten(
    wire: Tensor,
    tensors: Sequence[Tensor],
    *,
    table: SegmentTable | None = None,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """Write ``cast(wire * scale)`` of every segment of ``wire`` into its tensor, in place.

    Args:
        wire: 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64.
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, written as real pairs). Overwritten.
        table: the layout. Build it once for a list that recurs; by default it is built for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronisation.
        absmax: fp32, [1]: raised to the largest magnitude written, as stored; NaN if a NaN was written.

    Raises:
        ValueError: the tensors or ``wire`` do not fit the table, or ``wire`` has another dtype than those named.
    """
    _check_wire_dtype(wire)
    if table is None:
        table = SegmentTable(tensors)
        tensors = Fitting(tensors, table)
    table.check(tensors, wire)
    if table.numel == 0:
        return
    arguments = (wire, tensors, table, scale, absmax)
    if use_triton(wire.device):
        _unflatten_triton(*arguments)
    elif wire.device.type == "cpu":
        unflatten_cpu(*arguments)
    else:
        unflatten_reference(*arguments)
