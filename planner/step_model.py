"""Model of a training step: predicts its time from the costs of the model, the hook and the link.

A message of m bytes takes ``latency + m * per_byte`` (the alpha-beta model). The exchange of the early buckets overlaps
the backward pass; that of the last bucket does not. Compression adds time before and after each message, so it pays off
only if it saves more time on the link than it takes. How much overlaps depends on the device: see `Overlap`.

Source: Agarwal, Wang, Venkataraman, Papailiopoulos, "On the Utility of Gradient Compression in Distributed Training
Systems", MLSys 2022 (arXiv:2103.00543).

Here a bucket is launched on the thread of the backward pass, exchanged, and finished on that thread after the backward
pass. In its exchange, it passes through the parts of its algorithm in bucket order, as in `WorkerExecutor`:

    first part, first message        up to `MAX_TASKS_IN_FLIGHT` buckets at a time
    ... further parts and messages, of the oldest bucket only
    last part

Messages leave the link one after another, first messages and later ones on links of their own. Every end time is a
maximum of sums of durations, so the predicted step never gets shorter if a duration gets longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT


class Overlap(Enum):
    """The work that overlaps the backward pass."""

    EVERYTHING = "a CPU with cores to spare: computations of hooks, and messages"
    MESSAGES = "a GPU: messages; computations of hooks share the GPU with the backward pass"
    NOTHING = "a CPU without a core to spare: computations and the threads that send and receive take turns"


IN_NODE, BETWEEN_NODES = " in a node", " between nodes"  # ends of the names of collectives among some ranks


def is_in_node(kind: str) -> bool:
    """Whether messages of a kind stay in a node, and use no network."""
    return kind.endswith(IN_NODE)


def is_between_nodes(kind: str) -> bool:
    """Whether messages of a kind are of a shard, 1 / ranks per node of the gradients."""
    return kind.endswith(BETWEEN_NODES)


class Message(NamedTuple):
    kind: str  # the collective: a key of `Link.costs`
    nbytes: int  # payload, as `Transport.payload_bytes` counts it, in a node as between nodes


class BucketCost(NamedTuple):
    """Cost of exchanging one bucket with one hook: seconds of computation, and messages."""

    launch: float  # seconds of the call of the hook, on the thread of the backward pass
    compute: tuple[float, ...]  # seconds before the first message, between messages, and after the last one
    messages: tuple[Message, ...]  # in order; one less than ``compute``
    finish: float  # seconds after the backward pass, on its thread


@dataclass(frozen=True, kw_only=True)
class HookCost:
    """Cost of a hook on this device."""

    name: str  # a name in the registry
    buckets: tuple[BucketCost, ...]  # in the order of launch
    memory_bytes: int  # the hook's states and wire buffers, or, without a hook, DDP's flat buffers

    @property
    def payload_bytes(self) -> int:
        """Payload of all messages that leave a node: what `Transport.payload_bytes` counts in a step."""
        return self.bytes_kept(ranks_per_node=1)

    def bytes_kept(self, ranks_per_node: int) -> int:
        """Bytes in which the hook sends the gradients of the whole model: the fewer, the more it changes them."""
        messages = [each for bucket in self.buckets for each in bucket.messages if not is_in_node(each.kind)]
        return sum(each.nbytes * (ranks_per_node if is_between_nodes(each.kind) else 1) for each in messages)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Cost of a step of the model on this device, without gradient exchange."""

    forward: float  # seconds
    backward: float  # seconds
    # for each bucket, in the order of launch, the seconds from the start of the backward pass until all its
    # gradients are ready
    ready: tuple[float, ...]
    optimizer: float | None = None  # seconds of an optimizer step; None: not measured, and not part of the step
    gradient_bytes: int
    overlap: Overlap  # work that overlaps the backward pass on this device
    spread: float = 1.0  # slowest over fastest measured step time, without the optimizer


class MessageCost(NamedTuple):
    """Time of a message of one kind with a payload of m bytes: ``latency + m * per_byte``."""

    latency: float  # seconds of an empty message
    per_byte: float  # seconds per byte. A message keeps the link busy for ``m * per_byte``.


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between the ranks."""

    world_size: int  # number of ranks
    ranks_per_node: int = 1  # ranks that share a machine and its network interface
    bandwidth: float  # bits per second that each node sends in large messages; if there is only one node, each rank
    costs: Mapping[str, MessageCost]  # message costs by kind

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    def at(self, bandwidth: float) -> Link:
        """A link of the same latency and another bandwidth, in bits per second."""
        scale = self.bandwidth / bandwidth
        costs = {
            kind: cost if is_in_node(kind) else cost._replace(per_byte=scale * cost.per_byte)
            for kind, cost in self.costs.items()
        }
        return replace(self, bandwidth=bandwidth, costs=costs)

    def latency(self, message: Message) -> float:
        """Seconds that a message takes in addition to the time for which it keeps the link busy."""
        latency, per_byte = self.costs[message.kind]
        return latency + message.nbytes * per_byte if is_in_node(message.kind) else latency

    def busy(self, message: Message) -> float:
        """Seconds for which a message keeps the link between nodes busy."""
        return 0.0 if is_in_node(message.kind) else message.nbytes * self.costs[message.kind].per_byte


@dataclass(frozen=True, kw_only=True)
class GivenLink:
    """A network that the user describes; it is not measured."""

    world_size: int  # number of ranks
    bandwidth: float  # bits per second that each node sends; if there is only one node, each rank
    latency: float  # seconds from one node to another
    ranks_per_node: int = 1  # a divisor of the world size


class BucketTimes(NamedTuple):
    """Durations of the exchange of one bucket."""

    compute: Sequence[float]  # before the first message, between messages, and after the last one
    busy: Sequence[float]  # time for which each message keeps the link busy; one less than ``compute``
    latency: Sequence[float]  # time until each message arrives, after it has left the link


def exchange_ends(ready: Sequence[float], buckets: Sequence[BucketTimes], in_flight: int) -> list[float]:
    """The end time of each bucket's exchange, if only the order of the parts delays it; see also `busy_until`.

    Args:
        ready: launch time of each bucket, not decreasing.
        buckets: durations of each bucket.
        in_flight: largest number of buckets in flight.
    """
    ends: list[float] = []
    started = finished = 0.0
    free = [0.0, 0.0]  # times at which the links of first and of later messages are free
    for b, (at, bucket) in enumerate(zip(ready, buckets, strict=True)):
        slot = ends[b - in_flight] if b >= in_flight else 0.0
        started = now = max(at, started, slot) + bucket.compute[0]
        for i, (busy, latency, seconds) in enumerate(zip(bucket.busy, bucket.latency, bucket.compute[1:], strict=True)):
            free[i > 0] = max(now, free[i > 0]) + busy
            now = finished = max(free[i > 0] + latency, finished) + seconds
        ends.append(now)
    return ends


def busy_until(ready: Sequence[float], buckets: Sequence[BucketTimes]) -> float:
    """A lower bound of the last end: all messages share one link, and all parts one worker."""
    on_link = _suffix_sums([sum(bucket.busy) for bucket in buckets])
    on_worker = _suffix_sums([sum(bucket.compute) for bucket in buckets])
    return max(
        max(at + bucket.compute[0] + link, at + worker)
        for at, bucket, link, worker in zip(ready, buckets, on_link, on_worker, strict=True)
    )


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


def step_seconds(model: ModelCost, hook: HookCost, link: Link) -> float:
    """Predict the seconds of a step: forward, backward, exchange of all gradients with a hook, and optimizer."""
    launches = list(accumulate(bucket.launch for bucket in hook.buckets))
    launched = [model.forward + ready + delay for ready, delay in zip(model.ready, launches, strict=True)]
    times = [
        BucketTimes(bucket.compute, list(map(link.busy, bucket.messages)), list(map(link.latency, bucket.messages)))
        for bucket in hook.buckets
    ]
    end = model.forward + model.backward + launches[-1]
    for bucket, exchanged in zip(hook.buckets, exchange_ends(launched, times, MAX_TASKS_IN_FLIGHT), strict=True):
        end = max(end, exchanged) + bucket.finish
    end = max(end, busy_until(launched, times))
    optimizer = model.optimizer or 0.0
    if model.overlap is Overlap.EVERYTHING:
        return end + optimizer
    computed = model.forward + model.backward
    computed += sum(bucket.launch + sum(bucket.compute) + bucket.finish for bucket in hook.buckets)
    exposed = times if model.overlap is Overlap.NOTHING else times[-1:]
    return max(end, computed + sum(sum(bucket.latency) + sum(bucket.busy) for bucket in exposed)) + optimizer


def with_larger_buckets(model: ModelCost, hook: HookCost, factor: int) -> tuple[ModelCost, HookCost]:
    """The costs if each bucket takes the place of ``factor`` consecutive ones; the last bucket is whole.

    It sends as many messages as one of them, with the bytes of all, and is ready when the last of them is. Buckets with
    different messages, such as one that a hook leaves uncompressed, stay apart.
    """
    groups: list[list[int]] = []
    for i in reversed(range(len(hook.buckets))):
        kinds = [message.kind for message in hook.buckets[i].messages]
        if groups and len(groups[0]) < factor and kinds == [m.kind for m in hook.buckets[groups[0][0]].messages]:
            groups[0].insert(0, i)
        else:
            groups.insert(0, [i])
    buckets = []
    for group in groups:
        parts = [hook.buckets[i] for i in group]
        messages = tuple(
            Message(each[0].kind, sum(message.nbytes for message in each))
            for each in zip(*(part.messages for part in parts), strict=True)
        )
        compute = tuple(map(sum, zip(*(part.compute for part in parts), strict=True)))
        launch, finish = sum(part.launch for part in parts), sum(part.finish for part in parts)
        buckets.append(BucketCost(launch, compute, messages, finish))
    ready = tuple(model.ready[group[-1]] for group in groups)
    return replace(model, ready=ready), replace(hook, buckets=tuple(buckets))


SEARCHED = (1e6, 1e13)  # bits per second
_POINTS_PER_DECADE = 20


def break_even(model: ModelCost, hook: HookCost, plain: HookCost, link: Link) -> float | None:
    """The bandwidth in bits per second below which a step with ``hook`` is shorter than with ``plain``.

    None if there is no such bandwidth in `SEARCHED`; infinity if it is shorter at all of them. If the curves cross
    several times, the crossing at the highest bandwidth counts.
    """

    def gain(bandwidth: float) -> float:
        at = link.at(bandwidth)
        return step_seconds(model, plain, at) - step_seconds(model, hook, at)

    least, most = SEARCHED
    if gain(most) > 0:
        return float("inf")
    ratio = 10 ** (1 / _POINTS_PER_DECADE)
    high = most
    while gain(high) <= 0:
        if high <= least:
            return None
        high, above = high / ratio, high
    for _ in range(40):
        middle = (high * above) ** 0.5
        high, above = (middle, above) if gain(middle) > 0 else (high, middle)
    return high
