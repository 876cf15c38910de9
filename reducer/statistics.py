"""When a step's phases began and ended, for `DistributedDataParallel._get_ddp_logging_data`."""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire.kernels import is_capturing

# Of the first iterations, every one is timed.
WARM_UP = 10


class Statistics:
    """Times of the forward, of the backward and of its communication, in nanoseconds, and their averages.

    Every iteration is timed at first, then one in ``sample_rate``. On a GPU the spans are those of the current stream,
    and a step whose work has not come to its end when it is looked at is left out: nothing waits for it. A step that is
    captured in a CUDA graph, or a part of it, is left out too.

    Attributes:
        sample_rate: iterations from one that is timed to the next.
        iterations: synchronised forwards so far.
        reported: the number of iterations before the last one that was timed, which is what PyTorch reports.
        unused_bytes: of the parameters that the last backward left out on this rank.
        n_reduced: buckets that the last backward reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iterations = 0
        self.reported = 0
        self.unused_bytes = 0
        self.n_reduced = 0
        self._clock = _HostClock() if device.type == "cpu" else _StreamClock(device)
        self._is_timed = False
        self._marks: dict[str, Any] = {}
        self._moments: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._n_timed = 0

    def begin_forward(self) -> None:
        """A synchronised forward begins; what its predecessor took is known now."""
        self._settle()
        is_due = self.iterations <= WARM_UP or self.iterations % self.sample_rate == 0
        self._is_timed = is_due and not self._clock.is_stopped()
        if self._is_timed:
            self.reported = self.iterations
            self._marks = {}
            self._moments = {}
        self.iterations += 1
        self.mark("forward_compute_time_start")

    def mark(self, event: str) -> None:
        """Note the time of an event, the first time in an iteration that is timed.

        Events are the start of the forward, ``forward_compute_time_start``, and start and end of the backward and of
        its communication, ``backward_compute_time_start`` to ``backward_comm_time_end``.
        """
        if not self._is_timed or event in self._marks:
            return
        if self._clock.is_stopped():
            self._is_timed = False
            self._marks = {}
            self._moments = {}
        else:
            self._marks[event] = self._clock.now()
            self._moments[event] = time.time_ns()

    def _settle(self) -> None:
        """Work out the spans of an iteration that has come to its end."""
        marks = self._marks
        if "backward_comm_time_end" not in marks or self._clock.is_stopped():
            return
        if not self._clock.has_passed(marks["backward_comm_time_end"]):
            return
        spans = {
            "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
            "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
            "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
            "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
        }
        self._last = {name: self._clock.between(marks[start], marks[end]) for name, (start, end) in spans.items()}
        self._sums = {name: self._sums.get(name, 0) + span for name, span in self._last.items()}
        self._n_timed += 1
        self._is_timed = False
        self._marks = {}

    def summary(self) -> dict[str, int]:
        """The last spans, the moments of their events in Unix time, and the averages, under PyTorch's names."""
        self._settle()
        averages = {f"avg_{name}": total // self._n_timed for name, total in self._sums.items()}
        counts = {"unused_parameter_size": self.unused_bytes, "num_buckets_reduced": self.n_reduced}
        return self._last | self._moments | averages | counts


class _HostClock:
    def is_stopped(self) -> bool:
        return False

    def now(self) -> int:
        return time.perf_counter_ns()

    def has_passed(self, moment: int) -> bool:
        return True

    def between(self, start: int, end: int) -> int:
        return max(0, end - start)


class _StreamClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def is_stopped(self) -> bool:
        """While a CUDA graph is captured: to record a timing event, or to ask for one, would end the capture."""
        return is_capturing(self._device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, moment: torch.cuda.Event) -> bool:
        return bool(moment.query())

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        return max(0, int(start.elapsed_time(end) * 1e6))
