"""Cases of the GPU lane for the scaled cast: flatten and unflatten with a scale in device memory, and with counters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import RANKS, Case, random_gradients
from gradwire.bench.shapes import Shape
from gradwire.kernels import (
    SegmentTable,
    flatten,
    flatten_bytes,
    flatten_reference,
    unflatten,
    unflatten_bytes,
    unflatten_reference,
)

EAGER = "eager PyTorch"
WIRE = torch.float16
LIMIT = torch.finfo(WIRE).max / 4


def scaled_flatten_case(shapes: Sequence[Sequence[Shape]], device: torch.device) -> Case:
    """Gradients into a wire of fp16, scaled and clamped; elements that saturate or are not finite are counted."""
    lists = random_gradients(shapes, device)
    tables = [SegmentTable(tensors) for tensors in lists]
    wires = [torch.full((table.numel,), torch.nan, dtype=WIRE, device=device) for table in tables]
    flats = [torch.empty(table.numel, device=device) for table in tables]
    views = [table.views(flat) for table, flat in zip(tables, flats, strict=True)]
    scale = torch.tensor([1024.0 / RANKS], device=device)[0]
    counters, eager_counters = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))

    def eager(i: int) -> Tensor:
        torch._foreach_copy_(views[i], lists[i])
        scaled = flats[i] * scale
        eager_counters[0] += (~scaled.isfinite()).sum()
        eager_counters[1] += (scaled.abs() > LIMIT).sum()
        return scaled.clamp_(-LIMIT, LIMIT).to(WIRE)

    def check() -> None:
        expected, expected_counters = torch.empty_like(wires[0]), torch.zeros_like(counters)
        flatten_reference(lists[0], tables[0], expected, scale, LIMIT, expected_counters)
        torch.testing.assert_close(wires[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(counters, expected_counters, rtol=0, atol=0)

    return Case(
        "scaled cast to float16",
        [flatten_bytes(table.numel, torch.float32, WIRE) for table in tables],
        {
            GRADWIRE: lambda i: flatten(
                lists[i], wires[i], table=tables[i], scale=scale, limit=LIMIT, counters=counters
            ),
            EAGER: eager,
        },
        check,
    )


def scaled_unflatten_case(shapes: Sequence[Sequence[Shape]], device: torch.device) -> Case:
    """A wire of fp16 into gradients, scaled back, with the largest magnitude."""
    lists = random_gradients(shapes, device)
    tables = [SegmentTable(tensors) for tensors in lists]
    wires = [torch.randn(table.numel, device=device).to(WIRE) for table in tables]
    flats = [torch.empty(table.numel, device=device) for table in tables]
    views = [table.views(flat) for table, flat in zip(tables, flats, strict=True)]
    scale = torch.tensor([1 / 1024], device=device)[0]
    absmax = torch.zeros(1, device=device)

    def eager(i: int) -> Tensor:
        torch.mul(wires[i], scale, out=flats[i])
        torch._foreach_copy_(lists[i], views[i])
        return flats[i].abs().max()

    def check() -> None:
        expected, largest = [torch.empty_like(tensor) for tensor in lists[0]], torch.zeros_like(absmax)
        unflatten_reference(wires[0], expected, tables[0], scale, largest)
        torch.testing.assert_close(lists[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(absmax, largest, rtol=0, atol=0)

    return Case(
        "scaled cast from float16",
        [unflatten_bytes(table.numel, WIRE, torch.float32) for table in tables],
        {
            GRADWIRE: lambda i: unflatten(wires[i], lists[i], table=tables[i], scale=scale, absmax=absmax),
            EAGER: eager,
        },
        check,
    )
