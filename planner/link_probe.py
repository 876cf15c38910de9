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

from gradwire.comm import Transport, Workspace, executor_for
from gradwire.comm.collectives import Collective
from gradwire.comm.executor import Task
from gradwire.planner.clock import Clock
from gradwire.planner.model import Link, Message, MessageCost

SIZES = (1 << 8, 1 << 15, 1 << 19, 1 << 23)  # bytes
_LEAST_PER_BYTE = 1e-13  # seconds: 80 Tb/s
_ENOUGH_SECONDS = 0.5  # messages that would take longer are not measured
_REPETITIONS = 15, 3  # of the smallest messages, and of all others


class Sample(NamedTuple):
    """The time of messages of one size.

    Attributes:
        nbytes: of the payload.
        seconds: from launch to arrival, on the slowest rank.
    """

    nbytes: int
    seconds: float


def wire_factor(kind: str, world_size: int) -> float:
    """Bytes that a rank sends per byte of payload; a ring all-reduce sends everything twice."""
    share = (world_size - 1) / world_size
    return 2 * share if kind.startswith("all-reduce") else share


def measure_link(
    group: dist.ProcessGroup, device: torch.device, messages: Iterable[Message]
) -> tuple[Link, dict[str, list[Sample]]]:
    """Measure the cost of messages of each kind; returns also the samples of each fit. A collective call.

    Args:
        group: the ranks.
        device: of the messages.
        messages: of all hooks.
    """
    probe = _Probe(group, device)
    probe.measure("all-reduce float32", SIZES[1], 1)  # connects the ranks
    kinds = sorted({message.kind for message in messages})
    samples = {kind: probe.samples(kind) for kind in kinds}
    costs = {kind: fit(of_kind) for kind, of_kind in samples.items()}
    bandwidth = median(8 * wire_factor(kind, group.size()) / cost.per_byte for kind, cost in costs.items())
    return Link(world_size=group.size(), bandwidth=bandwidth, costs=costs), samples


class _Probe:
    """Sends messages over a process group.

    Args:
        group: the ranks.
        device: of the messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._executor = executor_for(group, device)
        self._clock = Clock(device)

    def samples(self, kind: str) -> list[Sample]:
        """Time messages of growing size, until one would take `_ENOUGH_SECONDS`. The result is equal on all ranks."""
        samples: list[Sample] = []
        for nbytes in SIZES:
            if len(samples) > 1 and nbytes / samples[-1].nbytes * samples[-1].seconds > _ENOUGH_SECONDS:
                break
            samples.append(self.measure(kind, nbytes, _REPETITIONS[bool(samples)]))
        return samples

    def measure(self, kind: str, nbytes: int, repetitions: int) -> Sample:
        """Time one message: the median on the slowest rank."""
        task = _task(message_maker(kind, nbytes, self._executor.transport, self._device))
        seconds = torch.tensor(median(self._once(task) for _ in range(repetitions)), device=self._device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._group)
        return Sample(nbytes, float(seconds))

    def _once(self, task: Task) -> float:
        """Time one message on this rank."""
        dist.barrier(self._group)
        self._clock.synchronize()
        start = time.perf_counter()
        self._executor.submit(task, is_last=True).wait()
        self._clock.synchronize()
        return time.perf_counter() - start


def _task(make: Callable[[], Collective]) -> Task:
    async def task(_: Workspace) -> None:
        await make()

    return task


def message_maker(kind: str, nbytes: int, transport: Transport, device: torch.device) -> Callable[[], Collective]:
    """A function that returns a collective of a kind, on zeros; the inverse of `compute_probe.message_of`."""
    if kind.startswith("all-reduce"):
        dtype = getattr(torch, kind.removeprefix("all-reduce "))
        tensor = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=device)
        return lambda: transport.all_reduce(tensor)
    pieces, n = transport.pieces(nbytes), transport.world_size
    cells = torch.zeros(pieces, n, max(1, nbytes // (pieces * n)), dtype=torch.uint8, device=device)
    if kind == "all-gather":
        own = cells[:, 0].clone()
        return lambda: transport.all_gather(cells, own)
    sent = cells.clone()
    return lambda: transport.all_to_all(cells, sent)


def fit(samples: Sequence[Sample]) -> MessageCost:
    """Fit the alpha-beta model: alpha is the time of the smallest message, beta the slope to the largest."""
    first, last = samples[0], samples[-1]
    per_byte = max(last.seconds - first.seconds, 0.0) / max(last.nbytes - first.nbytes, 1)
    return MessageCost(first.seconds, max(per_byte, _LEAST_PER_BYTE))


def ideal_link(
    world_size: int, bandwidth: float, latency: float, messages: Iterable[Message], overhead: float = 0.0
) -> Link:
    """An ideal link of known bandwidth and latency: ring all-reduces and direct exchanges at full rate.

    Args:
        world_size: number of ranks.
        bandwidth: bits per second that each rank sends.
        latency: seconds from one rank to another.
        messages: of all hooks.
        overhead: seconds that the software takes per message.
    """
    costs = {}
    for kind in sorted({message.kind for message in messages}):
        rounds = 2 * (world_size - 1) if kind.startswith("all-reduce") else 1
        per_byte = 8 * wire_factor(kind, world_size) / bandwidth
        costs[kind] = MessageCost(overhead + rounds * latency, per_byte)
    return Link(world_size=world_size, bandwidth=bandwidth, costs=costs)


def overhead_per_message(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that the executor takes for an empty message, measured in a group of one rank."""
    return _Probe(group, device).measure("all-reduce float32", SIZES[0], _REPETITIONS[0]).seconds
