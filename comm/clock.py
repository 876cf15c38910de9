"""`Mark`: timestamps of a device, in its current stream or on its host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class Mark:
    """A timestamp of a device: of its current stream, or of this thread for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = 0.0
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._seconds = time.perf_counter()

    def is_past(self) -> bool:
        """Whether the device has reached it."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def milliseconds_since(self, earlier: Mark) -> float:
        """Milliseconds since ``earlier``; both must be past."""
        if self._event is None or earlier._event is None:
            return 1e3 * (self._seconds - earlier._seconds)
        return float(earlier._event.elapsed_time(self._event))


def durations(marks: Sequence[Mark]) -> list[float]:
    """Milliseconds from the first mark to the second, from the third to the fourth, and so on."""
    return [end.milliseconds_since(begin) for begin, end in zip(marks[::2], marks[1::2], strict=False)]
