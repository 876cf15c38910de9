"""`WorkerExecutor`: bucket algorithms in one worker thread, over gloo groups of its own."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from gradwire.comm.executor import CLOSED, Executor, Task, let_go_of_locals
from gradwire.comm.transport import GroupTransport, Steps
from gradwire.comm.workspace import Workspace

MAX_TASKS_IN_FLIGHT = 2  # gloo works on two collectives of a group at a time
EXIT_TIMEOUT_SECONDS = 2.0  # how long a worker that waits for a lost peer may delay the interpreter's exit


class WorkerExecutor(Executor):
    """Runs tasks in one worker thread, over two process groups that nobody else uses.

    Args:
        transport: its group carries the first collective of every task.
        later: carries every other collective.
        device: of the gradients.
    """

    def __init__(self, transport: GroupTransport, later: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._is_closed = False
        self._worker = _Worker(transport, later, self.workspaces)
        self._thread = threading.Thread(target=self._worker.work, name="gradwire", daemon=True)
        self._thread.start()
        # Runs at interpreter exit too: a thread that returns from C++ after that aborts the process.
        weakref.finalize(self, _end, self._worker.events, self._thread, EXIT_TIMEOUT_SECONDS)

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._worker.error is not None

    def submit(self, task: Task, *, is_last: bool = False) -> Future[Any]:  # noqa: D102
        if self._is_closed:
            raise RuntimeError(CLOSED)
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
    """A submitted task.

    Attributes:
        steps: the task's coroutine; None before it starts.
        works: handles of the collective that it awaits, one per message.
        messages: done when all of these are.
        complete: completes the future; set once the task has ended.
        precedes_error: whether a later task has failed, which does not stop this one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.future: Future[Any] = Future()
        self.steps: Steps[Any] | None = None
        self.works: list[dist.Work] = []
        self.messages: Future[Any] = Future()
        self.complete: Callable[[], None] | None = None
        self.precedes_error = False

    def wait(self) -> None:
        """Wait for the awaited collective and drop its works, each of which keeps connections open."""
        while self.works:
            self.works.pop(0).wait()


class _Event(Enum):
    DONE = "a collective is done"
    END = "no more tasks will be submitted"
    ABANDON = "unfinished tasks must fail"


_Events = queue.SimpleQueue[_Run | _Event]


class _Worker:
    """The worker thread's event loop; an event is a submitted task (`_Run`) or an `_Event`.

    The first collective of each task is issued in task order on one process group. Later
    collectives are issued for the oldest task only, on the other group. So on each group all ranks
    issue collectives in the same order, which only the order of the tasks decides.

    Once a task has failed, earlier tasks still finish, later ones issue no more collectives, and the worker drops its
    groups. That closes their connections, so a peer that waits for this rank gets an error at once.

    Attributes:
        events: the queue that the loop reads.
        error: the first failure.
        is_idle: set when the loop has ended.
    """

    def __init__(self, transport: GroupTransport, later: dist.ProcessGroup, workspaces: list[Workspace]) -> None:
        self.events: _Events = queue.SimpleQueue()
        self._transport = transport
        self._later: dist.ProcessGroup | None = later
        self._workspaces = workspaces
        self._free = set(range(len(workspaces)))
        self._waiting: deque[_Run] = deque()
        self._in_flight: deque[tuple[_Run, int]] = deque()
        self.error: Exception | None = None
        self._is_ending = False
        self.is_idle = threading.Event()

    def work(self) -> None:
        """Run until END has been received and all tasks submitted before it are done."""
        torch.set_grad_enabled(False)
        torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own
        while not self._is_ending or self._waiting or self._in_flight:
            self._take(self.events.get())
            while self._advance():
                while not self.events.empty():
                    self._take(self.events.get())
            if self.error is not None and not self._in_flight:
                self._leave()
        self.is_idle.set()
        self._leave()

    def _leave(self) -> None:
        self._transport.close(timeout=0)
        self._later = None

    def _take(self, event: _Run | _Event) -> None:
        """Record an event."""
        if isinstance(event, _Run):
            self._waiting.append(event)
        elif event is _Event.END:
            self._is_ending = True
        elif event is _Event.ABANDON:
            self._is_ending = True
            self._abandon()

    def _abandon(self) -> None:
        error = self.error = self.error or RuntimeError("The exchange was abandoned: a rank has left it.")
        for run, _ in self._in_flight:
            run.works = []
            run.complete = run.complete or partial(run.future.set_exception, error)

    def _advance(self) -> bool:
        """Start a task, or advance the oldest one. Returns whether there was anything to do."""
        if self._waiting and self._free:
            # A bucket usually gets the same workspace in each step, so cached views fit.
            run, place = self._waiting.popleft(), min(self._free)
            self._free.remove(place)
            self._in_flight.append((run, place))
            self._step(run, self._workspaces[place])
            return True
        if not self._in_flight:
            return False
        run, place = self._in_flight[0]
        if run.complete is not None:
            self._in_flight.popleft()
            self._free.add(place)
            complete = run.complete
            del run  # a task holds gradients; it must not outlive its step
            complete()
            return True
        if run.messages.done():
            self._step(run, self._workspaces[place])
            return True
        return False

    def _step(self, run: _Run, workspace: Workspace) -> None:
        """Run a task up to its next collective, and launch that."""
        try:
            run.wait()
            if self.error is not None and not run.precedes_error:
                raise self.error
            if run.steps is None:
                run.steps = run.task(workspace)
                run.works = self._transport.start(run.steps.send(None))
            else:
                run.works = self._transport.start(run.steps.send(None), self._later)
            # One event for all messages: each wakes this thread, which shares the interpreter lock with the backward.
            run.messages = collect_all([work.get_future() for work in run.works])
            run.messages.add_done_callback(self._wake)
        except StopIteration as end:
            run.complete = partial(run.future.set_result, end.value)
        except Exception as error:
            self._fail(run, error)

    def _fail(self, run: _Run, error: Exception) -> None:
        """Record the first failure; the task's future gets its exception in turn."""
        if self.error is None:
            self.error = error
            for older, _ in self._in_flight:
                if older is run:
                    break
                older.precedes_error = True
        run.works = []
        let_go_of_locals(error)
        run.complete = partial(run.future.set_exception, error)

    def _wake(self, _: object) -> None:
        self.events.put(_Event.DONE)


def _end(events: _Events, thread: threading.Thread, timeout: float) -> None:
    events.put(_Event.END)
    if thread is not threading.current_thread():
        thread.join(timeout)
