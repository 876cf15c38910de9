"""Transports run the collectives that algorithms await.

An algorithm is a coroutine. It awaits its collectives and touches no stream, no future and no
process group, so the same function runs on a GPU's side stream, in a CPU's worker thread, and in a
notebook:

    run_algorithm(powersgd_all_reduce(bucket, ..., transport=LocalTransport(), ...), transport)
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.collectives import AllGather, AllReduce, AllToAll, Collective, SparseTurn, broadcast
from gradwire.comm.groups import destroy
from gradwire.comm.store_collectives import POLL_SECONDS

T = TypeVar("T")
# gloo announces that a rank can receive a message only behind the data that this rank sends in it. So a message on its
# own uses a link in one direction at a time and takes twice as long as the wire; 16 pieces take 1.1 times as long.
MAX_PIECES = 16
MIN_CELL_BYTES = 1 << 16  # at 1 Gb/s, smaller cells wait longer for gloo's announcements than for the wire
# An algorithm in flight: it yields each collective that it awaits, and is sent None once that collective is done.
Steps = Coroutine[Collective, None, T]


class Transport:
    """The collectives available to an algorithm, and a count of their payload.

    A two-shot all-reduce of a message of n *cells*, one per rank, is an `all_to_all` and an `all_gather`. In the first
    shot each rank gets its cell of every rank's message, from which it computes the cell of the result; the second
    shot collects the results. A message may be cut into several *pieces* of n cells, all of them in flight at once.

    Args:
        world_size: number of ranks.
        rank: of this process among them.

    Attributes:
        world_size: number of ranks.
        rank: of this process among them.
        payload_bytes: bytes of all tensors handed to collectives so far. A ring all-reduce over n
            ranks sends 2 (n - 1) / n times as many bytes over each link. So does a two-shot all-reduce: each shot
            counts half of the message, of which it sends (n - 1) / n.
    """

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size = world_size
        self.rank = rank
        self.payload_bytes = 0
        self._turn = SparseTurn()

    def all_reduce(self, *tensors: Tensor) -> Collective:
        """Return the collective that replaces each tensor by its sum over all ranks; await it."""
        return AllReduce(tensors, dist.ReduceOp.SUM, self._turn)

    def all_reduce_max(self, tensor: Tensor) -> Collective:
        """Return the collective that replaces ``tensor`` by its elementwise maximum over all ranks; await it."""
        return AllReduce((tensor,), dist.ReduceOp.MAX, self._turn)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Collective:
        """Return the collective that sets ``received[p, i]`` to ``sent[p, this rank]`` of rank i; await it.

        Args:
            received: uint8 [pieces, world size, bytes], each piece contiguous; overwritten.
            sent: of the same shape on all ranks, each piece contiguous.

        Raises:
            ValueError: a tensor has another dtype, shape or layout.
        """
        _check_pieces("sent", sent, (None, self.world_size, None))
        _check_pieces("received", received, sent.shape)
        return AllToAll(received, sent)

    def all_gather(self, gathered: Tensor, own: Tensor) -> Collective:
        """Return the collective that sets ``gathered[p, i]`` to ``own[p]`` of rank i; await it.

        Args:
            gathered: uint8 [pieces, world size, bytes], each piece contiguous; overwritten.
            own: uint8 [pieces, bytes], of the same shape on all ranks, each piece contiguous.

        Raises:
            ValueError: a tensor has another dtype, shape or layout.
        """
        _check_pieces("own", own, (None, None))
        _check_pieces("gathered", gathered, (own.shape[0], self.world_size, own.shape[1]))
        return AllGather(gathered, own)

    def pieces(self, nbytes: int) -> int:
        """Number of pieces into which to cut a message; it depends on the size and the world size only.

        Args:
            nbytes: size of the message, all cells together.
        """
        return 1

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its tensors."""
        raise NotImplementedError


class LocalTransport(Transport):
    """Collectives of a single process: an all-reduce leaves its tensors unchanged, a shot copies.

    For notebooks and tests. ``payload_bytes`` counts what this rank would have sent.
    """

    def __init__(self) -> None:
        super().__init__(world_size=1, rank=0)

    def run(self, collective: Collective) -> None:  # noqa: D102
        self.payload_bytes += collective.payload_bytes
        collective.run_alone()


class GroupTransport(Transport):
    """Collectives over one process group.

    Args:
        group: the process group.
        check: called every `POLL_SECONDS` while `wait` waits; raises to end the wait.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(group.size(), group.rank())
        self._check = check
        self._group: dist.ProcessGroup | None = group

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

    def pieces(self, nbytes: int) -> int:
        """Number of pieces into which to cut a message: several on gloo, 1 on other backends.

        It depends on the backend, the size and the world size only, so it is the same on all ranks.
        """
        return pieces_on_gloo(nbytes, self.world_size) if _is_gloo(self.group) else 1

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its CUDA tensors."""
        self.payload_bytes += collective.payload_bytes
        collective.run(self.group)

    def start(self, collective: Collective, group: dist.ProcessGroup | None = None) -> list[dist.Work]:
        """Launch a collective and return one `dist.Work` per message.

        A sparse all-reduce is launched only once the previous one is done.

        Args:
            collective: to launch; its tensors are on the CPU.
            group: the process group to use, of the same ranks; by default the transport's own.
        """
        self.payload_bytes += collective.payload_bytes
        return collective.start(group or self.group)

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Launch an in-place sum of ``tensor`` over all ranks; the future holds ``[tensor]``."""
        (work,) = self.start(self.all_reduce(tensor))
        return work.get_future()

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Launch an in-place broadcast of ``tensor`` from the group's rank ``source``."""
        return broadcast(tensor, source, self.group)

    def wait(self, work: dist.Work, check: Callable[[], None] | None = None) -> None:
        """Wait for a collective that was launched.

        Args:
            work: its handle.
            check: called every `POLL_SECONDS`, by default the transport's own; raises to end the wait.

        Raises:
            RuntimeError: the collective failed, or ``check`` raised.
        """
        wait_for(work.get_future(), check or self._check)

    def close(self) -> None:
        """Drop the process group; gradwire's own is destroyed: its collectives fail, here and on the peers."""
        if self._group is not None:
            last, self._group = [self._group], None
            destroy(last)


def pieces_on_gloo(nbytes: int, world_size: int) -> int:
    """Number of pieces into which gloo's messages are cut; see `Transport.pieces`."""
    return 1 if world_size == 1 else max(1, min(MAX_PIECES, nbytes // (world_size * MIN_CELL_BYTES)))


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
    try:
        return future.wait()
    except BaseException as error:
        let_go_of_locals(error)
        raise
    finally:
        del future  # it holds the error, whose traceback holds this frame


def take_values(futures: list[Future[T] | None]) -> list[T | None]:
    """The values of the futures that are done; None for others and for those that have failed. Empties the list."""
    values: list[T | None] = []
    while futures:
        future = futures.pop(0)
        try:
            values.append(future.value() if future is not None and future.done() else None)
        except Exception as error:
            let_go_of_locals(error)
            values.append(None)
        finally:
            del future  # as above
    return values


def let_go_of_locals(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of ``error``.

    A `dist.Work` among them would keep gloo's connections open; a future, which holds the error, would never be freed.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _is_gloo(group: dist.ProcessGroup) -> bool:
    is_registered = isinstance(group, dist.ProcessGroup)
    return dist.get_backend(group) == "gloo" if is_registered else isinstance(group, dist.ProcessGroupGloo)


def _check_pieces(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless the tensor is uint8, has ``shape``, of which None is any size, and contiguous pieces."""
    sizes_fit = len(shape) == tensor.dim() and all(
        size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != torch.uint8 or not sizes_fit:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; expected torch.uint8 of shape [{sizes}]. "
            "Pass tensor.view(torch.uint8), cut as Transport.all_to_all and Transport.all_gather describe."
        )
    if len(tensor) > 0 and not tensor[0].is_contiguous():
        raise ValueError(f"A piece of {name} has strides {tensor[0].stride()}; expected a contiguous one. Copy it.")
