"""Collectives that algorithms await, and the transports that issue them.

An algorithm is a coroutine. It awaits its collectives and touches no stream, no future and no process group, so the
same function runs on a GPU's side stream, in a CPU's worker thread, and in a notebook:

    step = Step.of(memory, gradients, results, 0, transport, workspace)
    run_algorithm(powersgd_all_reduce(step), transport)
"""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm.groups import OwnGroup, destroy
from gradwire.comm.store_collectives import POLL_SECONDS
from gradwire.comm.torch_internals import all_gather, all_reduce, all_to_all, profiler_range

T = TypeVar("T")
# gloo queues its ready-to-receive notice behind its own outgoing data, so one message never fills both directions of a
# link and takes twice as long as the wire; 16 pieces take 1.1 times as long.
MAX_PIECES = 16
MAX_CELL_BYTES = 1 << 16  # at 1 Gb/s, gloo's announcements take longer than the data of cells below half of this
# An announcement takes a round trip, in which a link of 200 Mb/s sends as many bytes.
CELL_BYTES_PER_SECOND = 25e6
CLOSED = (
    "{} is closed: an exchange failed on its process group, or the group was destroyed. Call resynchronize() on every "
    "rank, or initialize a new group."
)
FORGOTTEN_AWAIT = (
    "{task}: {n} collectives of the transport were created but not awaited, so they never ran. Write `await` before "
    "each of them: await step.transport.all_reduce(tensor)."
)


class Collective:
    """A collective that an algorithm awaits once: one message or several, all of them in flight together.

    Attributes:
        tensors: the tensors that are read and written.
        payload_bytes: bytes to add to `Transport.payload_bytes`.
    """

    tensors: tuple[Tensor, ...]
    payload_bytes: int

    def __await__(self) -> Generator[Collective, None, None]:
        return iter((self,))  # type: ignore[return-value]  # cheaper than a generator, which is called twice

    def start(self, group: dist.ProcessGroup, is_async: bool) -> list[dist.Work]:
        """Launch every message and return one `dist.Work` per message; PyTorch need not know the group.

        If not ``is_async``, NCCL uses the current stream, and there may be no works. May be called again, for the same
        tensors.
        """
        raise NotImplementedError

    def run_alone(self) -> None:
        """Run in a world of one rank, without a group: a sum over one rank changes nothing."""


# An algorithm in flight: it yields each collective that it awaits, and is sent None once that collective is done.
Algorithm = Coroutine[Collective, None, T]


class Driver(Generic[T]):
    """Runs an algorithm's coroutine from one collective to the next.

    Each part between collectives is a profiler range, "NAME, part 1", ..., which costs 0.2 us while no profiler
    runs. `torch.profiler` records a CPU's worker thread only with
    ``experimental_config=_ExperimentalConfig(profile_all_threads=True)``.

    Args:
        algorithm: the coroutine; nothing else has awaited it.
        transport: the transport that the algorithm uses; None not to check that it awaits every collective.
        name, result, on_error: see `Task`. ``result`` is an attribute: the result, once `advance` has returned None.
    """

    def __init__(
        self,
        algorithm: Algorithm[T],
        transport: Transport | None = None,
        name: str = "gradwire::algorithm",
        result: T | None = None,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._algorithm = algorithm
        self.result = cast("T", result)  # None until the algorithm has returned
        self._on_error = on_error
        self._transport = transport
        self._name = name
        self._part = 0
        self._n_unawaited = 0  # collectives created minus collectives awaited

    def advance(self) -> Collective | None:
        """Run to the next collective, which must be done before the next call, and return it; None at the end.

        Raises:
            RuntimeError: the algorithm has ended without awaiting every collective that it created.
        """
        self._part += 1
        transport = self._transport
        n_created = transport.n_created if transport is not None else 0
        with profiler_range(f"{self._name}, part {self._part}"):
            try:
                collective = self._algorithm.send(None)
            except StopIteration as end:
                collective = None
                if self.result is None:
                    self.result = end.value
            except Exception:
                if self._on_error is not None:
                    self._on_error()
                raise
        if transport is not None:  # shared with other tasks, which run between two calls
            self._n_unawaited += transport.n_created - n_created - (collective is not None)
            if collective is None and self._n_unawaited > 0:
                raise RuntimeError(
                    FORGOTTEN_AWAIT.format(task=self._name.removeprefix("gradwire::"), n=self._n_unawaited)
                )
        return collective

    def close(self) -> None:
        """End the algorithm early."""
        self._algorithm.close()


class AllReduce(Collective):
    """An in-place all-reduce of tensors that may differ in dtype, one message per tensor.

    Two sparse all-reduces in flight on one gloo group corrupt the heap (PyTorch 2.13, docs/log/communication.md), so
    each waits for ``latest_sparse``, the future of the transport's previous one.
    """

    def __init__(
        self, tensors: tuple[Tensor, ...], op: dist.ReduceOp.RedOpType, latest_sparse: list[Future[Any]]
    ) -> None:
        self.tensors = tensors
        self.op = op
        self._latest_sparse = latest_sparse
        self.payload_bytes = 0
        for tensor in tensors:
            for part in (tensor._values(), tensor._indices()) if tensor.is_sparse else (tensor,):
                self.payload_bytes += part.nbytes

    def start(self, group: dist.ProcessGroup, is_async: bool) -> list[dist.Work]:
        """Launch an all-reduce of each tensor: NCCL's coalesced one takes tensors of one dtype only."""
        works = []
        for tensor in self.tensors:
            if tensor.is_sparse and self._latest_sparse:
                self._latest_sparse.pop().wait()
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            work = all_reduce(real, self.op, group, is_async=is_async)
            if work is not None:
                works.append(work)
            if tensor.is_sparse and works:
                # A further future: the work's own would keep the tensor alive.
                self._latest_sparse.append(works[-1].get_future().then(lambda _: None))
        return works


class Shot(Collective):
    """Half of a two-shot all-reduce over n ranks, one message per piece; see `Transport`.

    ``target``, [pieces, n, bytes], is overwritten; ``source`` is this rank's contribution, in as many pieces.
    """

    def __init__(self, target: Tensor, source: Tensor, payload_bytes: int) -> None:
        self.target = target
        self.source = source
        self.payload_bytes = payload_bytes
        self.tensors = target, source
        self.part: PartialTransport | None = None  # of the n ranks; None: all ranks of the group

    def start(self, group: dist.ProcessGroup, is_async: bool) -> list[dist.Work]:
        """Launch every piece."""
        if self.target.numel() == 0:
            return []
        pieces = zip(self.target, self.source, strict=True)
        works = [self._launch(target, source, group, is_async) for target, source in pieces]
        return [work for work in works if work is not None]

    def _launch(self, target: Tensor, source: Tensor, group: dist.ProcessGroup, is_async: bool) -> dist.Work | None:
        splits = () if self.part is None else self.part.splits
        return all_to_all(target, source, group, is_async=is_async, splits=splits)

    def run_alone(self) -> None:
        """Copy the message of the only rank to itself."""
        self.target.copy_(self.source if self.source.dim() == 3 else self.source[:, None])


class AllToAll(Shot):
    """The first shot, of a source [pieces, n, bytes].

    Attributes:
        room: bytes that a cell may have in an exchange of another kind, which a peer has begun by mistake; 0 if that
            cannot happen. gloo aborts the process if a message is larger than expected. With room for it, the message
            arrives, and its header tells the algorithm what it is.
    """

    def __init__(self, target: Tensor, source: Tensor, payload_bytes: int, rank: int, room: int) -> None:
        super().__init__(target, source, payload_bytes)
        self._rank = rank  # this one, in the group
        self.room = room
        self._arrived: list[list[Tensor]] = []  # with room: the cells of each piece

    def __await__(self) -> Generator[Collective, None, None]:
        return self._with_room() if self._needs_room else super().__await__()

    @property
    def _needs_room(self) -> bool:
        """Whether an exchange of another kind has larger cells, or cells for ranks to which this one sends none."""
        return self.room > (self.source.shape[2] if self.part is None else 0)

    def _with_room(self) -> Generator[Collective, None, None]:
        yield self
        for piece, cells in zip(self.target, self._arrived, strict=True):
            for cell, arrived in zip(piece, cells, strict=True):
                cell.copy_(arrived[: len(cell)])
        self._arrived = []

    def _launch(self, target: Tensor, source: Tensor, group: dist.ProcessGroup, is_async: bool) -> dist.Work | None:
        if not self._needs_room:
            return super()._launch(target, source, group, is_async)
        is_peer = [1] * group.size() if self.part is None else self.part.splits
        sent = [source.shape[1] * each for each in is_peer]
        received = [max(self.room, source.shape[1])] * group.size()  # also from ranks that should send nothing
        received[self._rank] = sent[self._rank]
        arrived = target.new_empty(sum(received))
        cells = zip(arrived.split(received), is_peer, strict=True)
        self._arrived.append([cell for cell, sends in cells if sends])
        return all_to_all(arrived, source.view(-1), group, is_async=is_async, splits=sent, received_splits=received)


class AllGather(Shot):
    """The second shot, of a source [pieces, bytes]."""

    def _launch(self, target: Tensor, source: Tensor, group: dist.ProcessGroup, is_async: bool) -> dist.Work | None:
        if self.part is None:
            return all_gather(target.view(-1), source, group, is_async=is_async)
        return super()._launch(target, source.expand_as(target).contiguous(), group, is_async)


class Transport:
    """The collectives available to an algorithm, and a count of their payload.

    A two-shot all-reduce of a message of n *cells*, one per rank, is an `all_to_all` and an `all_gather`. In the first
    shot each rank gets its cell of every rank's message, from which it computes the cell of the result; the second
    shot collects the results. A message may be cut into several *pieces* of n cells, all of them in flight at once.

    Attributes:
        world_size: number of ranks.
        rank: number of this process among them.
        ranks: their ranks in the process group.
        payload_bytes: bytes of all tensors handed to collectives so far. A ring all-reduce over n ranks sends
            2 (n - 1) / n times as many bytes over each link. So does a two-shot all-reduce: each shot counts half of
            the message, of which it sends (n - 1) / n.
        n_created: number of collectives created so far, awaited or not.
        local_size: number of ranks on each node, if nodes have equally many and consecutive ones; else 1.
        round_trip: seconds of a round trip between the two ranks that are farthest apart; 0 if it is not known.
        room: bytes of the largest cell of all exchanges that a peer may begin by mistake; see `AllToAll`.
    """

    room = 0

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size = world_size
        self.rank = rank
        self.ranks = range(world_size)
        self.local_size = 1
        self.round_trip = 0.0
        self.payload_bytes = 0
        self.n_created = 0
        self._latest_sparse: list[Future[Any]] = []  # empty or one: see `AllReduce`

    def all_reduce(self, *tensors: Tensor) -> Collective:
        """Return the collective that replaces each tensor by its sum over all ranks; await it."""
        self.n_created += 1
        return AllReduce(tensors, dist.ReduceOp.SUM, self._latest_sparse)

    def all_reduce_max(self, tensor: Tensor) -> Collective:
        """Return the collective that replaces ``tensor`` by its elementwise maximum over all ranks; await it."""
        self.n_created += 1
        return AllReduce((tensor,), dist.ReduceOp.MAX, self._latest_sparse)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Collective:
        """Return the collective that sets ``received[p, i]`` to ``sent[p, this rank]`` of rank i; await it.

        Args:
            received: uint8 [pieces, world size, bytes], each piece contiguous; overwritten.
            sent: uint8 of the same shape on all ranks, each piece contiguous.

        Raises:
            ValueError: a tensor has another dtype, shape or layout.
        """
        _check_pieces("sent", sent, (None, self.world_size, None))
        _check_pieces("received", received, sent.shape)
        half = received.nbytes // 2  # the other half is the second shot's
        return self._created(AllToAll(received, sent, half, self._group_rank, self.room))

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
        return self._created(AllGather(gathered, own, gathered.nbytes - gathered.nbytes // 2))

    @property
    def _group_rank(self) -> int:
        """The number of this process in the process group."""
        return self.rank

    def _created(self, shot: Shot) -> Shot:
        self.n_created += 1
        return shot

    def within_node(self, local_size: int) -> PartialTransport:
        """The two shots among the ``local_size`` ranks of this rank's node; the payload does not count them."""
        first = self.rank // local_size * local_size
        return PartialTransport(self, range(first, first + local_size), is_in_node=True)

    def between_nodes(self, local_size: int) -> PartialTransport:
        """The two shots among the ranks with the place of this rank on each node of ``local_size`` ranks."""
        return PartialTransport(self, range(self.rank % local_size, self.world_size, local_size), is_in_node=False)

    def pieces(self, nbytes: int) -> int:
        """Number of pieces into which to cut a message of ``nbytes``, all cells together; equal on all ranks."""
        return 1

    def make_room(self, nbytes: int) -> None:
        """Expect cells of up to ``nbytes`` from ranks that make another exchange; see `AllToAll`."""

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its tensors."""
        raise NotImplementedError


class LocalTransport(Transport):
    """Collectives of a single process: an all-reduce leaves its tensors unchanged, a shot copies.

    For notebooks and tests. ``payload_bytes`` counts the bytes that this rank would have sent.
    """

    def __init__(self) -> None:
        super().__init__(world_size=1, rank=0)

    def run(self, collective: Collective) -> None:  # noqa: D102
        self.payload_bytes += collective.payload_bytes
        collective.run_alone()


class IdleTransport(Transport):
    """Transport for compiling and timing kernels: same world size, nothing is sent.

    An all-reduce leaves its tensors unchanged, a shot receives zeros.
    """

    def __init__(self, other: Transport) -> None:
        super().__init__(other.world_size, other.rank)
        self.local_size = other.local_size

    def run(self, collective: Collective) -> None:  # noqa: D102
        if isinstance(collective, Shot):
            collective.target.zero_()


class GroupTransport(Transport):
    """Collectives over one process group.

    ``check`` is called every `POLL_SECONDS` while `wait` waits, and raises to end the wait.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(group.size(), group.rank())
        self.round_trip = getattr(group, "round_trip", 0.0)
        self._check = check
        self._group: dist.ProcessGroup | None = group

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; raises RuntimeError if the transport is closed."""
        if self._group is None:
            raise RuntimeError(CLOSED.format("This transport"))
        return self._group

    def pieces(self, nbytes: int) -> int:
        """Number of pieces into which to cut a message: several on gloo, 1 on other backends."""
        # PyTorch does not know gradwire's own groups, which are gloo's.
        is_gloo = isinstance(self.group, OwnGroup) or dist.get_backend(self.group) == "gloo"
        return pieces_on_gloo(nbytes, self.world_size, self.round_trip) if is_gloo else 1

    def make_room(self, nbytes: int) -> None:  # noqa: D102
        self.room = nbytes if isinstance(self._group, OwnGroup) else 0

    def run(self, collective: Collective) -> None:
        """Run a collective in the current stream of its CUDA tensors."""
        for work in self.start(collective, is_async=False):
            work.wait()

    def start(
        self, collective: Collective, group: dist.ProcessGroup | None = None, is_async: bool = True
    ) -> list[dist.Work]:
        """Launch a collective, on the transport's own group unless ``group`` is another one; see `Collective.start`."""
        self.payload_bytes += collective.payload_bytes
        return collective.start(group or self.group, is_async)

    def launch(self, collective: Collective) -> Callable[..., None]:
        """Launch a collective of one message; returns the function that waits for it: `wait`, with its ``check``."""
        (work,) = self.start(collective)
        return partial(self.wait, work)

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Launch an in-place sum of ``tensor`` over all ranks; the future holds ``[tensor]``."""
        (work,) = self.start(self.all_reduce(tensor))
        return work.get_future()

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Launch an in-place broadcast of ``tensor`` from the group's rank ``source``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self.group.broadcast([tensor], options)

    def wait(self, work: dist.Work, check: Callable[[], None] | None = None) -> None:
        """Wait for a collective that was launched; see `wait_for`. ``check`` is by default the transport's own."""
        wait_for(work.get_future(), check or self._check)

    def close(self) -> None:
        """Drop the process group; gradwire's own is destroyed: its collectives fail, here and on the peers."""
        if self._group is not None:
            last, self._group = [self._group], None
            destroy(last)


class PartialTransport(Transport):
    """The two shots among some of the ranks of a transport, which runs them.

    Args:
        whole: the transport.
        ranks: ranks of ``whole``, ascending, this one among them.
        is_in_node: whether they share a node. Shots inside a node do not count in the payload.

    Attributes:
        splits: for each rank of ``whole``, the number of cells of a piece that it exchanges with this rank: 1 or 0.
    """

    def __init__(self, whole: Transport, ranks: range, is_in_node: bool) -> None:
        super().__init__(len(ranks), ranks.index(whole.rank))
        self.ranks = ranks
        self.splits = [int(rank in ranks) for rank in range(whole.world_size)]
        self.is_in_node, self._whole = is_in_node, whole

    def all_reduce(self, *tensors: Tensor) -> Collective:
        """Raise NotImplementedError: an all-reduce is among all ranks."""
        raise NotImplementedError("Only the two shots are possible among some of the ranks.")

    def all_reduce_max(self, tensor: Tensor) -> Collective:  # noqa: D102
        return self.all_reduce(tensor)

    @property
    def room(self) -> int:  # type: ignore[override]
        """That of the whole transport."""
        return self._whole.room

    @property
    def _group_rank(self) -> int:
        return self._whole.rank

    def pieces(self, nbytes: int) -> int:  # noqa: D102
        whole = self._whole
        return 1 if self.world_size == 1 else whole.pieces(nbytes // self.world_size * whole.world_size)

    def _created(self, shot: Shot) -> Shot:
        shot.part = self
        if self.is_in_node:
            shot.payload_bytes = 0
        return self._whole._created(shot)


def pieces_on_gloo(nbytes: int, world_size: int, round_trip: float = 0.0) -> int:
    """Number of pieces into which gloo's messages are cut; see `Transport.pieces` and `Transport.round_trip`."""
    cell_bytes = max(MAX_CELL_BYTES, int(round_trip * CELL_BYTES_PER_SECOND))
    return 1 if world_size == 1 else max(1, min(MAX_PIECES, -(-nbytes // (world_size * cell_bytes))))


def run_algorithm(algorithm: Algorithm[T], transport: Transport) -> T:
    """Run an algorithm to its end in this thread and the current stream; returns its result.

    Args:
        algorithm: a coroutine that nothing has awaited yet.
        transport: runs its collectives; the same transport that was passed to the algorithm.

    Raises:
        RuntimeError: the algorithm has not awaited every collective that it created.
    """
    driver = Driver(algorithm, transport)
    while (collective := driver.advance()) is not None:
        transport.run(collective)
    return driver.result


def wait_for(future: Future[T], check: Callable[[], None]) -> T:
    """Wait for ``future`` and return its value; calls ``check``, which may raise, every `POLL_SECONDS`."""
    if not future.done():
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        future.add_done_callback(done.put)
        while True:
            try:
                done.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                check()
    try:
        return future.wait()
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        del future  # it holds the error, whose traceback holds this frame


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of an error: they may hold gloo's connections open, or the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _check_pieces(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless the tensor is uint8, has ``shape``, of which None is any size, and contiguous pieces."""
    fits = tensor.dtype == torch.uint8 and tensor.dim() == len(shape)
    for size, actual in zip(shape, tensor.shape, strict=False):
        fits = fits and size in (None, actual)
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; expected torch.uint8 of shape [{sizes}]. "
            "Pass tensor.view(torch.uint8), cut as Transport.all_to_all and Transport.all_gather describe."
        )
    if len(tensor) > 0 and not tensor[0].is_contiguous():
        raise ValueError(f"A piece of {name} has strides {tensor[0].stride()}; expected a contiguous one. Copy it.")
