"""`WorkerExecutor`: bucket algorithms in one worker thread, over gloo groups of its own."""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from gradwire.comm.executor import CLOSED, TWO_THREADS, Executor, Task, Workspace
from gradwire.comm.groups import DESTROY_SECONDS, destroy
from gradwire.comm.store_collectives import POLL_SECONDS
from gradwire.comm.transport import GroupTransport, Steps

MAX_TASKS_IN_FLIGHT = 2  # gloo works on two collectives of a group at a time
EXIT_TIMEOUT_SECONDS = 2.0  # how long tasks in flight may delay the interpreter's exit


class WorkerExecutor(Executor):
    """Runs tasks in one worker thread, over two process groups of its own.

    Args:
        transport: its group carries the first collective of every task.
        later: carries every other collective.
        device: device of the gradients.
        check: called every `POLL_SECONDS` while tasks wait for other ranks; raises RuntimeError to fail them.
    """

    def __init__(
        self, transport: GroupTransport, later: dist.ProcessGroup, device: torch.device, check: Callable[[], None]
    ) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._is_closed = False
        self._latest: weakref.ref[_Run] | None = None
        self._worker = _Worker(transport, later, self.workspaces, check)
        self._thread = threading.Thread(target=self._worker.work, name="gradwire", daemon=True)
        self._thread.start()
        # Not at the interpreter's exit, when `Connections.end` closes it, after a notice to the peers.
        weakref.finalize(self, _end, self._worker, self._thread, EXIT_TIMEOUT_SECONDS).atexit = False

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._worker.error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        if self._is_closed:
            raise RuntimeError(CLOSED)
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.thread != threading.get_ident() and not latest.future.done():
            task = _refuse  # fails on all ranks
        run = _Run(task)
        self._latest = weakref.ref(run)
        self._worker.events.put(run)
        return run.future

    def close(self, timeout: float) -> None:  # noqa: D102
        self._is_closed = True
        _end(self._worker, self._thread, timeout)

    def abandon(self) -> None:  # noqa: D102
        self._is_closed = True
        self._worker.events.put(_Event.ABANDON)
        self._worker.is_idle.wait()


class _Run:
    """A submitted task.

    Attributes:
        thread: number of the submitting thread.
        steps: the task's coroutine; None before it starts.
        works: handles of the collective that it awaits, one per message; each keeps connections open.
        messages: done when all messages are.
        complete: completes the future; set once the task has ended.
        precedes_error: whether a later task has failed, which does not stop this one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.thread = threading.get_ident()
        self.future: Future[Any] = Future()
        self.steps: Steps[Any] | None = None
        self.works: list[dist.Work] = []
        self.messages: Future[Any] = Future()
        self.complete: Callable[[], None] | None = None
        self.precedes_error = False


async def _refuse(_: Workspace) -> None:
    raise RuntimeError(TWO_THREADS)


class _Event(Enum):
    DONE = "a collective is done"
    END = "no more tasks will be submitted"
    ABANDON = "unfinished tasks must fail"


_future_of = methodcaller("get_future")
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
        is_idle: set when the loop has ended; no task touches memory any longer.
    """

    def __init__(
        self,
        transport: GroupTransport,
        later: dist.ProcessGroup,
        workspaces: list[Workspace],
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self.events: _Events = queue.SimpleQueue()
        self._transport = transport
        self._later: dist.ProcessGroup | None = later
        self._workspaces = workspaces
        self._free = set(range(len(workspaces)))
        self._n_awaited = 0  # collectives that have not reported that they are done
        self._waiting: deque[_Run] = deque()
        self._in_flight: deque[tuple[_Run, int]] = deque()
        self.error: Exception | None = None
        self._is_ending = False
        self.is_idle = threading.Event()

    def work(self) -> None:
        """Run until END has been received and all tasks submitted before it are done."""
        torch.set_grad_enabled(False)
        torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own
        try:
            while not self._is_ending or self._waiting or self._in_flight:
                self._wait_for_event()
                while self._advance():
                    while not self.events.empty():
                        self._take(self.events.get())
                if self.error is not None and not self._in_flight:
                    self._leave()
            self._leave()
        finally:
            self.is_idle.set()

    def _leave(self) -> None:
        """Destroy the groups, which ends all collectives in flight. A rank that waits for this one gets an error."""
        self._transport.close()
        if self._later is not None:
            last, self._later = [self._later], None
            destroy(last)

    def _wait_for_event(self) -> None:
        """Wait for the next event and record it, or fail all tasks if another rank has left meanwhile.

        gloo may forget a collective whose connection has closed, so its end is no event to rely on.
        """
        try:
            self._take(self.events.get(timeout=POLL_SECONDS if self._in_flight else None))
        except queue.Empty:
            try:
                self._check()
            except RuntimeError as error:
                self.error = RuntimeError(str(error))  # without frames, which would hold this worker
                self._abandon()

    def _take(self, event: _Run | _Event) -> None:
        """Record an event."""
        if isinstance(event, _Run):
            self._waiting.append(event)
        elif event is _Event.DONE:
            self._n_awaited -= 1
        elif event is _Event.END:
            self._is_ending = True
        elif event is _Event.ABANDON:
            self._is_ending = True
            self._abandon()

    def _abandon(self) -> None:
        error = self.error = self.error or RuntimeError("The exchange was abandoned: a rank has left it.")
        self._leave()
        with suppress(queue.Empty):  # collectives that gloo has forgotten report nothing
            while self._n_awaited > 0:
                self._take(self.events.get(timeout=DESTROY_SECONDS))
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
            while run.works:
                run.works.pop(0).wait()
            if self.error is not None and not run.precedes_error:
                self._fail(run, self.error)
                return
            if run.steps is None:
                run.steps = run.task(workspace)
                run.works = self._transport.start(run.steps.send(None))
            else:
                run.works = self._transport.start(run.steps.send(None), self._later)
            # One event for all messages: each wakes this thread, which shares the interpreter lock with the backward.
            run.messages = collect_all(list(map(_future_of, run.works)))
            run.messages.add_done_callback(partial(_wake, self.events))
            self._n_awaited += 1
        except StopIteration as end:
            run.complete = partial(run.future.set_result, end.value)
        except Exception as error:
            self._fail(run, _with_traceback_as_text(error))

    def _fail(self, run: _Run, error: Exception) -> None:
        """Record the first failure; the task's future gets its exception in turn."""
        if self.error is None:
            self.error = error
            for older, _ in self._in_flight:
                if older is run:
                    break
                older.precedes_error = True
        run.works = []
        run.complete = partial(run.future.set_exception, error)


def _wake(events: _Events, _: object) -> None:
    """Report that a collective is done. A collective that gloo has forgotten keeps this callback: it must hold no more.

    With the worker it would hold the error, its frames and so the main module, whose files Python then never closes.
    """
    events.put(_Event.DONE)


def _with_traceback_as_text(error: Exception) -> Exception:
    """The error, with its traceback as a note.

    Frames would hold the task's future, and the future holds the error: a cycle through C++, which nothing collects.
    """
    error.add_note(f"In gradwire's worker thread:\n{''.join(traceback.format_exception(error))}")
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__context__
    return error


def _end(worker: _Worker, thread: threading.Thread, timeout: float) -> None:
    """Let a worker end once its tasks are done; at the interpreter's exit after ``timeout`` seconds in any case.

    No collective may end after the interpreter: this thread would return from C++, or gloo's call back into Python, and
    either aborts the process.
    """
    worker.events.put(_Event.END)
    if thread is not threading.current_thread():
        thread.join(timeout)
        if thread.is_alive() and not threading.main_thread().is_alive():
            worker.events.put(_Event.ABANDON)
            worker.is_idle.wait()
            thread.join()
