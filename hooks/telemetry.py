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

import json
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gradwire.hooks._samples import Recorder, Sample
from gradwire.hooks._types import GradBucket, StepBoundary

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
        self._boundary = StepBoundary()
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
        if self._boundary.is_before(bucket):
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
