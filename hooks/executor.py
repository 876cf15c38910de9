"""Executors: run the bucket algorithms in bucket order, off the critical path of the backward pass.

An algorithm is straight-line code that awaits its collectives. An executor begins them in the order of submission,
which DDP makes the order of buckets on every rank, and runs them such that every rank issues the same collectives in
the same order, however long each of them takes.

- On a GPU, a side stream: the algorithm is enqueued at once, and nothing waits on the host. Workspaces are used on
  that stream only.
- On a CPU, a worker thread, which has several algorithms under way: see `_Worker`. It has process groups of its own,
  because two threads that issue collectives on one gloo group take their order from thread timing.

A task that raises is the last one that issues collectives: later ones would meet those that its peers still issue for
it. Every later task fails with the same exception; see `gradwire.hooks.connections` for what follows.
"""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.compress import Steps, Transport, Workspace
from gradwire.kernels import SegmentTable

# Algorithms that a worker has under way at once: gloo works on two collectives of a group at a time.
UNDER_WAY = 2
# Seconds that a worker which waits for a lost peer may hold up the exit of the interpreter.
EXIT_LIMIT = 2.0

Task = Callable[[Workspace], Steps[Any]]
Tables = dict[tuple[int, int, torch.dtype], SegmentTable]  # by bucket index, number of elements and dtype


class Executor:
    """Runs tasks in order. One per process group and device; see `gradwire.hooks.connections.executor_for`.

    Attributes:
        transport: the collectives that tasks use.
        workspaces: the wire memory that tasks use, one for each that may be under way.
        tables: the layouts of flat buckets, kept from step to step.
    """

    def __init__(self, transport: Transport, workspaces: list[Workspace]) -> None:
        self.transport = transport
        self.workspaces = workspaces
        self.tables: Tables = {}

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised, after which every task fails."""
        raise NotImplementedError

    def submit(self, task: Task) -> Future[Any]:
        """Run ``task`` in its turn; the future holds its result or its exception. Futures complete in order."""
        raise NotImplementedError

    def close(self, timeout: float) -> None:
        """Take no more tasks, and end when those that were submitted are done.

        Args:
            timeout: seconds to wait for that end.
        """

    def abandon(self) -> None:
        """Take no more tasks, and fail those that are not done, which may wait for a rank that has left."""


class StreamExecutor(Executor):
    """Runs tasks on a CUDA side stream, which first waits for the work already in the current stream."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device)])
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future: Future[Any] = Future(devices=[self._device])
        if self._error is not None:
            future.set_exception(self._error)
            return future
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            try:
                future.set_result(self._run(task(*self.workspaces)))
            except Exception as error:
                self._error = error
                future.set_exception(error)
        return future

    def _run(self, steps: Steps[Any]) -> Any:
        while True:
            try:
                collective = steps.send(None)
            except StopIteration as end:
                return end.value
            self.transport.run(collective)


class WorkerExecutor(Executor):
    """Runs tasks in one thread, over two process groups that nobody else uses.

    Args:
        transport: its group carries the first collective of every task.
        later: carries all others.
        device: of the gradients.
    """

    def __init__(self, transport: Transport, later: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(UNDER_WAY)])
        self._is_closed = False
        self._worker = _Worker(transport, later, self.workspaces)
        self._thread = threading.Thread(target=self._worker.work, name="gradwire", daemon=True)
        self._thread.start()
        # Also when the interpreter exits: a thread that returns from C++ later than that aborts it.
        weakref.finalize(self, _end, self._worker.events, self._thread, EXIT_LIMIT)

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._worker.error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        if self._is_closed:
            raise RuntimeError("The executor is closed: an exchange on its process group failed, or it was destroyed.")
        run = _Run(task)
        self._worker.events.put(run)
        return run.future

    def close(self, timeout: float) -> None:  # noqa: D102
        self._is_closed = True
        _end(self._worker.events, self._thread, timeout)

    def abandon(self) -> None:  # noqa: D102
        self._is_closed = True
        self._worker.events.put(_Event.ABANDON)
        self._worker.is_idle.wait()


class _Run:
    """A task under way, or not yet begun.

    Attributes:
        steps: the coroutine, once it has begun.
        works: of the collective that it awaits.
        ends: completes the future, once there is nothing more to do.
        precedes_error: whether a younger task has failed, which does not keep this one from its end.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.future: Future[Any] = Future()
        self.steps: Steps[Any] | None = None
        self.works: list[dist.Work] = []
        self.ends: Callable[[], None] | None = None
        self.precedes_error = False

    def wait(self) -> None:
        """Wait for the collective that it awaits, and let go of it: as long as a work lives, so do its connections."""
        while self.works:
            self.works.pop(0).wait()


class _Event(Enum):
    DONE = "a collective is done"
    END = "no more tasks come"
    ABANDON = "no collective is worth waiting for"


_Events = queue.SimpleQueue[_Run | _Event]


class _Worker:
    """A thread's loop over what happens: a task comes, a collective is done.

    The first collectives of all tasks are issued in the order of the tasks, on one process group; the others are issued
    for the oldest task only, on another group. So each group sees one order on all ranks, which follows from the order
    of the tasks alone.

    Once a task has failed, older ones come to their end, younger ones issue no more collectives, and the worker lets go
    of its groups. That closes their connections, so that a rank that waits for this one gets an error at once.
    """

    def __init__(self, transport: Transport, later: dist.ProcessGroup, workspaces: list[Workspace]) -> None:
        self.events: _Events = queue.SimpleQueue()
        self._transport = transport
        self._later: dist.ProcessGroup | None = later
        self._workspaces = workspaces
        self._free = set(range(len(workspaces)))
        self._waiting: deque[_Run] = deque()
        self._under_way: deque[tuple[_Run, int]] = deque()
        self.error: Exception | None = None
        self._is_ending = False
        self.is_idle = threading.Event()

    def work(self) -> None:
        """Until the end has come, and all tasks before it are done."""
        torch.set_grad_enabled(False)
        torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own
        while not self._is_ending or self._waiting or self._under_way:
            self._take(self.events.get())
            while self._advance():
                while not self.events.empty():
                    self._take(self.events.get())
            if self.error is not None and not self._under_way:
                self._leave()
        self.is_idle.set()
        self._leave()

    def _leave(self) -> None:
        self._transport.close(timeout=0)
        self._later = None

    def _take(self, event: _Run | _Event) -> None:
        """Note what has happened."""
        if isinstance(event, _Run):
            self._waiting.append(event)
        elif event is _Event.END:
            self._is_ending = True
        elif event is _Event.ABANDON:
            self._is_ending = True
            self._abandon()

    def _abandon(self) -> None:
        error = self.error = self.error or RuntimeError("The exchange was given up: a rank has left it.")
        for run, _ in self._under_way:
            run.works = []
            run.ends = run.ends or partial(run.future.set_exception, error)

    def _advance(self) -> bool:
        """Begin a task, or go on with the oldest. Returns whether there was something to do."""
        if self._waiting and self._free:
            run, place = self._waiting.popleft(), min(self._free)  # the same in every step, as a rule: views are kept
            self._free.remove(place)
            self._under_way.append((run, place))
            self._step(run, self._workspaces[place])
            return True
        if not self._under_way:
            return False
        run, place = self._under_way[0]
        if run.ends is not None:
            self._under_way.popleft()
            self._free.add(place)
            complete = run.ends
            del run  # a task holds gradients; it must not outlive its step
            complete()
            return True
        if all(work.get_future().done() for work in run.works):
            self._step(run, self._workspaces[place])
            return True
        return False

    def _step(self, run: _Run, workspace: Workspace) -> None:
        """Let a task run until its next collective, and issue that."""
        try:
            run.wait()
            if self.error is not None and not run.precedes_error:
                raise self.error
            if run.steps is None:
                run.steps = run.task(workspace)
                run.works = self._transport.start(run.steps.send(None))
            else:
                run.works = self._transport.start(run.steps.send(None), self._later)
            for work in run.works:
                work.get_future().add_done_callback(self._wake)
        except StopIteration as end:
            run.ends = partial(run.future.set_result, end.value)
        except Exception as error:
            self._fail(run, error)

    def _fail(self, run: _Run, error: Exception) -> None:
        """Note the first failure; complete the task's future with its exception in its turn."""
        if self.error is None:
            self.error = error
            for older, _ in self._under_way:
                if older is run:
                    break
                older.precedes_error = True
        run.works = []
        let_go_of_locals(error)
        run.ends = partial(run.future.set_exception, error)

    def _wake(self, _: object) -> None:
        self.events.put(_Event.DONE)


def let_go_of_locals(error: BaseException | None) -> None:
    """Clear the local variables of the frames that ``error`` came through: a work there keeps connections open."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _end(events: _Events, thread: threading.Thread, timeout: float) -> None:
    events.put(_Event.END)
    if thread is not threading.current_thread():
        thread.join(timeout)
