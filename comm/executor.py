"""Executors run bucket algorithms in bucket order, off the critical path of the backward pass.

An executor starts tasks in the order of submission, which DDP makes the bucket order on every rank. Every rank issues
the same collectives in the same order, however long each of them takes.

- `StreamExecutor`, on a GPU: enqueues kernels and collectives on two side streams. The host never waits.
- `WorkerExecutor`, on a CPU: one worker thread keeps several tasks in flight. It has process groups of its own: two
  threads that issue collectives on one gloo group take their order from thread timing.

After a task has raised, no later task issues collectives: they would be matched with those that the
peers still issue for the failed task. Every later task fails with the same exception; see
`gradwire.comm.connections` for what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

from gradwire.comm.transport import Steps, Transport
from gradwire.comm.workspace import Workspace

Task = Callable[[Workspace], Steps[Any]]
CLOSED = "The executor is closed: an exchange on its process group failed, or it was destroyed."

TWO_THREADS = (
    "Two threads exchange gradients on one process group at the same time. Their collectives could be in a different "
    "order on each rank. Train in one thread, or give each model a process group of its own: dist.new_group()."
)


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
            task: makes the algorithm's coroutine, for a workspace.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Enqueue the rest of all tasks, so that their futures complete although nobody asks for them."""

    def close(self, timeout: float) -> None:
        """Accept no more tasks, and wait until all submitted ones are done.

        Args:
            timeout: longest wait in seconds; the executor ends later if it is not enough.
        """

    def abandon(self) -> None:
        """Accept no more tasks, and fail all unfinished ones, which may wait for a rank that has left."""
