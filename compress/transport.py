"""Transport: the collectives that an algorithm may use, over one process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")
# Seconds between two looks at whether there is a use in waiting.
POLL = 0.5


class Collective(NamedTuple):
    """What an algorithm awaits: the reduction of tensors over all ranks, in place.

    Several tensors, which may differ in dtype, travel one right after another: one wait on the wire, not several.
    """

    tensors: tuple[Tensor, ...]
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    def __await__(self) -> Generator[Collective, None, None]:
        yield self


# An algorithm under way; whoever drives it runs each collective that it yields, and sends None when that is done.
Steps = Coroutine[Collective, None, T]


class Transport:
    """The collectives of one process group, counting their payload.

    Algorithms await `all_reduce` and `all_reduce_max`, which do nothing by themselves; what drives the algorithm hands
    them to `run` or `start`.

    Args:
        group: the process group.
        check: called now and then while `wait` waits; raises where there is no use in waiting.

    Attributes:
        world_size: number of ranks.
        payload_bytes: bytes of the tensors handed to collectives so far. What a link carries is this times a factor
            that depends on the collective's algorithm, 2 (n - 1) / n for a ring all-reduce over n ranks.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._group: dist.ProcessGroup | None = group
        self.world_size = group.size()
        self.payload_bytes = 0
        self._sparse_done: Future[None] | None = None

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

    def all_reduce(self, *tensors: Tensor) -> Collective:
        """Replace each tensor by its sum over all ranks."""
        return Collective(tensors)

    def all_reduce_max(self, tensor: Tensor) -> Collective:
        """Replace every element of ``tensor`` by its largest value over all ranks."""
        return Collective((tensor,), dist.ReduceOp.MAX)

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its CUDA tensors, one tensor after another.

        Not coalesced: tensors travel together because their dtypes differ, and a coalesced call takes only one dtype.
        """
        self._count(collective)
        for tensor in collective.tensors:
            dist.all_reduce(tensor, collective.op, group=self.group)

    def start(self, collective: Collective, group: dist.ProcessGroup | None = None) -> list[dist.Work]:
        """Begin a collective; returns what to wait for. One of a sparse tensor begins when the last such one is done.

        Args:
            collective: of CPU tensors.
            group: another process group of the same ranks; by default the transport's own.
        """
        self._count(collective)
        return [self._start(tensor, collective.op, group or self.group) for tensor in collective.tensors]

    def close(self, timeout: float) -> None:
        """Let go of the process group. One that nobody else holds closes its connections, once its last work is done.

        Args:
            timeout: seconds to wait for that.
        """
        group, self._group = [self._group], None
        thread = threading.Thread(target=group.clear, name="gradwire closes a group", daemon=True)
        thread.start()
        thread.join(timeout)

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Begin to replace ``tensor`` by its sum over all ranks; the future's value is a list of it alone."""
        (work,) = self.start(self.all_reduce(tensor))
        return work.get_future()

    def _start(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
        # Two sparse all-reduces under way on one gloo group corrupt the heap (PyTorch 2.13, docs/log.md).
        if tensor.is_sparse and self._sparse_done is not None:
            self._sparse_done.wait()
        work = _all_reduce(tensor, op, group)
        if tensor.is_sparse:
            self._sparse_done = work.get_future().then(_nothing)  # the work itself would keep the tensor alive
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective that was begun.

        Raises:
            RuntimeError: it failed, or ``check`` raised.
        """
        wait_for(work.get_future(), self._check)

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Begin to replace ``tensor`` by that of the group's rank ``source``; returns what to wait for."""
        return _broadcast(tensor, source, self.group)

    def _count(self, collective: Collective) -> None:
        self.payload_bytes += sum(_nbytes(tensor) for tensor in collective.tensors)


def wait_for(future: Future[T], check: Callable[[], None]) -> T:
    """The value of ``future``; calls ``check``, which may raise, every `POLL` seconds until it is there."""
    if not future.done():
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        while not is_done.wait(POLL):
            check()
    return future.wait()


# torch.distributed's functions take a group that it has registered. They ask for its name, also to log an error, and
# fail on a group that gradwire made for itself: that one is called directly.


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
