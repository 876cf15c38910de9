"""`Clock`: times work on a device."""

from __future__ import annotations

import time
from typing import Any

import torch

# Before small kernels are timed, the GPU spins for a few milliseconds while the host enqueues them. So the times
# contain no gaps in which the GPU waits for the host.
SPIN_CYCLES = 1 << 24


class Clock:
    """The clock of a device: the host's clock for a CPU, events on the current stream for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def spin(self) -> None:
        """Make a GPU spin before the work that is enqueued next; no effect on a CPU."""
        if self._is_gpu:
            torch.cuda._sleep(SPIN_CYCLES)

    def mark(self) -> Any:
        """The current time; on a GPU, the time at which the stream reaches this point."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the device has reached: call `synchronize` first."""
        return float(1e-3 * begin.elapsed_time(end)) if self._is_gpu else float(end - begin)
