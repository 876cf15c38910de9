"""`WorkerExecutor`: bucket algorithms in a worker thread, over gloo groups of its own."""

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

from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT, TWO_THREADS, Executor, Task, Workspace
from gradwire.comm.groups import DESTROY_SECONDS, destroy
from gradwire.comm.store_collectives import POLL_SECONDS
from gradwire.comm.transport import CLOSED, Driver, GroupTransport

_future_of = methodcaller("get_future")


class WorkerExecutor(Executor):
    """Runs tasks in one worker thread, over two process groups of its own.

    The first collective of each task is issued in task order on the group of ``transport``, later ones on ``later``,
    for the oldest task only. So only the order of the tasks decides the order of collectives on each group.

    Once a task has failed, earlier tasks still finish, and the worker then drops its groups: peers that wait for this
    rank get an error at once. While tasks wait, ``check`` is called every `POLL_SECONDS` and raises RuntimeError to
    fail them; ``announce`` gets the error of a failed task, `POLL_SECONDS` after the last task has ended.

    The thread reads events from a queue: a submitted task, a `_Command`, or the future of a collective that is done.
    """

    transport: GroupTransport

    def __init__(
        self,
        transport: GroupTransport,
        later: dist.ProcessGroup,
        device: torch.device,
        check: Callable[[], None],
        announce: Callable[[Exception], None],
    ) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._later: dist.ProcessGroup | None = later
        self._check = check
        self._announce = announce
        self._is_closed = False
        self._latest: weakref.ref[WorkerTask] | None = None
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The worker thread's own state.
        self._waiting: deque[WorkerTask] = deque()
        self._in_flight: deque[WorkerTask] = deque()
        self._free = set(range(MAX_TASKS_IN_FLIGHT))  # workspaces
        self._n_awaited = 0  # collectives that have not reported that they are done
        self._is_announced = False
        self._is_ending = False
        self._is_idle = threading.Event()  # set when the thread has ended: no task touches memory any longer
        self._thread = threading.Thread(target=self._work, name="gradwire", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        if self._is_closed:
            raise RuntimeError(CLOSED.format("The executor"))
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.thread != threading.get_ident() and not latest.future.done():
            task = task._replace(begin=_refuse)  # fails on all ranks
        submitted = WorkerTask(task)
        self._latest = weakref.ref(submitted)
        self._events.put(submitted)
        return submitted.future

    def close(self, timeout: float) -> None:
        """Let the worker end once its tasks are done; at the interpreter's exit after ``timeout`` in any case."""
        self._is_closed = True
        self._events.put(_Command.END)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive() and not threading.main_thread().is_alive():
                self.abandon()
                self._thread.join()

    def abandon(self) -> None:  # noqa: D102
        self._is_closed = True
        self._events.put(_Command.ABANDON)
        self._is_idle.wait()

    # In the worker thread.

    def _work(self) -> None:
        """Run until END has been received and all tasks submitted before it are done."""
        torch.set_grad_enabled(False)
        torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own
        try:
            while not self._is_ending or self._waiting or self._in_flight:
                unannounced = None if self._is_announced else self._error
                may_wait = not self._in_flight and unannounced is None
                try:
                    self._take(self._events.get(timeout=None if may_wait else POLL_SECONDS))
                except queue.Empty:
                    if self._in_flight:
                        self._check_peers()
                    elif unannounced is not None:
                        self._is_announced = True
                        # gloo may have forgotten the peers' collectives that wait for this rank.
                        self._announce(unannounced)
                self._advance()
                if self._error is not None and not self._in_flight:
                    self._leave()
            self._leave()
        finally:
            self._is_idle.set()

    def _leave(self) -> None:
        """Destroy the groups, which ends all collectives in flight. A rank that waits for this one gets an error."""
        self.transport.close()
        if self._later is not None:
            last, self._later = [self._later], None
            destroy(last)

    def _check_peers(self) -> None:
        """Fail all tasks if another rank has left: gloo may forget a collective whose connection has closed."""
        try:
            self._check()
        except RuntimeError as error:
            self._error = RuntimeError(str(error))  # without frames, which would hold this executor
            self._abandon()

    def _take(self, event: Any) -> None:
        if isinstance(event, WorkerTask):
            self._waiting.append(event)
        elif isinstance(event, _Command):
            self._is_ending = True
            if event is _Command.ABANDON:
                self._abandon()
        else:
            self._n_awaited -= 1

    def _abandon(self) -> None:
        error = self._error = self._error or RuntimeError("The exchange was abandoned: a rank has left it.")
        self._leave()
        with suppress(queue.Empty):  # collectives that gloo has forgotten report nothing
            while self._n_awaited > 0:
                self._take(self._events.get(timeout=DESTROY_SECONDS))
        for task in self._in_flight:
            task.works = []
            task.complete = task.complete or partial(task.future.set_exception, error)

    def _advance(self) -> None:
        """Start tasks, and advance the oldest one, until all wait for collectives or there are none."""
        while True:
            while not self._events.empty():
                self._take(self._events.get())
            if self._waiting and self._free:
                task = self._waiting.popleft()
                # A bucket usually gets the same workspace in each step: cached views fit.
                task.workspace_index = min(self._free)
                self._free.remove(task.workspace_index)
                self._in_flight.append(task)
                self._step(task)
                continue
            if not self._in_flight:
                return
            task = self._in_flight[0]
            if task.complete is not None:
                self._in_flight.popleft()
                self._free.add(task.workspace_index)
                complete = task.complete
                del task  # it holds gradients, and must not outlive its step
                complete()
                del complete
            elif task.messages.done():
                self._step(task)
            else:
                return

    def _step(self, task: WorkerTask) -> None:
        """Run a task up to its next collective, and launch that."""
        try:
            while task.works:
                task.works.pop(0).wait()
            if self._error is not None and not task.precedes_error:
                self._fail(task, self._error)
                return
            is_first = task.driver is None
            if task.driver is None:
                begin, name, result, on_error = task.task
                task.driver = Driver(
                    begin(self.workspaces[task.workspace_index]), self.transport, name, result, on_error
                )
            collective = task.driver.advance()
            if collective is None:
                task.complete = partial(task.future.set_result, task.driver.result)
                return
            task.works = self.transport.start(collective, None if is_first else self._later)
            # One event for all messages: each wakes this thread, which shares the interpreter lock with the backward.
            task.messages = collect_all(list(map(_future_of, task.works)))
            # A collective that gloo has forgotten keeps this callback, which must hold the queue only: the executor
            # holds errors, their frames and so the main module, whose files Python then never closes.
            task.messages.add_done_callback(self._events.put)
            self._n_awaited += 1
        except Exception as error:
            self._fail(task, _with_traceback_as_text(error))

    def _fail(self, task: WorkerTask, error: Exception) -> None:
        """Record the first failure; the task's future gets its exception in turn."""
        if self._error is None:
            self._error = error
            for older in self._in_flight:
                if older is task:
                    break
                older.precedes_error = True
        task.works = []
        task.complete = partial(task.future.set_exception, error)


class WorkerTask:
    """A submitted task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.thread = threading.get_ident()  # the submitting one
        self.future: Future[Any] = Future()
        self.driver: Driver[Any] | None = None  # None before it starts
        self.workspace_index = 0
        self.works: list[dist.Work] = []  # works of the awaited collective; holding them keeps gloo's connections open
        self.messages: Future[Any] = Future()  # done when all messages are
        self.complete: Callable[[], None] | None = None  # completes the future; set once the task has ended
        self.precedes_error = False  # whether a later task has failed, which does not stop this one


class _Command(Enum):
    END = "no more tasks will be submitted"
    ABANDON = "unfinished tasks must fail"


async def _refuse(_: Workspace) -> None:
    raise RuntimeError(TWO_THREADS)


def _with_traceback_as_text(error: Exception) -> Exception:
    """The error, with its traceback from the algorithm's own frame on as a note.

    Frames would hold the task's future, and the future holds the error: a cycle through C++, which nothing collects.
    """
    start, packages = error.__traceback__, ("gradwire.comm.", "gradwire.hooks.")  # that only lead to the algorithm
    while start and start.tb_next and start.tb_frame.f_globals.get("__name__", "").startswith(packages):
        start = start.tb_next
    lines = traceback.format_exception(error.with_traceback(start))
    error.add_note(f"In gradwire's worker thread:\n{''.join(lines)}")
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__context__
    return error
