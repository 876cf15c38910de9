"""Workspace: the wire memory of a bucket under way."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from gradwire.kernels import is_capturing

# Bytes; a buffer on any device begins at least so aligned.
ALIGNMENT = 64


class Workspace:
    """One buffer that buckets reuse in turn, as large as the largest that it held in the last few steps.

    The first step's buckets may be much larger than all later ones, so the buffer shrinks when the last `MEMORY` steps
    needed less.

    On a GPU, a buffer that is replaced may still be read by kernels that wait in a stream. Its memory is not given to
    anybody else before these are done: the allocator knows of every stream in which the buffer was handed out.
    A CUDA graph holds the addresses that it was captured with, and replays them at any time. So a buffer that was
    handed out during a capture never shrinks, and lives as long as the workspace, also after a larger one has taken
    its place.
    """

    MEMORY = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._peaks: deque[int] = deque(maxlen=self.MEMORY)
        self._captured: list[Tensor] = []  # buffers whose addresses a CUDA graph may hold

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that is handed out now."""
        return self._buffer.nbytes

    def start_step(self) -> None:
        """Tell that the first bucket of a step comes next."""
        largest = max(self._peaks, default=0)
        is_known = len(self._peaks) == self.MEMORY
        if is_known and largest < self._buffer.nbytes and not self._is_captured() and not is_capturing(self._device):
            self._buffer = self._buffer.new_empty(largest)
        self._peaks.append(0)

    def wire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor, not initialised, valid until the next call."""
        return self.wires((numel, dtype))[0]

    def wires(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """A 1-D tensor for each number of elements and dtype, not initialised, valid until the next call.

        The caller uses them in the current stream.
        """
        starts, nbytes = [], 0
        for numel, dtype in sizes:
            starts.append(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            nbytes = starts[-1] + numel * dtype.itemsize
        if not self._peaks:
            self._peaks.append(0)
        self._peaks[-1] = max(self._peaks[-1], nbytes)
        if nbytes > self._buffer.nbytes:
            self._buffer = self._buffer.new_empty(nbytes)
        if self._device.type == "cuda":
            self._buffer.record_stream(torch.cuda.current_stream(self._device))
        if is_capturing(self._device) and not self._is_captured():
            self._captured.append(self._buffer)
        return [
            self._buffer[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]

    def _is_captured(self) -> bool:
        return any(buffer is self._buffer for buffer in self._captured)
