"""Unflatten: scatter a wire buffer back into the gradients of a bucket, scaling after the cast up.

    g_i[j] = cast(wire[offsets[i] + j] * scale)        in one launch for the whole bucket
    absmax = max(absmax, max_ij |g_i[j]|)              in the same pass, NaN if an element is NaN

Arithmetic is in fp32, or in fp64 if the wire or the gradients are. The maximum needs no float atomics: the bits of
non-negative fp32 numbers, taken as integers, order as the numbers do, with inf and then NaN on top.

Traffic for N elements: read w N, wrote s N bytes (w, s: bytes of a wire and of a gradient element).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.flattening import NUM_WARPS, WIRE_DTYPES, compute_dtype, narrow, narrow_reference, triton_dtype
from gradwire.kernels.language import kernel, tl
from gradwire.kernels.platform import use_triton
from gradwire.kernels.segments import CHUNK, SegmentTable, memory_order


def unflatten_bytes(numel: int, wire: torch.dtype, target: torch.dtype) -> int:
    """Bytes that unflattening ``numel`` elements reads and writes."""
    return numel * (wire.itemsize + target.itemsize)


def unflatten_reference(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    """What `unflatten` computes, written for reading."""
    compute = compute_dtype(wire.dtype, table.dtype)
    factor = torch.as_tensor(scale, dtype=compute, device=wire.device)
    for tensor, segment in zip(tensors, torch.split(wire, table.lengths), strict=True):
        result = memory_order(tensor)
        result.copy_(narrow_reference(segment.to(compute) * factor, table.dtype))
        if absmax is not None and result.numel() > 0:
            absmax.copy_(torch.maximum(absmax, result.abs().max().float()))


@kernel
def _unflatten_kernel(
    table_ptr,
    wire_ptr,
    scale_ptr,  # None: use `scale`
    absmax_ptr,  # the fp32 maximum as int32 bits; None: do not look for it
    scale: tl.float64,
    n_segments,
    n_chunks,
    TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    chunks_ptr = table_ptr + 3 * n_segments
    segment = tl.load(chunks_ptr + chunk)
    start = tl.load(chunks_ptr + n_chunks + chunk)
    target_ptr = tl.load(table_ptr + segment).to(tl.pointer_type(TARGET)) + start
    remaining = tl.load(table_ptr + n_segments + segment) - start
    # An address of its own: as an offset from an argument below 2 GiB, AMD's compiler would lose its alignment.
    source_ptr = wire_ptr + tl.load(table_ptr + 2 * n_segments + segment) + start
    source_ptr = source_ptr.to(tl.int64).to(tl.pointer_type(wire_ptr.dtype.element_ty))

    factor = tl.full((), scale, COMPUTE)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr).to(COMPUTE)
    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own.
    if (remaining >= CHUNK) & aligned:
        y = narrow(tl.load(tl.multiple_of(source_ptr, 16) + offs).to(COMPUTE) * factor, TARGET)
        tl.store(tl.multiple_of(target_ptr, 16) + offs, y)
    else:
        y = narrow(tl.load(source_ptr + offs, mask=mask, other=0).to(COMPUTE) * factor, TARGET)
        tl.store(target_ptr + offs, y, mask=mask)
    if absmax_ptr is not None:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(absmax_ptr, tl.max(tl.where(mask, bits, 0)), sem="relaxed")  # no order needed: no fence


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
            scale=1.0 if is_tensor else scale,
            n_segments=len(table),
            n_chunks=table.n_chunks,
            TARGET=triton_dtype(table.dtype),
            COMPUTE=triton_dtype(compute_dtype(wire.dtype, table.dtype)),
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )


def _unflatten_cpu(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    scale = float(scale)
    if scale == 1 and absmax is None:
        torch._foreach_copy_(table.real(tensors), table.views(wire))
        return
    scratch = table.scratch(compute_dtype(wire.dtype, table.dtype))
    for index, block in enumerate(table.blocks):
        pieces, views = table.pieces(index, tensors)
        x = scratch[: block.stop - block.start]
        if x.numel() == 0:
            continue
        x.copy_(wire[block.start : block.stop]).mul_(scale)
        torch._foreach_copy_(pieces, views)
        if absmax is not None:
            low, high = torch.aminmax(x)
            largest = torch.maximum(-low, high).to(table.dtype)  # rounding is monotonic: this is the rounded maximum
            absmax.copy_(torch.maximum(absmax, largest.float()))


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
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, taken as real pairs). Overwritten.
        table: the layout, built once by the caller for lists that recur; by default made for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronisation.
        absmax: fp32, one element: raised to the largest magnitude written, as stored; NaN if a NaN was written.

    Raises:
        ValueError: tensors and wire do not fit the table, or the wire has another dtype than those named.
    """
    if wire.dtype not in WIRE_DTYPES:
        raise ValueError(f"The wire is {wire.dtype}; expected one of {', '.join(map(str, WIRE_DTYPES))}.")
    table = table or SegmentTable(tensors)
    table.check(tensors, wire)
    if table.numel == 0:
        return
    arguments = (wire, tensors, table, scale, absmax)
    if use_triton(wire.device):
        _unflatten_triton(*arguments)
    elif wire.device.type == "cpu":
        _unflatten_cpu(*arguments)
    else:
        unflatten_reference(*arguments)
