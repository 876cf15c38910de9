"""Collectives that algorithms await, and the transports that run them.

An algorithm is a coroutine. It awaits its collectives and touches no stream, no future and no
process group, so the same function runs on a GPU's side stream, in a CPU's worker thread, and in a
notebook:

    run_algorithm(powersgd_all_reduce(bucket, ..., transport=LocalTransport(), ...), transport)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")
POLL_SECONDS = 0.5  # interval between two calls of the `check` that may end a wait


class Collective(NamedTuple):
    """An in-place all-reduce of ``tensors`` over all ranks.

    The tensors may differ in dtype. They are sent one after another, and the algorithm waits once
    for all of them.
    """

    tensors: tuple[Tensor, ...]
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    def __await__(self) -> Generator[Collective, None, None]:
        yield self


# An algorithm in flight: it yields each collective that it awaits, and is sent None once that collective is done.
Steps = Coroutine[Collective, None, T]


class Transport:
    """The collectives available to an algorithm, and a count of their payload.

    Args:
        world_size: number of ranks.

    Attributes:
        world_size: number of ranks.
        payload_bytes: bytes of all tensors handed to collectives so far. A ring all-reduce over n
            ranks sends 2 (n - 1) / n times as many bytes over each link.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.payload_bytes = 0

    def all_reduce(self, *tensors: Tensor) -> Collective:
        """Return the collective that replaces each tensor by its sum over all ranks; await it."""
        return Collective(tensors)

    def all_reduce_max(self, tensor: Tensor) -> Collective:
        """Return the collective that replaces ``tensor`` by its elementwise maximum over all ranks; await it."""
        return Collective((tensor,), dist.ReduceOp.MAX)

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its tensors."""
        raise NotImplementedError

    def _count(self, collective: Collective) -> None:
        self.payload_bytes += sum(_nbytes(tensor) for tensor in collective.tensors)


class LocalTransport(Transport):
    """Collectives of a single process: every all-reduce leaves its tensors unchanged.

    For notebooks and tests. ``payload_bytes`` counts what this rank would have sent.
    """

    def __init__(self) -> None:
        super().__init__(world_size=1)

    def run(self, collective: Collective) -> None:  # noqa: D102
        self._count(collective)


class GroupTransport(Transport):
    """Collectives over one process group.

    Args:
        group: the process group.
        check: called every `POLL_SECONDS` while `wait` waits; raises to end the wait.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(group.size())
        self._check = check
        self._group: dist.ProcessGroup | None = group
        self._sparse_done: Future[None] | None = None  # done when the latest sparse all-reduce is

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: the transport is closed.
        """
        if self._group is None:
            raise RuntimeError(
                "This transport is closed: an exchange failed on its process group, or it was destroyed."
            )
        return self._group

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its CUDA tensors, one tensor after another.

        The all-reduces are not coalesced: the tensors may differ in dtype, and NCCL's coalesced
        all-reduce takes tensors of one dtype only.
        """
        self._count(collective)
        for tensor in collective.tensors:
            dist.all_reduce(tensor, collective.op, group=self.group)

    def start(self, collective: Collective, group: dist.ProcessGroup | None = None) -> list[dist.Work]:
        """Launch a collective and return one `dist.Work` per tensor.

        A sparse all-reduce is launched only once the previous one is done.

        Args:
            collective: the all-reduce to launch; its tensors are on the CPU.
            group: the process group to use, of the same ranks; by default the transport's own.
        """
        self._count(collective)
        return [self._start(tensor, collective.op, group or self.group) for tensor in collective.tensors]

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Launch an in-place sum of ``tensor`` over all ranks; the future holds ``[tensor]``."""
        (work,) = self.start(self.all_reduce(tensor))
        return work.get_future()

    def _start(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
        # Two sparse all-reduces in flight on one gloo group corrupt the heap (PyTorch 2.13, docs/log.md).
        if tensor.is_sparse and self._sparse_done is not None:
            self._sparse_done.wait()
        work = _all_reduce(tensor, op, group)
        if tensor.is_sparse:
            self._sparse_done = work.get_future().then(_nothing)  # the work itself would keep the tensor alive
        return work

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Launch an in-place broadcast of ``tensor`` from the group's rank ``source``."""
        return _broadcast(tensor, source, self.group)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective that was launched.

        Raises:
            RuntimeError: the collective failed, or ``check`` raised.
        """
        wait_for(work.get_future(), self._check)

    def close(self, timeout: float) -> None:
        """Drop the process group. If nobody else holds it, its connections close after its last collective.

        Args:
            timeout: longest wait in seconds for the connections to close.
        """
        group, self._group = [self._group], None
        thread = threading.Thread(target=group.clear, name="gradwire closes a group", daemon=True)
        thread.start()
        thread.join(timeout)


def run_algorithm(steps: Steps[T], transport: Transport) -> T:
    """Run an algorithm to its end in this thread and the current stream; returns its result.

    Args:
        steps: the algorithm, a coroutine that nothing has awaited yet.
        transport: runs its collectives; the same transport that was passed to the algorithm.
    """
    while True:
        try:
            collective = steps.send(None)
        except StopIteration as end:
            return cast("T", end.value)
        transport.run(collective)


def wait_for(future: Future[T], check: Callable[[], None]) -> T:
    """Wait for ``future`` and return its value; calls ``check``, which may raise, every `POLL_SECONDS`."""
    if not future.done():
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        while not is_done.wait(POLL_SECONDS):
            check()
    return future.wait()


# torch.distributed's functions take only groups that it has registered: they look up the group's name. gradwire's own
# groups are not registered, so their methods are called directly.


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
    if isinstance(group, dist.ProcessGroup):
        return cast("dist.Work", dist.all_reduce(tensor, op, group=group, async_op=True))
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    if isinstance(group, dist.ProcessGroup):
        return cast("dist.Work", dist.broadcast(tensor, group=group, group_src=source, async_op=True))
    options = dist.BroadcastOptions()
    options.rootRank = source
    return group.broadcast([tensor], options)


def _nothing(_: Future[Any]) -> None:
    pass


def _nbytes(tensor: Tensor) -> int:
    return tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes
