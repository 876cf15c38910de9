"""Cases of `gradwire bench kernels` for quantisation: both shots of a bucket, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import RANKS, Case, random_gradients
from gradwire.bench.shapes import Shape
from gradwire.kernels import (
    WIRE_FORMATS,
    BlockTable,
    MessageLayout,
    Section,
    commit_errors,
    commit_errors_bytes,
    commit_errors_reference,
    dequantize,
    dequantize_bytes,
    dequantize_reference,
    quantize,
    quantize_bytes,
    quantize_reference,
    reduce_quantized,
    reduce_quantized_bytes,
    reduce_quantized_reference,
)

BLOCK_SIZE = 64
EAGER = "eager PyTorch"


class _Buckets:
    """Gradients, messages and error memories of the buckets of a model, all of them in one wire format."""

    def __init__(self, shapes: Sequence[Sequence[Shape]], device: torch.device, wire: str) -> None:
        self.gradients = random_gradients(shapes, device)
        tables = [BlockTable(tensors, BLOCK_SIZE, [0] * len(tensors)) for tensors in self.gradients]
        self.layouts = [MessageLayout([(WIRE_FORMATS[wire], table)], RANKS) for table in tables]
        self.numels = [table.numel for table in tables]
        self.errors = [torch.zeros(table.numel, device=device) for table in tables]
        for table, errors in zip(tables, self.errors, strict=True):
            for view in table.error_views(errors):  # blocks may lack elements, which have no errors
                view.normal_(std=0.01)
        self.pending = [torch.full_like(errors, torch.nan) for errors in self.errors]
        self.messages = [torch.zeros(layout.message_shape, dtype=torch.uint8, device=device) for layout in self.layouts]
        for i, tensors in enumerate(self.gradients):  # codes of gradients, for the kernels that decode
            quantize(tensors, self.section(i), self.messages[i], scale=1 / RANKS)

    def section(self, i: int) -> Section:
        """The only section of a bucket's message."""
        return self.layouts[i].sections[0]


def quantize_case(shapes: Sequence[Sequence[Shape]], device: torch.device, wire: str) -> Case:
    """Gradients and errors into a message."""
    buckets = _Buckets(shapes, device, wire)
    messages = [torch.zeros_like(message) for message in buckets.messages]

    def options(i: int) -> dict[str, object]:
        return {"scale": 1 / RANKS, "errors": buckets.errors[i], "pending": buckets.pending[i], "rounding": None}

    def check() -> None:
        expected, pending = torch.zeros_like(messages[0]), torch.empty_like(buckets.pending[0])
        arguments = options(0) | {"pending": pending}
        quantize_reference(buckets.gradients[0], buckets.section(0), expected, **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(messages[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(buckets.pending[0], pending, rtol=0, atol=0)

    def call(function: object, i: int) -> None:
        function(buckets.gradients[i], buckets.section(i), messages[i], **options(i))  # type: ignore[operator]

    return Case(
        f"quantize to {wire}",
        [
            round(quantize_bytes(numel, torch.float32, WIRE_FORMATS[wire], BLOCK_SIZE, torch.float32))
            for numel in buckets.numels
        ],
        {GRADWIRE: lambda i: call(quantize, i), EAGER: lambda i: call(quantize_reference, i)},
        check,
    )


def reduce_case(shapes: Sequence[Sequence[Shape]], device: torch.device, wire: str) -> Case:
    """The first rank's shards of all ranks' messages into their sum."""
    buckets = _Buckets(shapes, device, wire)
    numels = [layout.shard_numel(layout.sections[0]) for layout in buckets.layouts]
    errors = [0.01 * torch.randn(numel, device=device) for numel in numels]
    pending = [torch.full_like(each, torch.nan) for each in errors]
    results = [torch.zeros(layout.result_shape, dtype=torch.uint8, device=device) for layout in buckets.layouts]

    def call(function: object, i: int, result: Tensor, after: Tensor) -> None:
        options = {"rank": 0, "errors": errors[i], "pending": after, "rounding": None}
        function(buckets.messages[i], buckets.section(i), result, **options)  # type: ignore[operator]

    def check() -> None:
        expected, after = torch.zeros_like(results[0]), torch.empty_like(pending[0])
        call(reduce_quantized_reference, 0, expected, after)
        torch.testing.assert_close(results[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(pending[0], after, rtol=0, atol=0)

    return Case(
        f"sum of {RANKS} ranks in {wire}",
        [
            round(reduce_quantized_bytes(numel, RANKS, WIRE_FORMATS[wire], BLOCK_SIZE, torch.float32))
            for numel in numels
        ],
        {
            GRADWIRE: lambda i: call(reduce_quantized, i, results[i], pending[i]),
            EAGER: lambda i: call(reduce_quantized_reference, i, results[i], pending[i]),
        },
        check,
    )


def dequantize_case(shapes: Sequence[Sequence[Shape]], device: torch.device, wire: str) -> Case:
    """A message into gradients, and the errors of the step into the error memory."""
    buckets = _Buckets(shapes, device, wire)
    targets = [[torch.full_like(g, torch.nan) for g in tensors] for tensors in buckets.gradients]
    pending = [torch.randn_like(errors) for errors in buckets.errors]

    def ours(i: int) -> None:
        dequantize(buckets.messages[i], buckets.section(i), targets[i])
        commit_errors(buckets.messages[i], pending[i], buckets.errors[i])

    def eager(i: int) -> None:
        dequantize_reference(buckets.messages[i], buckets.section(i), targets[i])
        commit_errors_reference(buckets.messages[i], pending[i], buckets.errors[i])

    def check() -> None:
        expected = [torch.empty_like(target) for target in targets[0]]
        dequantize_reference(buckets.messages[0], buckets.section(0), expected)
        torch.testing.assert_close(targets[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(buckets.errors[0], pending[0], rtol=0, atol=0)

    return Case(
        f"dequantize from {wire}, commit errors",
        [
            round(dequantize_bytes(numel, WIRE_FORMATS[wire], BLOCK_SIZE, torch.float32))
            + commit_errors_bytes(numel, torch.float32)
            for numel in buckets.numels
        ],
        {GRADWIRE: ours, EAGER: eager},
        check,
    )
