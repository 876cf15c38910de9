"""Executors: run the bucket algorithms in bucket order, off the critical path of the backward pass.

An algorithm is straight-line code that blocks in its collectives. An executor runs one at a time, in the order of
submission, which DDP makes the order of buckets on every rank: so every rank issues the same collectives in the same
order, however long each of them takes.

- On a GPU, a side stream: the algorithm is enqueued at once, and nothing waits on the host. Workspaces are used on
  that stream only.
- On a CPU, a worker thread. It has a process group of its own, because two threads that issue collectives on one
  gloo group take their order from thread timing.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.futures import Future

from gradwire.compress import Transport, Workspace
from gradwire.kernels import SegmentTable

# Seconds that a worker which waits for a lost peer may hold up the exit of the interpreter.
EXIT_LIMIT = 2.0
MEETING_TIMEOUT = timedelta(minutes=2)

Task = Callable[[], Any]
Tables = dict[tuple[int, int, torch.dtype], SegmentTable]  # by bucket index, number of elements and dtype


class Executor:
    """Runs tasks in order. One per process group and device; see `executor_for`.

    Attributes:
        transport: the collectives that tasks use.
        workspace: the wire memory that tasks use, one after another.
        tables: the layouts of flat buckets, kept from step to step.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.transport = Transport(group)
        self.workspace = Workspace(device)
        self.tables: Tables = {}

    def submit(self, task: Task) -> Future[Any]:
        """Run ``task`` after all earlier ones; the future holds its result or its exception."""
        raise NotImplementedError


class StreamExecutor(Executor):
    """Runs tasks on a CUDA side stream, which first waits for the work already in the current stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future: Future[Any] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            _complete(future, task)
        return future


class WorkerExecutor(Executor):
    """Runs tasks in one thread, over a process group of its own with the same ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(_twin_group(group), device)
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Task] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks,), name="gradwire", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._tasks, thread)

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future


def _work(tasks: "queue.SimpleQueue[tuple[Future[Any], Task] | None]") -> None:
    torch.set_grad_enabled(False)
    torch.get_num_threads()  # makes this thread follow torch.set_num_threads; else BLAS starts a team of its own here
    while (entry := tasks.get()) is not None:
        _complete(*entry)
        del entry  # a task holds gradients; it must not outlive its step


def _end(tasks: "queue.SimpleQueue[tuple[Future[Any], Task] | None]", thread: threading.Thread) -> None:
    """End a worker, also when the interpreter exits: a thread that returns from C++ later than that aborts it."""
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_LIMIT)


def _complete(future: Future[Any], task: Task) -> None:
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)


def _twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new gloo group of the same ranks and timeout, which only these ranks have to make.

    Not ``dist.new_group``: that names a group by how many the process has, which may differ between its ranks.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get("cpu") != "gloo":
        raise NotImplementedError(
            f"The process group's backend for CPU tensors is {backends.get('cpu')}; gradwire's hooks need gloo there. "
            'Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
        )
    store = PrefixStore("gradwire", dist.distributed_c10d._get_process_group_store(group))
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout))


def meet(group: dist.ProcessGroup, purpose: str, timeout: timedelta = MEETING_TIMEOUT) -> None:
    """Return when every rank of ``group`` has called it for the same purpose as often as this one.

    Raises:
        RuntimeError: some ranks have not come in time; it names them.
    """
    store = PrefixStore("gradwire/meet", dist.distributed_c10d._get_process_group_store(group))
    meeting = ""
    while not meeting or store.check([f"{meeting}/failed"]):  # a rank that missed one goes on to the next
        meeting = f"{purpose}/{store.add(f'{purpose}/{group.rank()}', 1)}"
    keys = [f"{meeting}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "here")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        store.set(f"{meeting}/failed", "")
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"{purpose} is a collective call: ranks {missing} have not made it within {timeout}. Call it on every rank."
        ) from error


_executors: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, Executor]] = {}


def drain_executors() -> None:
    """Wait until every executor has done what it was given."""
    for _, executor in _executors.values():
        executor.submit(lambda: None).wait()


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
        kind = WorkerExecutor if device.type == "cpu" else StreamExecutor
        entry = _executors[key] = (group, kind(group, device))
    return entry[1]
