"""Executors: run the bucket algorithms in bucket order, off the critical path of the backward pass.

An algorithm is straight-line code that awaits its collectives. An executor begins them in the order of submission,
which DDP makes the order of buckets on every rank, and runs them such that every rank issues the same collectives in
the same order, however long each of them takes.

- On a GPU, a side stream: the algorithm is enqueued at once, and nothing waits on the host. Workspaces are used on
  that stream only.
- On a CPU, a worker thread, which has several algorithms under way: see `_Worker`. It has process groups of its own,
  because two threads that issue collectives on one gloo group take their order from thread timing.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
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
    """Runs tasks in order. One per process group and device; see `executor_for`.

    Attributes:
        transport: the collectives that tasks use.
        workspaces: the wire memory that tasks use, one for each that may be under way.
        tables: the layouts of flat buckets, kept from step to step.
    """

    def __init__(self, transport: Transport, workspaces: list[Workspace]) -> None:
        self.transport = transport
        self.workspaces = workspaces
        self.tables: Tables = {}

    def submit(self, task: Task) -> Future[Any]:
        """Run ``task`` in its turn; the future holds its result or its exception. Futures complete in order."""
        raise NotImplementedError


class StreamExecutor(Executor):
    """Runs tasks on a CUDA side stream, which first waits for the work already in the current stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(Transport(group), [Workspace(device)])
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future: Future[Any] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            try:
                future.set_result(self._run(task(*self.workspaces)))
            except Exception as error:
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
    """Runs tasks in one thread, over process groups of its own with the same ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        first, later = (_twin_group(group, name) for name in ("first", "later"))
        super().__init__(Transport(first), [Workspace(device) for _ in range(UNDER_WAY)])
        worker = _Worker(self.transport, later, self.workspaces)
        self._events = worker.events
        thread = threading.Thread(target=worker.work, name="gradwire", daemon=True)
        thread.start()
        weakref.finalize(self, _end, worker.events, thread)

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        run = _Run(task)
        self._events.put(run)
        return run.future


class _Run:
    """A task under way, or not yet begun."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.future: Future[Any] = Future()
        self.steps: Steps[Any] | None = None
        self.works: list[dist.Work] = []  # of the collective that it awaits
        self.ends: Callable[[], None] | None = None  # completes the future, once there is nothing more to do


class _Event(Enum):
    DONE = "a collective is done"
    END = "no more tasks come"


_Events = queue.SimpleQueue[_Run | _Event]


class _Worker:
    """A thread's loop over what happens: a task comes, a collective is done.

    The first collectives of all tasks are issued in the order of the tasks, on one process group; what follows is done
    for the oldest task only, with its other collectives on another group. So each of the groups sees one order on
    all ranks, which follows from the order of the tasks alone.
    """

    def __init__(self, transport: Transport, later: dist.ProcessGroup, workspaces: list[Workspace]) -> None:
        self.events: _Events = queue.SimpleQueue()
        self._transport = transport
        self._later = later
        self._workspaces = workspaces
        self._free = set(range(len(workspaces)))
        self._waiting: deque[_Run] = deque()
        self._under_way: deque[tuple[_Run, int]] = deque()

    def work(self) -> None:
        """Until the end has come, and all tasks before it are done."""
        torch.set_grad_enabled(False)
        torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own
        is_ending = False
        while not is_ending or self._waiting or self._under_way:
            is_ending |= self._take(self.events.get())
            while self._advance():
                while not self.events.empty():
                    is_ending |= self._take(self.events.get())

    def _take(self, event: _Run | _Event) -> bool:
        """Note what has happened; whether it is the end."""
        if isinstance(event, _Run):
            self._waiting.append(event)
        return event is _Event.END

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
        group = self._later if run.steps is not None else None
        try:
            if run.steps is None:
                run.steps = run.task(workspace)
            for work in run.works:
                work.wait()
            run.works = self._transport.start(run.steps.send(None), group)
            for work in run.works:
                work.get_future().add_done_callback(self._wake)
        except StopIteration as end:
            run.ends = partial(run.future.set_result, end.value)
        except Exception as error:
            run.ends = partial(run.future.set_exception, error)

    def _wake(self, _: object) -> None:
        self.events.put(_Event.DONE)


def _end(events: _Events, thread: threading.Thread) -> None:
    """End a worker, also when the interpreter exits: a thread that returns from C++ later than that aborts it."""
    events.put(_Event.END)
    if thread is not threading.current_thread():
        thread.join(EXIT_LIMIT)


def _twin_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A new gloo group of the same ranks and timeout, which only these ranks have to make.

    Not ``dist.new_group``: that names a group by how many the process has, which may differ between its ranks.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get("cpu") != "gloo":
        raise NotImplementedError(
            f"The process group's backend for CPU tensors is {backends.get('cpu')}; gradwire's hooks need gloo there. "
            'Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
        )
    store = PrefixStore(f"gradwire/{name}", dist.distributed_c10d._get_process_group_store(group))
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout))


_executors: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, Executor]] = {}


def drain_executors() -> None:
    """Wait until every executor has done what it was given."""

    async def nothing(_: Workspace) -> None:
        pass

    for _, executor in _executors.values():
        executor.submit(nothing).wait()


def executor_for(group: dist.ProcessGroup | None, device: torch.device) -> Executor:
    """The executor of a process group on a device, made at its first use, which is a collective call on a CPU.

    Args:
        group: the process group; None for the default one.
        device: where the gradients are.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    key = (group.group_name, device)
    entry = _executors.get(key)
    if entry is None or entry[0] is not group:  # a new group may bear the name of a destroyed one
        for known, (of_executor, _) in list(_executors.items()):
            if of_executor not in dist.distributed_c10d._world.pg_map:  # destroyed
                del _executors[known]
        kind = WorkerExecutor if device.type == "cpu" else StreamExecutor
        entry = _executors[key] = (group, kind(group, device))
    return entry[1]
