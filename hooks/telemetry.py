"""Telemetry: bytes, time and error of a hook, measured while you train.

To start measuring, call `Observed.observe` of the hook's state on every rank::

    >>> report = to_tensorboard(SummaryWriter("runs/int4")) if dist.get_rank() == 0 else None
    >>> state.observe(every=50, exact_every=1000, report=report)

`Observed.metrics`, and each report, is a dictionary of numbers about one step on this rank:

- ``step``: steps since `Observed.observe`.
- ``gradient_bytes``, ``sent_bytes``, ``compression_ratio``: payload before and after compression, and their ratio.
  Of n ranks, each sends 2 (n - 1) / n times its payload over the network.
- ``uncompressed_buckets``: buckets sent in full: with sparse gradients, without a matrix worth compressing, or before
  compression starts; also buckets so small that padding and scales exceed the savings.
- ``encode_ms``, ``wire_ms``, ``decode_ms``: computation up to the last collective, collectives including their queue,
  and computation after the last collective; summed over the buckets. They overlap the backward pass.
- ``residual_ratio``: norm of the error memory divided by norm of the result. It should level off. If it keeps growing,
  the hook drops information faster than it sends it.
- ``cosine``, ``relative_error``: of the result against the exact mean of this step's gradients, every ``exact_every``
  steps. With error feedback, the result contains residuals of earlier steps, so a cosine of 0.3 to 0.9 is normal for
  PowerSGD at low rank.
- ``saturated_elements``, ``nonfinite_elements``, ``skipped_steps``: totals of `ScaledCastState`.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import coroutine
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.comm import Collective, Driver, Steps, Transport, Workspace
from gradwire.compress import Gradients
from gradwire.hooks._types import GradBucket
from gradwire.kernels import compute_dtype, flatten

__all__ = ["Observed", "to_jsonl", "to_tensorboard", "to_wandb"]

Report = Callable[[Mapping[str, float]], None]


class ScalarWriter(Protocol):
    """What `to_tensorboard` needs of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class Run(Protocol):
    """What `to_wandb` needs of a run of Weights & Biases, or of the module ``wandb``."""

    def log(self, data: dict[str, float]) -> Any:
        """Write numbers of one step."""


def to_jsonl(path: str | Path) -> Report:
    """A report that appends one line of JSON per measured step to a file; null where a number is not finite.

    Args:
        path: of the file; created if it does not exist.
    """

    def report(metrics: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with Path(path).open("a") as file:
            file.write(json.dumps(numbers) + "\n")

    return report


def to_tensorboard(writer: ScalarWriter, prefix: str = "gradwire/") -> Report:
    """A report that writes scalars, such as ``gradwire/wire_ms``, to TensorBoard.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        prefix: of the tags.
    """

    def report(metrics: Mapping[str, float]) -> None:
        step = int(metrics["step"])
        for name, value in metrics.items():
            if name != "step":
                writer.add_scalar(prefix + name, value, step)

    return report


def to_wandb(run: Run, prefix: str = "gradwire/") -> Report:
    """A report that logs to Weights & Biases, including ``gradwire/step``.

    Args:
        run: as returned by ``wandb.init()``, or the module ``wandb``.
        prefix: of the metric names.
    """

    def report(metrics: Mapping[str, float]) -> None:
        run.log({prefix + name: value for name, value in metrics.items()})

    return report


class Observed:
    """A hook state that can measure its steps. The module's docstring lists the metrics."""

    _recorder: Recorder | None = None  # a class attribute: it is neither pickled nor part of a checkpoint

    def observe(self, *, every: int = 50, exact_every: int = 0, report: Report | None = None) -> None:
        """Measure one in ``every`` steps from now on. Call it on every rank, between the same two steps.

        Measuring does not change the result of a step. It computes the norms of the result and the error memory, and
        reads them in a later step, without waiting for the device.

        Args:
            every: number of steps per measured step, at least 1.
            exact_every: number of steps per comparison with the exact mean; 0 for no comparisons. A comparison takes an
                uncompressed all-reduce in fp32 and two flat copies of each bucket. Must be equal on all ranks.
            report: called with the `metrics` of each measured step, in the training thread; see `to_jsonl`,
                `to_tensorboard` and `to_wandb`. Usually passed on one rank only.

        Raises:
            ValueError: a number of steps is out of range.
        """
        self._recorder = Telemetry(self, every, exact_every, report)

    def stop_observing(self) -> None:
        """Report the steps measured so far, and stop measuring. Call it on every rank, between the same two steps."""
        if isinstance(self._recorder, Telemetry):
            self._recorder.flush()
        self._recorder = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the latest measured step; empty before the first one has ended.

        Raises:
            RuntimeError: `observe` was not called.
        """
        telemetry = self._recorder
        if not isinstance(telemetry, Telemetry):
            raise RuntimeError(
                f"This {type(self).__name__} is not measured. Call state.observe() on every rank before the steps "
                "that you want to measure."
            )
        telemetry.flush()
        return dict(telemetry.latest)

    def residuals(self) -> Sequence[Tensor]:
        """This rank's error memory, for ``residual_ratio``; empty without error feedback."""
        return ()

    def device_counters(self) -> Mapping[str, Tensor]:
        """Further totals among the metrics, one element each."""
        return {}


class Telemetry:
    """The measurements of a hook state.

    Args:
        state: the hook state.
        every, exact_every, report: as in `Observed.observe`.

    Attributes:
        latest: the metrics of the latest measured step.
    """

    def __init__(self, state: Observed, every: int, exact_every: int, report: Report | None) -> None:
        for name, value, least in (("every", every, 1), ("exact_every", exact_every, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; expected a whole number of steps, at least {least}.")
        self.latest: dict[str, float] = {}
        self._state = weakref.proxy(state)
        self._every = every
        self._exact_every = exact_every
        self._report = report
        self._latest_index: int | None = None  # of the latest bucket
        self._n_steps = 0  # that have begun
        self._agreed_at = 0  # steps before the ranks compared their settings: all count comparisons from there
        self._sample: Sample | None = None  # of the current step
        self._pending: deque[Sample] = deque()

    def settings(self) -> dict[str, object]:
        """What must be equal on all ranks: comparisons with the exact mean are collectives."""
        return {"exact_every of observe()": self._exact_every}

    def agreed(self) -> None:
        """Count the steps of ``exact_every`` from here: after a fault, ranks may have counted different steps."""
        self._agreed_at = self._n_steps

    def recorder(self, bucket: GradBucket) -> Sample | None:
        """The measurements to which ``bucket`` adds; None in a step that is not measured."""
        index, latest = bucket.index(), self._latest_index
        self._latest_index = index
        if latest is None or index <= latest:  # the buckets of a step come in the order of their indices
            self.flush()
            # All samples of earlier steps are complete, except those of steps that failed or whose last bucket was
            # skipped.
            self._pending = deque(sample for sample in self._pending if sample.is_complete)
            self._n_steps += 1
            step = self._n_steps
            is_exact = self._exact_every > 0 and (step - self._agreed_at) % self._exact_every == 0
            self._sample = Sample(step, is_exact, self._state) if is_exact or step % self._every == 0 else None
            if self._sample is not None:
                self._pending.append(self._sample)
        return self._sample

    def flush(self) -> None:
        """Take over the measurements that can be read now."""
        while self._pending and self._pending[0].is_ready():
            self.latest = self._pending.popleft().metrics()
            if self._report is not None:
                self._report(self.latest)


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
        driver = Driver(steps)
        try:
            while True:
                self._marks.append(mark(self._device))
                collective = driver.advance()
                self._marks.append(mark(self._device))
                if collective is None:
                    return driver.result
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
