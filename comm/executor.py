"""Executors, which run bucket algorithms in bucket order outside the backward pass, and their wire buffers.

Tasks start in the order of submission, which DDP makes the bucket order. So every rank issues the same collectives in
the same order, however long one takes.

- `StreamExecutor`, on a GPU: enqueues kernels and collectives on two side streams. The host never waits.
- `WorkerExecutor`, on a CPU: one worker thread keeps several tasks in flight, over process groups of its own.

After a task has raised, all later tasks fail with the same exception and issue no collectives, which peers would match
with those of the failed task; see `gradwire.comm.connections`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.plan import Plan
from gradwire.comm.transport import Algorithm, Transport

ALIGN_BYTES = 64  # every allocator aligns the start of a buffer at least as much
MAX_TASKS_IN_FLIGHT = 2  # one waits at its first collective while the next is computed; gloo works on as many
EXIT_TIMEOUT_SECONDS = 2.0  # how long tasks in flight may delay the interpreter's exit
TWO_THREADS = (
    "Two threads exchange gradients on one process group at the same time. Their collectives could be in a different "
    "order on each rank. Train in one thread, or give each model a process group of its own: dist.new_group()."
)


class Workspace:
    """One buffer that buckets reuse in turn, sized for the largest bucket of the last ``STEPS_BEFORE_SHRINKING`` steps.

    On a GPU, queued kernels may still read a buffer that was replaced: `Tensor.record_stream` keeps its memory until
    they are done. A CUDA graph or a `Plan` repeats addresses: a captured buffer lives as long as the workspace, that of
    a plan as long as the plan.
    """

    STEPS_BEFORE_SHRINKING = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._peaks: deque[int] = deque(maxlen=self.STEPS_BEFORE_SHRINKING)
        self._captured: list[Tensor] = []  # buffers whose addresses a CUDA graph may hold
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()  # plans that hold addresses of their ``buffer``

    @property
    def nbytes(self) -> int:
        """Size of the current buffer in bytes."""
        return self._buffer.nbytes

    def start_step(self) -> None:
        """Mark the start of a step: its first bucket comes next."""
        largest = max(self._peaks, default=0)
        is_known = len(self._peaks) == self.STEPS_BEFORE_SHRINKING
        if is_known and largest < self._buffer.nbytes and not self._is_kept() and not self._is_capturing():
            self._buffer = self._buffer.new_empty(largest)
        self._peaks.append(0)

    def wire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D tensor, valid until the next call."""
        return self.wires((numel, dtype))[0]

    def wires(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Return an uninitialized 1-D tensor per (number of elements, dtype), valid until the next call."""
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
            self._buffer.record_stream(torch.cuda.current_stream(self._device.index))
            if self._is_capturing() and not self._is_kept():
                self._captured.append(self._buffer)
        wires = []
        for start, (numel, dtype) in zip(starts, sizes, strict=True):
            wires.append(self._buffer[start : start + numel * dtype.itemsize].view(dtype))
        return wires

    def keep_buffer(self, plan: Plan) -> None:
        """Let a plan own the current buffer, which is not shrunk while the plan lives."""
        plan.buffer = self._buffer
        self._plans.add(plan)

    def _is_capturing(self) -> bool:
        if self._device.type != "cuda":
            return False
        with torch.cuda.device(self._device.index):  # the call asks about the current device
            return torch.cuda.is_current_stream_capturing()

    def _is_kept(self) -> bool:
        buffers = [*self._captured, *(plan.buffer for plan in self._plans)]
        return any(buffer is self._buffer for buffer in buffers)


class Task(NamedTuple):
    """An algorithm for an executor to run."""

    begin: Callable[[Workspace], Algorithm[Any]]  # creates the algorithm
    name: str = "gradwire::task"  # common part of the names of its profiler ranges
    result: Tensor | None = None  # the value of its future; None: what the algorithm returns
    on_error: Callable[[], None] | None = None  # called while an error of the algorithm is handled


class Executor:
    """Runs tasks in order, over ``transport``. One per process group and device; see `executor_for`.

    A task that is in flight has one of the ``workspaces``.
    """

    def __init__(self, transport: Transport, workspaces: list[Workspace]) -> None:
        self.transport = transport
        self.workspaces = workspaces
        self._error: Exception | None = None  # the first failure

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised; every later task fails."""
        return self._error is not None

    def submit(self, task: Task) -> Future[Any]:
        """Queue a task; its future gets the result or the exception."""
        raise NotImplementedError

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors until the tasks submitted so far are done, also if nobody refers to it before."""

    def start_step(self) -> None:
        """Mark the start of a step in all workspaces; see `Workspace.start_step`."""
        for workspace in self.workspaces:
            workspace.start_step()

    def finish(self) -> None:
        """Enqueue the rest of all tasks, so that their futures complete without being asked."""

    def close(self, timeout: float) -> None:
        """Accept no more tasks, and wait until all submitted ones are done, or for ``timeout`` seconds."""

    def abandon(self) -> None:
        """Accept no more tasks, and fail all unfinished ones, which may wait for a rank that has left."""

    def join(self) -> None:
        """On a GPU, let the current stream wait for all that is enqueued; the host does not wait."""
