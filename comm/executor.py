"""Executors, which run bucket algorithms in bucket order outside the backward pass, and their wire buffers.

An executor starts tasks in the order of submission, which DDP makes the bucket order on every rank. Every rank issues
the same collectives in the same order, however long a collective takes.

- `StreamExecutor`, on a GPU: enqueues kernels and collectives on two side streams. The host never waits.
- `WorkerExecutor`, on a CPU: one worker thread keeps several tasks in flight. It has process groups of its own: two
  threads that issue collectives on one gloo group take their order from thread timing.

After a task has raised, no later task issues collectives: they would be matched with those that the
peers still issue for the failed task. Every later task fails with the same exception; see
`gradwire.comm.connections` for the consequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.graphs import PiecewiseGraphs
from gradwire.comm.transport import Steps, Transport

ALIGN_BYTES = 64  # every allocator aligns the start of a buffer at least as much
CLOSED = "The executor is closed: an exchange on its process group failed, or it was destroyed."
TWO_THREADS = (
    "Two threads exchange gradients on one process group at the same time. Their collectives could be in a different "
    "order on each rank. Train in one thread, or give each model a process group of its own: dist.new_group()."
)


class Workspace:
    """One buffer that buckets reuse in turn, sized for the largest bucket of the last few steps.

    The first step's buckets may be much larger than all later ones, so the buffer shrinks once the last
    ``STEPS_BEFORE_SHRINKING`` steps needed less.

    On a GPU, kernels still queued in a stream may read a buffer that has been replaced. The allocator does not reuse
    its memory before they are done, because the stream of the kernels is recorded. It waits for the collectives on the
    buffer before another bucket gets it. A CUDA graph replays the addresses that it was captured with. So a buffer used
    in a capture never shrinks and lives as long as the workspace, even after a larger one has replaced it.

    Args:
        device: device of the buffer.
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
        """Return an uninitialized 1-D tensor, valid until the next call."""
        return self.wires((numel, dtype))[0]

    def wires(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Return an uninitialized 1-D tensor for each (number of elements, dtype), valid until the next call.

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
        wires = []
        for start, (numel, dtype) in zip(starts, sizes, strict=True):
            wires.append(self._buffer[start : start + numel * dtype.itemsize].view(dtype))
        return wires

    def _is_capturing(self) -> bool:
        if self._device.type != "cuda":
            return False
        with torch.cuda.device(self._device):  # the call asks about the current device
            return torch.cuda.is_current_stream_capturing()

    def _is_captured(self) -> bool:
        return any(buffer is self._buffer for buffer in self._captured)


Task = Callable[[Workspace], Steps[Any]]


class Executor:
    """Runs tasks in order. One per process group and device; see `gradwire.comm.connections.executor_for`.

    Attributes:
        transport: the collectives that tasks await.
        workspaces: wire buffers, one for each task that may be in flight.
    """

    def __init__(self, transport: Transport, workspaces: list[Workspace]) -> None:
        self.transport = transport
        self.workspaces = workspaces

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised; every later task fails."""
        raise NotImplementedError

    def submit(self, task: Task) -> Future[Any]:
        """Queue ``task``; its future gets the result or the exception. Futures complete in order.

        Args:
            task: function from a workspace to the algorithm's coroutine.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Enqueue the rest of all tasks, so that their futures complete without being asked."""

    def close(self, timeout: float) -> None:
        """Accept no more tasks, and wait until all submitted ones are done.

        Args:
            timeout: longest wait in seconds; the executor ends later if it is not enough.
        """

    def abandon(self) -> None:
        """Accept no more tasks, and fail all unfinished ones, which may wait for a rank that has left."""
