"""Flatten: gather the gradients of a bucket into one wire buffer, scaling before the cast.

    wire[offsets[i] + j] = cast(clamp(g_i[j] * scale, -limit, limit))        in one launch for the whole bucket

A finite element saturates at ``limit`` (the wire type's largest finite value); inf and NaN pass through.
Arithmetic is in fp32, or in fp64 for fp64 gradients; fp64 reaches a 16-bit wire by way of fp32, as in PyTorch.

Traffic for N elements: read s N, wrote w N bytes (s, w: bytes of a source and of a wire element).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.language import jit, kernel, tl
from gradwire.kernels.platform import use_triton
from gradwire.kernels.segments import CHUNK, SegmentTable, memory_order

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NUM_WARPS = 8


def flatten_bytes(numel: int, source: torch.dtype, wire: torch.dtype) -> int:
    """Bytes that flattening ``numel`` elements reads and writes."""
    return numel * (source.itemsize + wire.itemsize)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic between these dtypes: fp64 if one of them is, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def flatten_reference(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor,
    limit: float,
    counters: Tensor | None,
) -> None:
    """What `flatten` computes, written for reading."""
    for tensor, wire in zip(tensors, torch.split(out, table.lengths), strict=True):
        _saturating_cast(memory_order(tensor).to(compute_dtype(tensor.dtype.to_real())), wire, scale, limit, counters)


def _saturating_cast(x: Tensor, out: Tensor, scale: float | Tensor, limit: float, counters: Tensor | None) -> None:
    scaled = x * torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    finite = x.isfinite()
    clamped = torch.where(finite, scaled.clamp(-limit, limit), scaled)
    out.copy_(narrow_reference(clamped, out.dtype))
    if counters is not None:
        counters[0] += (~finite).sum()
        counters[1] += (finite & (scaled.abs() > limit)).sum()


def narrow_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast from the dtype of the arithmetic, fp64 by way of fp32, as PyTorch casts fp64 to 16 bit."""
    return x if dtype == torch.float64 else x.to(torch.float32).to(dtype)


@jit
def narrow(x, DTYPE: tl.constexpr):
    """`narrow_reference` in Triton."""
    if DTYPE == tl.float64:
        return x
    return x.to(tl.float32).to(DTYPE)


@jit
def _flatten_block(x, finite_limit, scale, COMPUTE: tl.constexpr, WIRE: tl.constexpr):
    """Scale, saturate and cast one block; also 1 for each non-finite element and 2^16 for each saturated one."""
    x = x.to(COMPUTE)
    scaled = x * scale
    finite = tl.abs(x) < float("inf")
    above = scaled > finite_limit
    below = scaled < -finite_limit
    clamped = tl.where(finite & above, finite_limit, tl.where(finite & below, -finite_limit, scaled))
    return narrow(clamped, WIRE), tl.where(finite, tl.where(above | below, 1 << 16, 0), 1)


@kernel
def _flatten_kernel(
    table_ptr,
    out_ptr,
    scale_ptr,  # None: use `scale`
    counters_ptr,  # None: do not count
    scale: tl.float64,
    limit: tl.float64,
    n_segments,
    n_chunks,
    SOURCE: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    chunks_ptr = table_ptr + 3 * n_segments
    segment = tl.load(chunks_ptr + chunk)
    start = tl.load(chunks_ptr + n_chunks + chunk)
    source_ptr = tl.load(table_ptr + segment).to(tl.pointer_type(SOURCE)) + start
    remaining = tl.load(table_ptr + n_segments + segment) - start
    WIRE: tl.constexpr = out_ptr.dtype.element_ty
    # An address of its own: as an offset from an argument below 2 GiB, AMD's compiler would lose its alignment.
    wire_ptr = out_ptr + tl.load(table_ptr + 2 * n_segments + segment) + start
    wire_ptr = wire_ptr.to(tl.int64).to(tl.pointer_type(WIRE))

    factor = tl.full((), scale, COMPUTE)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr).to(COMPUTE)
    finite_limit = tl.full((), limit, COMPUTE)
    offs = tl.arange(0, CHUNK)
    mask = offs < remaining
    aligned = (source_ptr.to(tl.int64) | wire_ptr.to(tl.int64)) % 16 == 0
    # A mask that depends on the table keeps accesses scalar, so a full aligned chunk has a branch of its own.
    if (remaining >= CHUNK) & aligned:
        x = tl.load(tl.multiple_of(source_ptr, 16) + offs)
        y, marks = _flatten_block(x, finite_limit, factor, COMPUTE, WIRE)
        tl.store(tl.multiple_of(wire_ptr, 16) + offs, y)
    else:
        x = tl.load(source_ptr + offs, mask=mask, other=0)
        y, marks = _flatten_block(x, finite_limit, factor, COMPUTE, WIRE)
        tl.store(wire_ptr + offs, y, mask=mask)
    if counters_ptr is not None:
        marked = tl.sum(marks)  # both counts at once: a chunk has fewer than 2^16 elements, and those masked off are 0
        if marked > 0:
            # Sums need no order. The default, "acq_rel", fences the memory of the whole GPU.
            tl.atomic_add(counters_ptr, (marked & 0xFFFF).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters_ptr + 1, (marked >> 16).to(tl.int64), sem="relaxed")


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
            out_ptr=out,
            scale_ptr=scale if is_tensor else None,
            counters_ptr=counters,
            scale=1.0 if is_tensor else scale,
            limit=limit,
            n_segments=len(table),
            n_chunks=table.n_chunks,
            SOURCE=triton_dtype(table.dtype),
            COMPUTE=triton_dtype(compute_dtype(table.dtype)),
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )


def triton_dtype(dtype: torch.dtype) -> object:
    """The Triton type of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def _flatten_cpu(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor,
    limit: float,
    counters: Tensor | None,
) -> None:
    scale = float(scale)
    if table.dtype == out.dtype and counters is None and abs(scale) <= 1 and limit >= torch.finfo(out.dtype).max:
        _scale_cpu(tensors, table, out, scale)
        return
    scratch = table.scratch(compute_dtype(table.dtype))
    factor = torch.tensor(scale, dtype=scratch.dtype, device=scratch.device)  # a number would become one in each call
    for index, block in enumerate(table.blocks):
        pieces, views = table.pieces(index, tensors)
        x = scratch[: block.stop - block.start]
        if x.numel() == 0:
            continue
        if block.is_piece and table.dtype == scratch.dtype:
            torch.mul(pieces[0], factor, out=x)
        else:
            torch._foreach_copy_(views, pieces)
            x.mul_(factor)
        wire = out[block.start : block.stop]
        if _all_within(x, limit):
            wire.copy_(x if x.dtype == wire.dtype else x.float())
        else:
            torch._foreach_copy_(views, pieces)
            _saturating_cast(x, wire, scale, limit, counters)


def _all_within(x: Tensor, limit: float) -> bool:
    """Whether all of ``x`` is finite and within ``limit``."""
    # The sum of squares bounds the largest at a third of the cost of looking for it, unless squares underflow.
    if limit > 1e-15 and torch.dot(x, x).item() < 0.5 * limit * limit:
        return True
    low, high = torch.aminmax(x)
    return -limit <= low.item() and high.item() <= limit


def _scale_cpu(tensors: Sequence[Tensor], table: SegmentTable, out: Tensor, scale: float) -> None:
    """`flatten` to the tensors' own dtype where nothing can saturate: large ones in one pass, small ones together."""
    views = table.views(out)
    for block in table.blocks:
        if not block.is_piece:
            torch._foreach_copy_(views[block.first : block.last], table.real(tensors[block.first : block.last]))
            out[block.start : block.stop].mul_(scale)
        elif block.start == table.offsets[block.first]:  # all pieces at once
            stop = block.start + table.lengths[block.first]
            torch.mul(memory_order(tensors[block.first]), scale, out=out[block.start : stop])


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

    A bucket that is flat already is a list of one tensor; ``out`` may then be that tensor itself (scaling in place).

    Args:
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, taken as real pairs) on one device.
        out: the wire, 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64. Overwritten.
        table: the layout, built once by the caller for lists that recur; by default made for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronisation.
        limit: largest magnitude that a finite element may have on the wire; the wire type's largest by default.
        counters: int64, two elements: the numbers of non-finite and of saturated elements are added to them.

    Returns:
        ``out``.

    Raises:
        ValueError: tensors and ``out`` do not fit the table, or ``out`` has another dtype than those named.
    """
    if out.dtype not in WIRE_DTYPES:
        raise ValueError(f"The wire is {out.dtype}; expected one of {', '.join(map(str, WIRE_DTYPES))}.")
    table = table or SegmentTable(tensors)
    table.check(tensors, out)
    if table.numel == 0:
        return out
    largest = min(torch.finfo(out.dtype).max, torch.finfo(compute_dtype(table.dtype)).max)
    finite_limit = largest if limit is None else min(limit, largest)
    arguments = (tensors, table, out, scale, finite_limit, counters)
    if use_triton(out.device):
        _flatten_triton(*arguments)
    elif out.device.type == "cpu":
        _flatten_cpu(*arguments)
    else:
        flatten_reference(*arguments)
    return out
