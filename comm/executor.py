"""Executors, which run bucket algorithms in bucket order outside the backward pass, and their wire buffers.

Tasks start in the order of submission, which DDP makes the bucket order. So every rank issues the same collectives in
the same order, however long one takes.

- `StreamExecutor`, on a GPU: enqueues kernels and collectives on two side streams. The host never waits.
- `WorkerExecutor`, on a CPU: one worker thread keeps several tasks in flight, over process groups of its own.

After a task has raised, all later tasks fail with the same exception and issue no collectives, which peers would match
with those of the failed task; see `gradwire.comm.connections`.
"""

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
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from gradwire.comm.groups import DESTROY_SECONDS, destroy
from gradwire.comm.plan import Plan
from gradwire.comm.store_collectives import POLL_SECONDS
from gradwire.comm.transport import Algorithm, Driver, GroupTransport, Transport

ALIGN_BYTES = 64  # every allocator aligns the start of a buffer at least as much
CLOSED = (
    "The executor is closed: an exchange failed on its process group, or the group was destroyed. Call resynchronize() "
    "on every rank, or initialize a new group."
)
TWO_THREADS = (
    "Two threads exchange gradients on one process group at the same time. Their collectives could be in a different "
    "order on each rank. Train in one thread, or give each model a process group of its own: dist.new_group()."
)
MAX_TASKS_IN_FLIGHT = 2  # one waits at its first collective while the next is computed; gloo works on as many
EXIT_TIMEOUT_SECONDS = 2.0  # how long tasks in flight may delay the interpreter's exit

_future_of = methodcaller("get_future")


class Workspace:
    """One buffer that buckets reuse in turn, sized for the largest bucket of the last ``STEPS_BEFORE_SHRINKING`` steps.

    On a GPU, queued kernels may still read a buffer that was replaced: `Tensor.record_stream` keeps its memory until
    they are done. A CUDA graph or a `Plan` repeats addresses: a captured buffer lives as long as the workspace, that of
    a plan as long as the plan.

    Args:
        device: device of the buffer.
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
        """Return an uninitialized 1-D tensor per (number of elements, dtype), valid in this stream until the
        next call.
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

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised; every later task fails."""
        return False

    def submit(self, task: Task) -> Future[Any]:
        """Queue a task; its future gets the result or the exception."""
        raise NotImplementedError

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


class WorkerExecutor(Executor):
    """Runs tasks in one worker thread, over two process groups of its own.

    The first collective of each task is issued in task order on the group of ``transport``, later ones on ``later``,
    for the oldest task only. So only the order of the tasks decides the order of collectives on each group.

    Once a task has failed, earlier tasks still finish, and the worker then drops its groups: peers that wait for this
    rank get an error at once. While tasks wait, ``check`` is called every `POLL_SECONDS` and raises RuntimeError to
    fail them; ``announce`` gets the error of a failed task, `POLL_SECONDS` after the last task has ended.

    The thread reads events from a queue: a submitted task, a `_Command`, or the future of a collective that is done.
    """

    def __init__(
        self,
        transport: GroupTransport,
        later: dist.ProcessGroup,
        device: torch.device,
        check: Callable[[], None],
        announce: Callable[[Exception], None],
    ) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._group_transport = transport
        self._later: dist.ProcessGroup | None = later
        self._check = check
        self._announce = announce
        self._is_closed = False
        self._latest: weakref.ref[WorkerTask] | None = None
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The worker thread's own state.
        self._error: Exception | None = None  # the first failure
        self._waiting: deque[WorkerTask] = deque()
        self._in_flight: deque[WorkerTask] = deque()
        self._free = set(range(MAX_TASKS_IN_FLIGHT))  # workspaces
        self._n_awaited = 0  # collectives that have not reported that they are done
        self._is_announced = False
        self._is_ending = False
        self._is_idle = threading.Event()  # set when the thread has ended: no task touches memory any longer
        self._thread = threading.Thread(target=self._work, name="gradwire", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        if self._is_closed:
            raise RuntimeError(CLOSED)
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
                must_announce = self._error is not None and not self._is_announced
                try:
                    self._take(self._events.get(timeout=POLL_SECONDS if self._in_flight or must_announce else None))
                except queue.Empty:
                    if self._in_flight:
                        self._check_peers()
                    else:
                        self._announce_failure()
                self._advance()
                if self._error is not None and not self._in_flight:
                    self._leave()
            self._leave()
        finally:
            self._is_idle.set()

    def _leave(self) -> None:
        """Destroy the groups, which ends all collectives in flight. A rank that waits for this one gets an error."""
        self._group_transport.close()
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

    def _announce_failure(self) -> None:
        """Tell peers, whose gloo may have forgotten the collectives that wait for this rank."""
        if self._error is not None:
            self._is_announced = True
            self._announce(self._error)

    def _take(self, event: Any) -> None:
        """Record an event."""
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
                task.place = min(self._free)  # a bucket usually gets the same workspace in each step: cached views fit
                self._free.remove(task.place)
                self._in_flight.append(task)
                self._step(task)
                continue
            if not self._in_flight:
                return
            task = self._in_flight[0]
            if task.complete is not None:
                self._in_flight.popleft()
                self._free.add(task.place)
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
                task.driver = Driver(begin(self.workspaces[task.place]), self.transport, name, result, on_error)
            collective = task.driver.advance()
            if collective is None:
                task.complete = partial(task.future.set_result, task.driver.result)
                return
            task.works = self._group_transport.start(collective, None if is_first else self._later)
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
        self.place = 0  # index of its workspace
        self.works: list[dist.Work] = []  # works of the awaited collective; holding them keeps gloo's connections open
        self.messages: Future[Any] = Future()  # done when all messages are
        self.complete: Callable[[], None] | None = None  # completes the future; set once the task has ended
        self.precedes_error = False  # whether a later task has failed, which does not stop this one


class _Command(Enum):
    END = "no more tasks will be submitted"
    ABANDON = "unfinished tasks must fail"


def _is_gradwire_frame(frame: FrameType) -> bool:
    """Whether a frame only leads to the algorithm."""
    module: str = frame.f_globals.get("__name__", "")
    return module.startswith(("gradwire.comm.", "gradwire.hooks."))


async def _refuse(_: Workspace) -> None:
    raise RuntimeError(TWO_THREADS)


def _with_traceback_as_text(error: Exception) -> Exception:
    """The error, with its traceback from the algorithm's own frame on as a note.

    Frames would hold the task's future, and the future holds the error: a cycle through C++, which nothing collects.
    """
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _is_gradwire_frame(start.tb_frame):
        start = start.tb_next
    lines = traceback.format_exception(error.with_traceback(start))
    error.add_note(f"In gradwire's worker thread:\n{''.join(lines)}")
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__context__
    return error
