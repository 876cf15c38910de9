"""Collectives that algorithms await, and how each is issued on a process group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.torch_internals import all_gather, all_to_all


class Collective(ABC):
    """A collective that an algorithm awaits once: one message or several, all of them in flight together."""

    def __await__(self) -> Generator[Collective, None, None]:
        yield self

    @property
    @abstractmethod
    def payload_bytes(self) -> int:
        """Bytes to add to `Transport.payload_bytes`."""

    @abstractmethod
    def run(self, group: dist.ProcessGroup) -> None:
        """Run in the current stream of the tensors."""

    @abstractmethod
    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Launch every message and return one `dist.Work` per message; PyTorch need not know the group."""

    @abstractmethod
    def run_alone(self) -> None:
        """Run in a world of one rank, without a group."""


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """An in-place all-reduce of tensors that may differ in dtype, one message per tensor.

    Attributes:
        tensors: modified in place.
        op: the reduction.
        turn: of the sparse tensors.
    """

    tensors: tuple[Tensor, ...]
    op: dist.ReduceOp.RedOpType
    turn: SparseTurn

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors; of a sparse tensor, of its values and indices."""
        return sum(_nbytes(tensor) for tensor in self.tensors)

    def run(self, group: dist.ProcessGroup) -> None:
        """Run one tensor after another.

        The all-reduces are not coalesced: the tensors may differ in dtype, and NCCL's coalesced all-reduce takes
        tensors of one dtype only.
        """
        for tensor in self.tensors:
            dist.all_reduce(tensor, self.op, group=group)

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Launch an all-reduce of each tensor, of a sparse one only once the previous sparse one is done."""
        return [self._start(tensor, group) for tensor in self.tensors]

    def _start(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        if not tensor.is_sparse:
            return _all_reduce(tensor, self.op, group)
        self.turn.wait()
        work = _all_reduce(tensor, self.op, group)
        self.turn.end_with(work)
        return work

    def run_alone(self) -> None:
        """Leave the tensors unchanged."""


class SparseTurn:
    """Lets a transport's sparse all-reduces run one at a time.

    Two in flight on one gloo group corrupt the heap (PyTorch 2.13, docs/log.md).
    """

    def __init__(self) -> None:
        self._done: Future[None] | None = None  # done when the latest sparse all-reduce is

    def wait(self) -> None:
        """Wait for the latest sparse all-reduce."""
        if self._done is not None:
            self._done.wait()

    def end_with(self, work: dist.Work) -> None:
        """Record the latest sparse all-reduce."""
        self._done = work.get_future().then(_nothing)  # the work itself would keep the tensor alive


@dataclass(frozen=True, eq=False)
class Shot(Collective):
    """Half of a two-shot all-reduce over n ranks, cut into pieces: one message per piece.

    Attributes:
        target: [pieces, n, bytes], overwritten.
        source: what this rank contributes; as many pieces.
    """

    target: Tensor
    source: Tensor

    def run(self, group: dist.ProcessGroup) -> None:
        """Launch every piece, then wait for each."""
        for work in self._launch(group, is_async=False):
            if work is not None:
                work.wait()

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Launch every piece."""
        return [work for work in self._launch(group, is_async=True) if work is not None]

    def _launch(self, group: dist.ProcessGroup, *, is_async: bool) -> list[dist.Work | None]:
        if self.target.numel() == 0:
            return []
        pieces = zip(self.target, self.source, strict=True)
        return [self._launch_piece(target, source, group, is_async=is_async) for target, source in pieces]

    @staticmethod
    @abstractmethod
    def _launch_piece(
        target: Tensor, source: Tensor, group: dist.ProcessGroup, *, is_async: bool
    ) -> dist.Work | None: ...


class AllToAll(Shot):
    """The first shot: ``target[p, i]`` = ``source[p, this rank]`` of rank i, where the source is [pieces, n, bytes]."""

    @property
    def payload_bytes(self) -> int:
        """Half the bytes of the n cells, rounded down."""
        return self.target.nbytes // 2

    @staticmethod
    def _launch_piece(target: Tensor, source: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
        return all_to_all(target, source, group, is_async=is_async)

    def run_alone(self) -> None:
        """Copy what the only rank sends to itself."""
        self.target.copy_(self.source)


class AllGather(Shot):
    """The second shot: ``target[p, i]`` = ``source[p]`` of rank i, where the source is [pieces, bytes]."""

    @property
    def payload_bytes(self) -> int:
        """Half the bytes of the n cells, rounded up."""
        return self.target.nbytes - self.target.nbytes // 2

    @staticmethod
    def _launch_piece(target: Tensor, source: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
        return all_gather(target.view(-1), source, group, is_async=is_async)

    def run_alone(self) -> None:
        """Copy what the only rank sends to itself."""
        self.target.copy_(self.source[:, None])


# torch.distributed's functions take only groups that it has registered: they look up the group's name. gradwire's own
# groups are not registered, so their methods are called directly.


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
    if isinstance(group, dist.ProcessGroup):
        return cast("dist.Work", dist.all_reduce(tensor, op, group=group, async_op=True))
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Launch an in-place broadcast of ``tensor`` from the group's rank ``source``."""
    if isinstance(group, dist.ProcessGroup):
        return cast("dist.Work", dist.broadcast(tensor, group=group, group_src=source, async_op=True))
    options = dist.BroadcastOptions()
    options.rootRank = source
    return group.broadcast([tensor], options)


def _nothing(_: Future[Any]) -> None:
    pass


def _nbytes(tensor: Tensor) -> int:
    return tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes
