"""Flatten and unflatten on CPUs: block by block, so that the scratch of each block stays in cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dtypes import compute_dtype, saturating_cast
from gradwire.kernels.segment_table import SegmentTable, memory_order


def flatten_cpu(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor,
    limit: float,
    counters: Tensor | None,
) -> None:
    """`flatten` on a CPU. The limit is one that the wire and the arithmetic can represent."""
    scale = float(scale)
    if table.dtype == out.dtype and counters is None and abs(scale) <= 1 and limit >= torch.finfo(out.dtype).max:
        _scale(tensors, table, out, scale)
        return
    scratch = table.scratch(compute_dtype(table.dtype))
    multiplier = torch.tensor(scale, dtype=scratch.dtype, device=scratch.device)  # made once, not in each `mul`
    for index, block in enumerate(table.blocks):
        pieces, views = table.pieces(index, tensors)
        x = scratch[: block.stop - block.start]
        if x.numel() == 0:
            continue
        if block.is_piece and table.dtype == scratch.dtype:
            torch.mul(pieces[0], multiplier, out=x)
        else:
            torch._foreach_copy_(views, pieces)
            x.mul_(multiplier)
        wire = out[block.start : block.stop]
        if _all_within(x, limit):
            wire.copy_(x if x.dtype == wire.dtype else x.float())
        else:
            torch._foreach_copy_(views, pieces)
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
    for block in table.blocks:
        if not block.is_piece:
            torch._foreach_copy_(views[block.first : block.last], table.real(tensors[block.first : block.last]))
            out[block.start : block.stop].mul_(scale)
        elif block.start == table.offsets[block.first]:  # the first piece: all pieces of the tensor at once
            stop = block.start + table.lengths[block.first]
            torch.mul(memory_order(tensors[block.first]), scale, out=out[block.start : stop])


def unflatten_cpu(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    """`unflatten` on a CPU."""
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
            # Rounding is monotonic, so this is the maximum of the rounded elements.
            largest = torch.maximum(-low, high).to(table.dtype)
            absmax.copy_(torch.maximum(absmax, largest.float()))
