"""`Workspace`: the wire buffer of a bucket in flight."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from gradwire.comm.graphs import PiecewiseGraphs

ALIGN_BYTES = 64  # every allocator aligns the start of a buffer at least as much


class Workspace:
    """One buffer that buckets reuse in turn, sized for the largest bucket of the last few steps.

    The first step's buckets may be much larger than all later ones, so the buffer shrinks once the last
    ``STEPS_BEFORE_SHRINKING`` steps needed less.

    On a GPU, kernels still queued in a stream may read a buffer that has been replaced. The allocator does not reuse
    its memory before they are done, because the stream of the kernels is recorded. It waits for the collectives on the
    buffer before another bucket gets it. A CUDA graph replays the addresses that it was captured with. So a buffer used
    in a capture never shrinks and lives as long as the workspace, even after a larger one has replaced it.

    Args:
        device: of the buffer.
        graphs: CUDA graphs of algorithms that use this workspace, where its executor allows them.
    """

    STEPS_BEFORE_SHRINKING = 4

    def __init__(self, device: torch.device, graphs: PiecewiseGraphs | None = None) -> None:
        self.graphs = graphs
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._peaks: deque[int] = deque(maxlen=self.STEPS_BEFORE_SHRINKING)
        self._captured: list[Tensor] = []  # buffers whose addresses a CUDA graph may hold

    @property
    def nbytes(self) -> int:
        """Size of the current buffer in bytes."""
        return self._buffer.nbytes

    def start_step(self) -> None:
        """Mark the start of a step: its first bucket comes next."""
        largest = max(self._peaks, default=0)
        is_known = len(self._peaks) == self.STEPS_BEFORE_SHRINKING
        if is_known and largest < self._buffer.nbytes and not self._is_captured() and not self._is_capturing():
            self._buffer = self._buffer.new_empty(largest)
        self._peaks.append(0)

    def wire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised 1-D tensor, valid until the next call."""
        return self.wires((numel, dtype))[0]

    def wires(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Return an uninitialised 1-D tensor for each (number of elements, dtype), valid until the next call.

        Use them in the current stream only.
        """
        starts, nbytes = [], 0
        for numel, dtype in sizes:
            starts.append(-(-nbytes // ALIGN_BYTES) * ALIGN_BYTES)
            nbytes = starts[-1] + numel * dtype.itemsize
        if not self._peaks:
            self._peaks.append(0)
        self._peaks[-1] = max(self._peaks[-1], nbytes)
        if nbytes > self._buffer.nbytes:
            self._buffer = self._buffer.new_empty(nbytes)
        if self._device.type == "cuda":
            self._buffer.record_stream(torch.cuda.current_stream(self._device))
        if self._is_capturing() and not self._is_captured():
            self._captured.append(self._buffer)
        return [
            self._buffer[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]

    def _is_capturing(self) -> bool:
        if self._device.type != "cuda":
            return False
        with torch.cuda.device(self._device):  # the call asks about the current device
            return torch.cuda.is_current_stream_capturing()

    def _is_captured(self) -> bool:
        return any(buffer is self._buffer for buffer in self._captured)
