"""The times of steps that PyTorch's logging data reports."""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire.kernels import is_capturing

TIMED_ITERATIONS = 10  # number of first iterations that are all timed
_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class StepTimes:
    """Durations of the forward, of the backward and of its communication, in nanoseconds, and their averages.

    The first `TIMED_ITERATIONS` are timed, then one in ``sample_rate``; on a GPU, on the current stream. Nothing waits
    for the device: a step that has not ended when its times are read does not count, nor one captured in a CUDA graph,
    because recording or querying a timing event would end the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iterations = 0  # synchronized forwards so far
        self.reported = 0  # index of the last timed iteration, which PyTorch reports as the iteration
        self._device, self._is_gpu = device, device.type == "cuda"
        self.is_timed = False  # whether events of this iteration are recorded
        self._marks: dict[str, Any] = {}  # nanoseconds, or on a GPU events
        self._unix_times: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._n_timed = 0

    def begin_forward(self) -> None:
        """Count a synchronized forward; add the previous step's times to the averages."""
        self._settle()
        is_due = self.iterations <= TIMED_ITERATIONS or self.iterations % self.sample_rate == 0
        self.is_timed = is_due and not (self._is_gpu and is_capturing(self._device))
        if self.is_timed:
            self.reported = self.iterations
            self._marks, self._unix_times = {}, {}
        self.iterations += 1
        self.record("forward_compute_time_start")

    def record(self, event: str) -> None:
        """Record the time of an event in ``_DURATIONS``: the first of its name in an iteration that is timed."""
        if not self.is_timed or event in self._marks:
            return
        if self._is_gpu and is_capturing(self._device):
            self.is_timed = False
            self._marks = {}
            self._unix_times = {}
            return
        self._marks[event] = torch.cuda.Event(enable_timing=True) if self._is_gpu else time.perf_counter_ns()
        if self._is_gpu:
            self._marks[event].record(torch.cuda.current_stream(self._device))
        self._unix_times[event] = time.time_ns()

    def _settle(self) -> None:
        """Compute the durations of a timed iteration once it has ended."""
        end = self._marks.get("backward_comm_time_end")
        if end is None or (self._is_gpu and (is_capturing(self._device) or not end.query())):
            return
        for name, (first, last) in _DURATIONS.items():
            begin, end = self._marks[first], self._marks[last]
            self._last[name] = max(0, int(1e6 * begin.elapsed_time(end)) if self._is_gpu else end - begin)
            self._sums[name] = self._sums.get(name, 0) + self._last[name]
        self._n_timed += 1
        self.is_timed, self._marks = False, {}

    def summary(self) -> dict[str, int]:
        """The last durations, the Unix times of their events, and the averages, under PyTorch's names."""
        self._settle()
        averages = {f"avg_{name}": total // self._n_timed for name, total in self._sums.items()}
        return self._last | self._unix_times | averages
