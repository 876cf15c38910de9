"""Samples: the measurements of one step of a hook, taken where its algorithm runs.

Nothing waits for a device: times are taken by events, sums stay on the device, and both are read in a later step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import coroutine
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.comm import Collective, Steps, Transport, Workspace
from gradwire.compress import Gradients
from gradwire.hooks._types import GradBucket
from gradwire.kernels import compute_dtype, flatten

T = TypeVar("T")
Algorithm = Callable[[Gradients, Gradients, Transport, Workspace], Steps[None]]


class Mark(Protocol):
    """A point in the time of a device."""

    def is_past(self) -> bool:
        """Whether the device has reached it."""

    def milliseconds_since(self, earlier: "Mark") -> float:
        """The time between two points that are past."""


class _HostMark:
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_past(self) -> bool:
        return True

    def milliseconds_since(self, earlier: "_HostMark") -> float:
        return 1e3 * (self._seconds - earlier._seconds)


class _StreamMark:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_past(self) -> bool:
        return bool(self._event.query())

    def milliseconds_since(self, earlier: "_StreamMark") -> float:
        return float(earlier._event.elapsed_time(self._event))


def mark(device: torch.device) -> Mark:
    """The current point in the time of a device: of its current stream, or of this thread for a CPU."""
    return _StreamMark(device) if device.type == "cuda" else _HostMark()  # type: ignore[return-value]


class Timeline:
    """What one bucket sends in one step, and when.

    Args:
        device: of its gradients.

    Attributes:
        sent_bytes: payload of its collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self.sent_bytes = 0
        self._device = device
        self._marks: list[Mark] = []  # begin and end of each stretch between collectives

    @coroutine
    def of(self, steps: Steps[T]) -> Generator[Collective, None, T]:
        """Run an algorithm, measured; await the result."""
        try:
            while True:
                self._marks.append(mark(self._device))
                try:
                    collective = steps.send(None)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self._marks.append(mark(self._device))
                self.sent_bytes += collective.payload_bytes
                yield collective
        finally:
            steps.close()

    def milliseconds(self) -> tuple[float, float, float]:
        """Time of encoding, up to the last collective, of waiting for collectives, and of decoding, behind it."""
        *encoding, decoding = _durations(self._marks)
        return sum(encoding), sum(_durations(self._marks[1:-1])), decoding


def _durations(marks: Sequence[Mark]) -> list[float]:
    return [end.milliseconds_since(begin) for begin, end in zip(marks[::2], marks[1::2], strict=True)]


class Measurable(Protocol):
    """What a sample reads of a hook state at the end of a step."""

    def residuals(self) -> Sequence[Tensor]:
        """This rank's error memory."""

    def device_counters(self) -> Mapping[str, Tensor]:
        """Further numbers, one element each."""


class BucketRecorder(Protocol):
    """Measures one bucket in one step."""

    def observed(self, algorithm: Algorithm) -> Algorithm:
        """The bucket's algorithm, measured."""

    def uncompressed(self, steps: Steps[T], device: torch.device) -> Steps[T]:
        """The all-reduce of a bucket that is never compressed, measured."""

    def finish(self, device: torch.device) -> None:
        """Called behind the algorithm of the last bucket of the step."""


class Recorder(Protocol):
    """Measures the buckets of a hook state."""

    def recorder(self, bucket: GradBucket) -> BucketRecorder | None:
        """What measures ``bucket`` in this step; None if nothing does."""

    def settings(self) -> dict[str, object]:
        """Options that must be equal on all ranks, as plain values."""

    def agreed(self) -> None:
        """Called on all ranks at the same bucket, once they have found their `settings` equal."""


class Sample:
    """The measurements of one step: a hook's buckets add to it in turn, in their order.

    Args:
        step: its number.
        is_exact: whether to exchange the exact mean too, and compare.
        state: of the hook.

    Attributes:
        is_complete: whether the last bucket has added its measurements.
    """

    def __init__(self, step: int, is_exact: bool, state: Measurable) -> None:
        self.step = step
        self.is_exact = is_exact
        self.is_complete = False
        self._state = state
        self._timelines: list[Timeline] = []
        self._gradient_bytes: list[int] = []  # by bucket, like the timelines
        self._sums: dict[str, Tensor] = {}  # fp64, on the device
        self._values: Tensor | None = None  # the sums, in the order of `_sums`, on the host once `_copied` is past
        self._copied: Mark | None = None

    async def uncompressed(self, steps: Steps[T], device: torch.device) -> T:
        """Run the all-reduce of a bucket that is never compressed, measured."""
        timeline = Timeline(device)
        result = await timeline.of(steps)
        self._count(timeline, timeline.sent_bytes)
        return result

    def observed(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm of a bucket, measured; its result has the same bits."""

        async def measured(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
            exact = None
            if self.is_exact:
                exact = _flat(source, 1 / transport.world_size)
                await transport.all_reduce(exact)
            timeline = Timeline(source.table.device)
            await timeline.of(algorithm(source, target, transport, workspace))
            self._count(timeline, source.table.numel * source.table.dtype.itemsize)
            self._add("result", target.tensors)
            if exact is not None:
                result = _flat(target, 1)
                self._sum("product", torch.dot(exact, result))
                self._add("exact", [exact])
                self._add("difference", [result.sub_(exact)])

        return measured

    def finish(self, device: torch.device) -> None:
        """Add what belongs to the whole step, and copy all sums to the host, without waiting for the device."""
        self._add("residual", self._state.residuals())
        for name, value in self._state.device_counters().items():
            self._sum(name, value)
        sums = [value.to(device) for value in self._sums.values()]
        values = torch.stack(sums) if sums else torch.empty(0, device=device)  # a step of sparse buckets has none
        if device.type == "cuda":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
        self._values, self._copied = values, mark(device)
        self.is_complete = True

    def is_ready(self) -> bool:
        """Whether `metrics` can be called without waiting for the device."""
        return self.is_complete and self._copied is not None and self._copied.is_past()

    def metrics(self) -> dict[str, float]:
        """The measurements, named as `gradwire.hooks.telemetry` lists them."""
        assert self._values is not None
        sums = dict(zip(self._sums, self._values.tolist(), strict=True))
        buckets = list(zip(self._gradient_bytes, self._timelines, strict=True))
        gradient_bytes, sent_bytes = sum(self._gradient_bytes), sum(of.sent_bytes for of in self._timelines)
        encode, wire, decode = map(sum, zip(*(of.milliseconds() for of in self._timelines), strict=True))
        found: dict[str, float] = {
            "step": self.step,
            "gradient_bytes": gradient_bytes,
            "sent_bytes": sent_bytes,
            "compression_ratio": gradient_bytes / sent_bytes if sent_bytes else 1.0,
            "uncompressed_buckets": sum(of.sent_bytes >= nbytes for nbytes, of in buckets),
            "encode_ms": encode,
            "wire_ms": wire,
            "decode_ms": decode,
        }
        if "residual" in sums:
            found["residual_ratio"] = _ratio(sums.pop("residual"), sums.get("result", 0.0)) ** 0.5
        if "exact" in sums:
            exact, result, difference = sums.pop("exact"), sums["result"], sums.pop("difference")
            found["cosine"] = _ratio(sums.pop("product"), (exact * result) ** 0.5)
            found["relative_error"] = _ratio(difference, exact) ** 0.5
        sums.pop("result", None)
        return found | sums

    def _count(self, timeline: Timeline, gradient_bytes: int) -> None:
        self._timelines.append(timeline)
        self._gradient_bytes.append(gradient_bytes)

    def _add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Add the squares of all elements to a sum."""
        present = [tensor for tensor in tensors if tensor.numel() > 0]
        if present:
            dtype = torch.float32 if present[0].dtype.itemsize == 2 else None  # squares overflow in fp16
            norms = torch._foreach_norm(present, 2, dtype)
            self._sum(name, torch.stack([norm.double() for norm in norms]).square().sum())

    def _sum(self, name: str, value: Tensor) -> None:
        self._sums[name] = value.double() + self._sums[name] if name in self._sums else value.double()


def _flat(gradients: Gradients, scale: float) -> Tensor:
    """A flat copy of the gradients in the dtype of the arithmetic, times ``scale``."""
    dtype = compute_dtype(gradients.table.dtype)
    wire = torch.empty(gradients.table.numel, dtype=dtype, device=gradients.table.device)
    return flatten(gradients.tensors, wire, table=gradients.table, scale=scale)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 else 0.0 if numerator == 0 else float("inf")
