"""Transport: the collectives that an algorithm may use, over one process group."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")


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

    Attributes:
        group: the process group.
        world_size: number of ranks.
        payload_bytes: bytes of the tensors handed to collectives so far. What a link carries is this times a factor
            that depends on the collective's algorithm, 2 (n - 1) / n for a ring all-reduce over n ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = group.size()
        self.payload_bytes = 0
        self._sparse_done: Future[None] | None = None

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

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Begin to replace ``tensor`` by its sum over all ranks; the future's value is a list of it alone."""
        (work,) = self.start(self.all_reduce(tensor))
        return work.get_future()

    def _start(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
        # Two sparse all-reduces under way on one gloo group corrupt the heap (PyTorch 2.13, docs/log.md).
        if tensor.is_sparse and self._sparse_done is not None:
            self._sparse_done.wait()
        work = cast("dist.Work", dist.all_reduce(tensor, op, group=group, async_op=True))
        if tensor.is_sparse:
            self._sparse_done = work.get_future().then(_nothing)  # the work itself would keep the tensor alive
        return work

    def _count(self, collective: Collective) -> None:
        self.payload_bytes += sum(_nbytes(tensor) for tensor in collective.tensors)


def _nothing(_: Future[Any]) -> None:
    pass


def _nbytes(tensor: Tensor) -> int:
    return tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes
