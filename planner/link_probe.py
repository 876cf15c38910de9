"""Measurement of the network: the time that messages of hooks take, by size.

Messages are sent in the same way as by hooks: as tasks of the process group's executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.comm import Task, Transport, Workspace, executor_for
from gradwire.comm.transport import Collective
from gradwire.planner.device_sync import synchronize
from gradwire.planner.step_model import GivenLink, Link, Message, MessageCost, is_between_nodes, is_in_node

SIZES = (1 << 8, 1 << 15, 1 << 19, 1 << 23)  # bytes
_MIN_PER_BYTE = 1e-13  # seconds: 80 Tb/s
_ENOUGH_SECONDS = 0.5  # messages that would take longer are not measured
_REPETITIONS = 15, 3  # repetitions of the smallest messages, and of all others


class MessageTime(NamedTuple):
    nbytes: int  # payload
    seconds: float  # from launch to arrival, on the slowest rank


def bytes_out_of_node(kind: str, world_size: int, ranks_per_node: int) -> float:
    """Bytes that leave a node per byte of payload; if there is only one node, bytes that leave a rank.

    A ring of all ranks, as in an all-reduce or all-gather, leaves each node once. In an all-to-all, and between nodes,
    each rank of a node sends its own cells to the ranks of other nodes.
    """
    if is_in_node(kind):
        return 0.0
    sharing = _sharing(world_size, ranks_per_node)
    if kind == "all-to-all" or is_between_nodes(kind):
        return 2 * sharing * (1 - sharing / world_size)
    return 2 * (1 - 1 / world_size)


def _sharing(world_size: int, ranks_per_node: int) -> int:
    """Ranks that share a link to others: those of a node; on a single node, each rank has its own."""
    return ranks_per_node if ranks_per_node < world_size else 1


def measure_link(
    group: dist.ProcessGroup, device: torch.device, messages: Iterable[Message], ranks_per_node: int
) -> tuple[Link, dict[str, list[MessageTime]]]:
    """Measure the cost of messages of each kind; returns also the samples of each fit. A collective call."""
    probe = _Probe(group, device)
    probe.measure("all-reduce float32", SIZES[1], 1)  # connects the ranks
    kinds = sorted({message.kind for message in messages})
    samples = {kind: probe.samples(kind) for kind in kinds}
    costs = {kind: fit(kind_samples) for kind, kind_samples in samples.items()}
    size = group.size()
    bandwidth = median(
        8 * bytes_out_of_node(kind, size, ranks_per_node) / cost.per_byte
        for kind, cost in costs.items()
        if not is_in_node(kind)
    )
    return Link(world_size=size, ranks_per_node=ranks_per_node, bandwidth=bandwidth, costs=costs), samples


class _Probe:
    """Sends messages over a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._executor = executor_for(group, device)

    def samples(self, kind: str) -> list[MessageTime]:
        """Time messages of growing size, until one would take `_ENOUGH_SECONDS`. The result is equal on all ranks."""
        samples: list[MessageTime] = []
        for nbytes in SIZES:
            if len(samples) > 1 and nbytes / samples[-1].nbytes * samples[-1].seconds > _ENOUGH_SECONDS:
                break
            samples.append(self.measure(kind, nbytes, _REPETITIONS[bool(samples)]))
        return samples

    def measure(self, kind: str, nbytes: int, repetitions: int) -> MessageTime:
        """Time one message: the median on the slowest rank."""
        make = message_maker(kind, nbytes, self._executor.transport, self._device)
        seconds = torch.tensor(median(self._once(make) for _ in range(repetitions)), device=self._device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._group)
        return MessageTime(nbytes, float(seconds))

    def _once(self, make: Callable[[], Collective]) -> float:
        """Time one message on this rank."""

        async def task(_: Workspace) -> None:
            await make()

        dist.barrier(self._group)
        synchronize(self._device)
        start = time.perf_counter()
        self._executor.submit(Task(task)).wait()
        synchronize(self._device)
        return time.perf_counter() - start


def message_maker(kind: str, nbytes: int, transport: Transport, device: torch.device) -> Callable[[], Collective]:
    """A function that returns a collective of a kind, on zeros; the inverse of `hook_probe.message_of`."""
    if kind.startswith("all-reduce"):
        dtype = getattr(torch, kind.removeprefix("all-reduce "))
        tensor = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=device)
        return lambda: transport.all_reduce(tensor)
    if is_in_node(kind):
        transport = transport.within_node(transport.local_size)
    elif is_between_nodes(kind):
        transport = transport.between_nodes(transport.local_size)
    in_cells = 2 * nbytes  # the payload of a shot is half of its cells
    pieces, n = transport.pieces(in_cells), transport.world_size
    cells = torch.zeros(pieces, n, max(1, in_cells // (pieces * n)), dtype=torch.uint8, device=device)
    if kind.startswith("all-gather"):
        own = cells[:, 0].clone()
        return lambda: transport.all_gather(cells, own)
    sent = cells.clone()
    return lambda: transport.all_to_all(cells, sent)


def fit(samples: Sequence[MessageTime]) -> MessageCost:
    """Fit the alpha-beta model: alpha is the time of the smallest message, beta the slope to the largest."""
    first, last = samples[0], samples[-1]
    per_byte = max(last.seconds - first.seconds, 0.0) / max(last.nbytes - first.nbytes, 1)
    return MessageCost(first.seconds, max(per_byte, _MIN_PER_BYTE))


def ideal_link(given: GivenLink, messages: Iterable[Message], overhead: float = 0.0) -> Link:
    """An ideal link for messages: ring all-reduces and direct exchanges at full rate; within a node they take no time.

    The software takes ``overhead`` seconds per message.
    """
    size = (given.world_size, given.ranks_per_node)
    hops = 2 * (given.world_size // _sharing(*size) - 1)  # hops of a ring all-reduce
    costs = {}
    for kind in sorted({message.kind for message in messages}):
        rounds = hops if kind.startswith("all-reduce") else 0 if is_in_node(kind) else 1
        per_byte = 8 * bytes_out_of_node(kind, *size) / given.bandwidth
        costs[kind] = MessageCost(overhead + rounds * given.latency, per_byte)
    return Link(world_size=size[0], ranks_per_node=size[1], bandwidth=given.bandwidth, costs=costs)


def overhead_per_message(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that the executor takes for an empty message, measured in a group of one rank."""
    return _Probe(group, device).measure("all-reduce float32", SIZES[0], _REPETITIONS[0]).seconds
