"""Telemetry: bytes, time and error of a hook, measured while you train.

To start measuring, call `observe` of the hook's state on every rank::

    >>> report = to_tensorboard(SummaryWriter("runs/int4")) if dist.get_rank() == 0 else None
    >>> state.observe(every=50, exact_every=1000, report=report)

Its `metrics`, and each report, is a dictionary of numbers about one step on this rank. docs/telemetry.md lists them:
payload before and after compression, encode, wire and decode time, norm of the error memory, and the error against the
exact mean.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from operator import ge
from pathlib import Path
from types import coroutine
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Algorithm, Collective, Driver, Transport
from gradwire.comm.clock import Mark, durations
from gradwire.comm.executor import EXIT_TIMEOUT_SECONDS
from gradwire.compress import Gradients
from gradwire.compress.memory import BucketMemory
from gradwire.kernels import compute_dtype

__all__ = ["to_jsonl", "to_tensorboard", "to_wandb"]

logger = logging.getLogger(__name__)

Report = Callable[[Mapping[str, float]], None]

# The largest `delayed_ratio` without a warning. In trainings of 2,000 steps with PowerSGD, the loss was higher than
# without a hook by about 0.015 nats times its square (docs/log/powersgd.md).
LARGEST_DELAY = 1.0
DELAYED = (
    "%s: in step %d, the error memory is %.2f times as large as the gradient, both averaged over the ranks. PowerSGD "
    "then applies most of a gradient in later steps, quantization adds noise of that size, and the loss may suffer. "
    "Raise the rank or the number of bits, or exempt the parameters that need it; docs/telemetry.md has figures. This "
    "is logged once."
)

COMPARED_NUMEL = 2**16  # elements of a bucket that are compared with the exact mean
SCATTER = 2654435761  # prime, so k * SCATTER mod n visits every index once, evenly spread


def to_jsonl(path: str | Path) -> Report:
    """A report that appends one line of JSON per measured step to a file; null where a number is not finite.

    Args:
        path: path of the file; created, with its folder, if it does not exist.

    Raises:
        OSError: the folder cannot be created, or the file cannot be written.
    """
    target = Path(path).absolute()  # the script may change its folder
    target.parent.mkdir(parents=True, exist_ok=True)
    target.open("a").close()

    def report(metrics: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with target.open("a") as file:
            file.write(json.dumps(numbers) + "\n")

    return report


def to_tensorboard(writer: Any, prefix: str = "gradwire/") -> Report:
    """A report that writes scalars, such as ``gradwire/wire_ms``, to TensorBoard, at their step.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        prefix: prefix of the tags.
    """

    def report(metrics: Mapping[str, float]) -> None:
        step = int(metrics["step"])
        for name, value in metrics.items():
            if name != "step":
                writer.add_scalar(prefix + name, value, step)

    return report


def to_wandb(run: Any, prefix: str = "gradwire/") -> Report:
    """A report that logs to Weights & Biases, with ``gradwire/step`` as the x-axis of its charts.

    A run's own step counts the calls of ``log``, so it is not the training step.

    Args:
        run: a run as returned by ``wandb.init()``, or the module ``wandb`` after it.
        prefix: prefix of the metric names.
    """
    run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")

    def report(metrics: Mapping[str, float]) -> None:
        run.log({prefix + name: value for name, value in metrics.items()})

    return report


T = TypeVar("T")
Work = tuple[Gradients, Gradients]  # source and target of an algorithm


class Timeline:
    """Time and payload of one bucket in one step."""

    def __init__(self, device: torch.device) -> None:
        self.sent_bytes = 0  # payload of the collectives
        self._device = device
        self._marks: list[Mark] = []  # begin and end of each part between collectives

    @coroutine
    def measured(self, algorithm: Algorithm[T]) -> Generator[Collective, None, T]:
        """Run an algorithm, measured; await the result."""
        driver = Driver(algorithm)
        try:
            while True:
                self._marks.append(Mark(self._device))
                collective = driver.advance()
                self._marks.append(Mark(self._device))
                if collective is None:
                    return driver.result
                self.sent_bytes += collective.payload_bytes
                yield collective
        finally:
            algorithm.close()

    def milliseconds(self) -> tuple[float, float, float]:
        """Encode, wire and decode time (ms): before, in and after the collectives."""
        *encoding, decoding = durations(self._marks)
        return sum(encoding), sum(durations(self._marks[1:-1])), decoding


class Telemetry:
    """The measurements of a hook; ``state`` is its `HookSettings`, the other arguments those of its `observe`."""

    def __init__(self, state: Any, every: int, exact_every: int, report: Report | None = None) -> None:
        self.latest: dict[str, float] = {}  # the metrics of the latest measured step
        self._state = weakref.proxy(state)
        self._every = every
        self._exact_every = exact_every
        self._report = report
        self._latest, self._is_open = 0, False  # position of the latest bucket, and whether others of its step come
        self.n_steps = 0  # steps that have begun
        self._agreed_at = 0  # steps before the latest handshake: all ranks count comparisons from there
        self._sample: Sample | None = None  # the current step's
        self._pending: deque[Sample] = deque()
        self._has_failed = False  # whether the report has raised
        self._has_warned = False  # of gradients that arrive late
        self._process = os.getpid()

    def __del__(self) -> None:
        self.close()

    def settings(self) -> dict[str, object]:
        """Options that must be equal on all ranks: comparisons with the exact mean are collectives."""
        return {"exact_every of observe()": self._exact_every}

    def agreed(self) -> None:
        """Count the steps of ``exact_every`` from here. All ranks call it at the same bucket, with equal `settings`."""
        self._agreed_at = self.n_steps

    def sample(self, position: int, is_final: bool, n_before: int | None) -> Sample | None:
        """The measurements of the current step, to which a bucket belongs, after the report of the previous ones.

        ``n_before`` is the number of steps before this one; None if the hook counts none.
        """
        is_first = not self._is_open or position <= self._latest  # as `StepCount` has it
        self._latest, self._is_open = position, not is_final
        if is_first:
            self.flush()
            self._drop_incomplete()
            self.n_steps += 1
            n = self.n_steps
            is_exact = self._exact_every > 0 and (n - self._agreed_at) % self._exact_every == 0
            is_measured = is_exact or n % self._every == 0
            self._sample = (
                Sample(n if n_before is None else n_before + 1, is_exact, self._state) if is_measured else None
            )
            if self._sample is not None:
                self._pending.append(self._sample)
        return self._sample

    def _drop_incomplete(self) -> None:
        """Between two steps, drop the samples of steps that failed or whose last bucket was skipped."""
        self._pending = deque(sample for sample in self._pending if sample.is_complete)

    def flush(self) -> None:
        """Report the measurements that can be read without waiting. An error of the report is logged once."""
        while self._pending and self._pending[0].is_ready():
            self.latest = self._pending.popleft().metrics()
            with suppress(ReferenceError):  # the state has been released
                self._warn_of_delay()
            if self._report is not None:
                try:
                    self._report(dict(self.latest))
                except Exception:
                    if not self._has_failed:
                        logger.warning(
                            "The report passed to observe() failed in step %d. Training continues, and later steps are "
                            "reported. Further failures are not logged.",
                            self.latest["step"],
                            exc_info=True,
                        )
                    self._has_failed = True

    def _warn_of_delay(self) -> None:
        """Warn once, on the first rank, if the mean error memory is larger than the mean gradient."""
        delay = self.latest.get("delayed_ratio", 0.0)
        if delay > LARGEST_DELAY and not self._has_warned:
            self._has_warned = True
            if dist.is_initialized() and dist.get_rank(self._state._group) == 0:
                logger.warning(DELAYED, self._state.hook_name, self.latest["step"], delay)

    def close(self) -> None:
        """Report all measurements, between two steps. Waits for the device, `EXIT_TIMEOUT_SECONDS` at most.

        Not in a forked child: its parent reports them.
        """
        if os.getpid() != self._process:
            return
        self._drop_incomplete()
        if not self._pending:
            return
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        self.flush()
        while self._pending and time.monotonic() < deadline:
            time.sleep(1e-3)
            self.flush()


class Sample:
    """The measurements of one step: a hook's buckets add to it in turn, in their order."""

    def __init__(self, step: int, is_exact: bool, state: Any) -> None:
        self.is_complete = False  # whether the last bucket has added its measurements
        self._step = step
        self._is_exact = is_exact  # whether to exchange the exact mean, too, and compare
        self._state = state
        self._timelines: list[Timeline] = []
        self._gradient_bytes: list[int] = []  # by bucket, like the timelines
        self._sums: dict[str, Tensor] = {}  # fp64, on the device
        self._values: HostCopy | None = None  # the sums, in the order of `_sums`

    async def measured(
        self,
        algorithm: Algorithm[T],
        is_last: bool,
        device: torch.device,
        work: Work | None,
        memory: Any,
        transport: Transport,
    ) -> T:
        """Run the algorithm of a bucket, measured; its result has the same bits.

        ``work`` is its source and target, None for a sparse bucket, ``memory`` its `BucketMemory` if it has one, and
        ``transport`` the transport of the algorithm.
        """
        exact, timeline = None, Timeline(device)
        if work is not None and self._is_exact:
            exact = compared(work[0].each()) / transport.world_size
            await transport.all_reduce(exact)
        result = await timeline.measured(algorithm)
        self._timelines.append(timeline)
        if work is None:
            self._gradient_bytes.append(timeline.sent_bytes)
        else:
            self._gradient_bytes.append(work[0].table.numel * work[0].table.dtype.itemsize)
            self._add("result", work[1].tensors)
        if work is not None and exact is not None:
            mean = compared(work[1].each())
            self._sum("product", torch.dot(exact, mean))
            self._add("exact", [exact])
            self._add("mean", [mean])
            self._add("difference", [mean - exact])
            if (delayed := self._mean_errors(memory, transport.world_size)) is not None:
                await transport.all_reduce(delayed)
                self._add("delayed", [delayed])
        if is_last:
            self._finish(device)
        return result

    def _mean_errors(self, memory: Any, world_size: int) -> Tensor | None:
        """This rank's part of what is left of earlier gradients, in the scale of their mean; None without errors."""
        errors = memory.folded().get("errors") if isinstance(memory, BucketMemory) else None
        if not errors:
            return None
        scale = 1 / world_size if self._state.memory.declared["errors"].merge == "mean" else 1
        return compared(list(errors.values())) * scale

    def _finish(self, device: torch.device) -> None:
        """Add the sums of the whole step, and copy all sums to the host, without waiting for the device."""
        if self._state.memory is not None:
            self._add("residual", self._state.memory.residuals())
        for name, value in self._state._device_counters().items():
            self._sum(name, value)
        sums = [value.to(device) for value in self._sums.values()]
        # A step of sparse buckets has none.
        self._values = HostCopy(torch.stack(sums) if sums else torch.empty(0, device=device))
        self.is_complete = True

    def is_ready(self) -> bool:
        """Whether `metrics` can be called without waiting for the device."""
        return self._values is not None and self._values.is_there()

    def metrics(self) -> dict[str, float]:
        """The measurements, named as docs/telemetry.md lists them."""
        assert self._values is not None
        sums = dict(zip(self._sums, self._values.read(), strict=True))
        sent = [timeline.sent_bytes for timeline in self._timelines]
        gradient_bytes, sent_bytes = sum(self._gradient_bytes), sum(sent)
        encode, wire, decode = map(sum, zip(*(each.milliseconds() for each in self._timelines), strict=True))
        found: dict[str, float] = {
            "step": self._step,
            "gradient_bytes": gradient_bytes,
            "sent_bytes": sent_bytes,
            "compression_ratio": gradient_bytes / sent_bytes if sent_bytes else 1.0,
            "uncompressed_buckets": sum(map(ge, sent, self._gradient_bytes)),
            "encode_ms": encode,
            "wire_ms": wire,
            "decode_ms": decode,
        }
        if "residual" in sums:
            found["residual_ratio"] = _ratio(sums.pop("residual"), sums.get("result", 0.0)) ** 0.5
        if "exact" in sums:
            exact, mean, difference, product = map(sums.pop, ("exact", "mean", "difference", "product"))
            if "delayed" in sums:
                found["delayed_ratio"] = _ratio(sums.pop("delayed"), exact) ** 0.5
            found["gain"] = _ratio(product, exact)
            found["cosine"] = _ratio(product, (exact * mean) ** 0.5)
            found["relative_error"] = _ratio(difference, exact) ** 0.5
        sums.pop("result", None)
        return found | sums

    def _add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Add the squares of all elements to a sum."""
        if tensors:
            self._sum(name, sum_of_squares(tensors, tensors[0].device))

    def _sum(self, name: str, value: Tensor) -> None:
        self._sums[name] = value.double() + self._sums[name] if name in self._sums else value.double()


class HostCopy:
    """A copy of a 1-D tensor on the host, which the current stream fills; nothing waits for it before `read`."""

    def __init__(self, values: Tensor) -> None:
        self.device = values.device
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
        self._values, self._copied = values, Mark(self.device)

    def is_there(self) -> bool:
        """Whether `read` does not wait."""
        return self._copied.is_past()

    def read(self) -> list[float]:
        """The values, once the device has copied them."""
        self._copied.wait()
        return self._values.tolist()


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements: 0-d, fp64, on ``device``.

    Memory from a checkpoint may still be on another device.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    present = [tensor for tensor in tensors if tensor.numel() > 0]
    for device in {tensor.device for tensor in present}:
        there = [tensor for tensor in present if tensor.device == device]
        dtype = torch.float32 if there[0].dtype.itemsize == 2 else None  # squares overflow in fp16
        norms = torch._foreach_norm(there, 2, dtype)
        total += torch.stack([norm.double() for norm in norms]).square().sum().to(device)
    return total


def compared(tensors: Sequence[Tensor]) -> Tensor:
    """About `COMPARED_NUMEL` elements of real tensors, or all: 1-D, fp32 or fp64, the same elements on every rank.

    Each is multiplied by the root of the number of elements that it stands for: sums of squares and products estimate
    those of all elements.
    """
    one_in = max(1, sum(tensor.numel() for tensor in tensors) / COMPARED_NUMEL)
    chosen = []
    for tensor in tensors:
        flat, numel = tensor.reshape(-1), tensor.numel()
        n = math.ceil(numel / one_in)
        if n < numel:
            flat = flat[torch.arange(n, device=flat.device).mul_(SCATTER).remainder_(numel)]
        chosen.append(flat.to(compute_dtype(flat.dtype)) * (numel / max(n, 1)) ** 0.5)
    return torch.cat(chosen)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 else 0.0 if numerator == 0 else float("inf")
