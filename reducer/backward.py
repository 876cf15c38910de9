"""One synchronized backward: its state, its durations, and this rank's part in the exchange with other ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import GroupTransport
from gradwire.comm.connections import Connections, connections_of
from gradwire.kernels import is_capturing
from gradwire.reducer import errors
from gradwire.reducer.bucketing import Bucket

__all__ = ["Backward", "Exchange", "ForwardResults", "Phase", "StepTimes"]


class Exchange:
    """This rank's part in the exchange of gradients on a process group.

    After an error the rank *leaves* the exchange (`fail`), whether its forward, its backward, a hook or the end of its
    backward raised: its connections are closed with a notice to its peers, which raise and leave too. Every forward
    raises from then on, until `resynchronize` has brought all ranks together. If a backward raised, the next forward
    finds it unfinished. If it raised before its first gradient was ready, it has exchanged nothing, and training
    continues with the next batch. See `gradwire.comm.connections` and docs/fault-handling.md.

    Buffers are broadcast in a forward, gradients reduced in a backward. If the loss of a rank raises and its loop goes
    on, it waits in its next forward for peers that wait in their backwards for it. So a rank that waits announces how
    many forwards and backwards it has begun.

    Args:
        process_group: the ranks.
        device: device of the gradients.

    Attributes:
        connections: gradwire's connections on the process group, as the last forward or backward found them.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._thread = 0  # the thread that called the latest forward
        self.update_process_group(process_group)
        self.restart()

    def update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Exchange with other ranks from now on."""
        self.process_group = process_group
        self._number = self.connect().new_user()

    def restart(self) -> None:
        """Count forwards and backwards anew: the ranks have agreed to."""
        self._n_forwards = self._n_backwards = 0  # synchronized ones

    def connect(self) -> Connections:
        """Find gradwire's connections on the process group.

        Raises:
            RuntimeError: the process group was destroyed.
        """
        self.connections = connections_of(self.process_group)
        return self.connections

    @property
    def transport(self) -> GroupTransport:
        """The collectives of the reducer itself, and of the default reduction on CPUs."""
        return self.connections.transport("backward", self.device)

    def begin_forward(self) -> None:
        """Note that this thread begins a synchronized forward."""
        self._thread = threading.get_ident()
        self._n_forwards += 1

    def begin_backward(self, user: object) -> None:
        """Note that ``user`` exchanges in the current backward, until `Connections.leave`; see `Connections.enter`."""
        self.connect().enter(user, self._thread)
        self._n_backwards += 1

    def fail(self, user: object, step: int, cause: str) -> str | None:
        """Leave the exchange. Returns the error of another rank that left before this one."""
        connections = self.connect()
        elsewhere = connections.failure_elsewhere()
        rank = dist.get_rank(self.process_group)
        connections.fail(elsewhere or f"Step {step} failed on rank {rank}: {cause}")
        connections.leave(user)
        return elsewhere

    def announce_forward(self) -> None:
        """While a forward waits for other ranks: tell them where this one is; raise RuntimeError if one has left."""
        here = [dist.get_rank(self.process_group), self._n_forwards, self._n_backwards]
        self.connections.announce(f"forward/{self._number}", json.dumps(here))
        self.connections.check_peers()

    def check_in_step(self) -> None:
        """While a backward waits for other ranks: raise RuntimeError if one has left, or has skipped this backward."""
        self.connections.check_peers()
        text = self.connections.announced(f"forward/{self._number}")
        if text is not None:
            rank, forwards, backwards = json.loads(text)
            if forwards > self._n_forwards and backwards < self._n_backwards:
                raise RuntimeError(errors.backward_skipped(rank))


@dataclass
class ForwardResults:
    """Handles and futures that forwards have set for the next reduction.

    Attributes:
        live_ranks: the all-reduce that counts the ranks with inputs left, in `join`; None to divide by the world size.
        futures: awaited at the end of the backward.
    """

    live_ranks: dist.Work | None = None
    futures: list[Future[Any]] = field(default_factory=list)
    _divisor: int | None = None

    def divisor(self, world_size: int) -> int:
        """The divisor of sums over ranks: the world size; in `join`, the ranks with inputs left."""
        if self._divisor is None:
            self._divisor = world_size
            if self.live_ranks is not None:
                self.live_ranks.wait()
                self._divisor = int(self.live_ranks.result()[0].item())
        return self._divisor


class Phase(Enum):
    """The progress of a backward."""

    PREPARED = "no gradient is ready yet"
    REDUCING = "gradients are ready, and buckets are launched once they are complete"
    DONE = "all results are in the gradients, or the backward was discarded"


class Backward:
    """The state of one synchronized backward pass: ready gradients, launched buckets, and their results.

    A gradient is *ready* once autograd adds nothing more to it. A bucket is *complete* once all its gradients are
    ready. It is *launched* once it and all buckets before it are complete.

    Args:
        buckets: the buckets, in the order of launch.
        bucket_of: the index of each parameter's bucket.
        phase: the first phase.

    Attributes:
        phase: progress of the backward.
        ready: 1 for each parameter whose gradient is ready.
        ready_order: the parameters whose gradients autograd has completed, in that order; unused
            parameters are not listed.
        expected_last: 1 for each parameter whose autograd hook is the only one of its bucket to notify.
        calls: number of calls of each parameter's autograd hook, with a static graph.
        n_launched: number of launched buckets, skipped ones included.
        futures: the result of each bucket's reduction; None before its launch, and if it is not reduced.
    """

    def __init__(self, buckets: Sequence[Bucket], bucket_of: Sequence[int], phase: Phase = Phase.PREPARED) -> None:
        self._buckets = buckets
        self._bucket_of = bucket_of
        self.phase = phase
        self.ready = bytearray(len(bucket_of))
        self.ready_order: list[int] = []
        self.expected_last = bytearray(len(bucket_of))
        self.calls = [0] * len(bucket_of)
        self.n_launched = 0
        self.futures: list[Future[Any] | None] = [None] * len(buckets)
        self._n_pending = [
            len(bucket.members) for bucket in buckets
        ]  # number of gradients that a bucket still waits for

    def mark_ready(self, index: int) -> bool:
        """Count a gradient as ready. Call it once per gradient. Returns whether its bucket is complete."""
        self.ready[index] = 1
        bucket = self._bucket_of[index]
        self._n_pending[bucket] -= 1
        return self._n_pending[bucket] == 0

    def next_complete(self) -> Bucket | None:
        """The next bucket to launch, if it is complete."""
        if self.n_launched < len(self._buckets) and self._n_pending[self.n_launched] == 0:
            return self._buckets[self.n_launched]
        return None

    @property
    def is_launched(self) -> bool:
        """Whether all buckets are launched."""
        return self.n_launched == len(self._buckets)

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]

    def deferrable(self, first: int, unused: Sequence[int], expected_calls: Sequence[int] | None) -> bytearray:
        """The mask of parameters whose autograd hooks need only record: see `AutogradHooks`.

        In each bucket the hook of the gradient expected last is not deferred. Nor are the hooks of
        gradients that several calls add up, or that never come.

        Args:
            first: the parameter of the gradient that has just come.
            unused: parameters that get no gradient.
            expected_calls: number of calls of each hook in a backward, with a static graph.
        """
        mask = bytearray(b"\1") * len(self._bucket_of)
        for index in unused:
            mask[index] = 0
        if expected_calls is not None:
            for index, (expected, calls) in enumerate(zip(expected_calls, self.calls, strict=True)):
                if expected - calls > 1:
                    mask[index] = 0
        for bucket in self._buckets:
            for last in reversed(bucket.members):
                if mask[last]:
                    mask[last], self.expected_last[last] = 0, 1
                    break
        mask[first] = 0
        return mask

    def missing_next_to(self, index: int) -> list[int]:
        """The parameters in the bucket of ``index`` whose gradients are not ready."""
        return [i for i in self._buckets[self._bucket_of[index]].members if not self.ready[i]]


TIMED_ITERATIONS = 10  # number of first iterations that are all timed
_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class StepTimes:
    """Durations of the forward, of the backward and of its communication, in nanoseconds, and their averages.

    The first `TIMED_ITERATIONS` are timed, then one iteration in ``sample_rate``. On a GPU, times are those of the
    current stream. Nothing waits for the device: a step that has not ended when its times are read is not counted, nor
    is a step of which any part is captured in a CUDA graph: to record or to query a timing event would end the capture.

    Attributes:
        sample_rate: number of iterations from one timed iteration to the next.
        iterations: synchronized forwards so far.
        reported: index of the last timed iteration from 0, which PyTorch reports as the iteration.
        unused_bytes: size of the parameters that the last backward left out on this rank.
        n_reduced: number of buckets that the last backward reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iterations = 0
        self.reported = 0
        self.unused_bytes = 0
        self.n_reduced = 0
        self._device = device
        self._on_host = device.type == "cpu"
        self._is_timed = False
        self._events: dict[str, Any] = {}  # times in ns, or CUDA events
        self._unix_times: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._n_timed = 0

    def begin_forward(self) -> None:
        """Count a synchronized forward; add the previous step's times to the averages."""
        self._settle()
        is_due = self.iterations <= TIMED_ITERATIONS or self.iterations % self.sample_rate == 0
        self._is_timed = is_due and (self._on_host or not is_capturing(self._device))
        if self._is_timed:
            self.reported = self.iterations
            self._events = {}
            self._unix_times = {}
        self.iterations += 1
        self.record("forward_compute_time_start")

    def record(self, event: str) -> None:
        """Record the time of an event: the first of its name in an iteration that is timed.

        The events are ``forward_compute_time_start``, and ``_start`` and ``_end`` of ``backward_compute_time`` and
        ``backward_comm_time``.
        """
        if not self._is_timed or event in self._events:
            return
        if self._on_host:
            self._events[event] = time.perf_counter_ns()
        elif is_capturing(self._device):
            self._is_timed = False
            self._events = {}
            self._unix_times = {}
            return
        else:
            self._events[event] = torch.cuda.Event(enable_timing=True)
            self._events[event].record(torch.cuda.current_stream(self._device))
        self._unix_times[event] = time.time_ns()

    def _settle(self) -> None:
        """Compute the durations of a timed iteration once it has ended."""
        end = self._events.get("backward_comm_time_end")
        if end is None or not (self._on_host or (not is_capturing(self._device) and end.query())):
            return
        self._last = {name: self._between(*events) for name, events in _DURATIONS.items()}
        self._sums = {name: self._sums.get(name, 0) + duration for name, duration in self._last.items()}
        self._n_timed += 1
        self._is_timed = False
        self._events = {}

    def _between(self, start: str, end: str) -> int:
        first, last = self._events[start], self._events[end]
        return max(0, last - first if self._on_host else int(first.elapsed_time(last) * 1e6))

    def summary(self) -> dict[str, int]:
        """The last durations, the Unix times of their events, and the averages, under PyTorch's names."""
        self._settle()
        averages = {f"avg_{name}": total // self._n_timed for name, total in self._sums.items()}
        counts = {"unused_parameter_size": self.unused_bytes, "num_buckets_reduced": self.n_reduced}
        return self._last | self._unix_times | averages | counts
