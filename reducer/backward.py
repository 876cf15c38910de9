"""One synchronized backward: its state, its autograd hooks, its durations, and the exchange with other ranks."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from gradwire.comm import GroupTransport, connections
from gradwire.comm.store_collectives import format_ranks, gather_json, out_of_step
from gradwire.comm.torch_internals import all_groups, collective_counts
from gradwire.comm.transport import clear_frames
from gradwire.hooks.hook_state import HookState
from gradwire.kernels import is_capturing
from gradwire.reducer import errors, torch_internals
from gradwire.reducer.bucket import Bucket


class Exchange:
    """This rank's part in the exchange of gradients on a process group.

    After an error in a forward, a backward, a hook or the end of a backward, the rank *leaves* (`fail`): its peers get
    a notice, raise and leave too, and every forward raises until `resynchronize`. A backward that raised before its
    first gradient was ready has exchanged nothing, and training continues. See `gradwire.comm.connections` and
    docs/fault-handling.md.

    Buffers are broadcast in the forward, gradients reduced in the backward. If the loss raises on one rank and its loop
    goes on, that rank waits in its next forward, its peers in their backward. To detect this deadlock, a rank that
    waits in a forward announces how many forwards and backwards it has begun.

    A user's hook may use further process groups: it passes one to a hook of gradwire, which calls `note_use`, or issues
    collectives itself, which shows in the group's count of collectives. A rank that leaves fails gradwire's connections
    on all of them, and `resynchronize` compares and renews all of them.

    Attributes:
        has_streams: whether hooks run on streams of the device.
        n_passes: number of synchronized forwards, which must be equal on all ranks in every backward. Counting starts
            at the forward of the first backward: before it, one rank alone may inspect its model.
        number: the number of this exchange on the process group, equal on all ranks.
        connections: gradwire's connections on the process group, as the last forward found them.
        has_hook: whether the model has a communication hook on this rank.
        hook_groups: the further process groups that the hook has used.
        hook_states: the states of gradwire's hooks that a user's hook has called, in order of their first use, with the
            process group of each.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.has_streams = connections.has_streams(device)
        self.has_hook = False
        self._thread = 0  # the thread that called the latest forward
        self.hook_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.hook_states: weakref.WeakKeyDictionary[HookState, weakref.ref[dist.ProcessGroup]] = (
            weakref.WeakKeyDictionary()
        )
        # Collectives issued on each process group before the current backward, if a user's hook runs in it.
        self._counts: dict[dist.ProcessGroup, list[int]] = {}
        self.update_process_group(process_group)

    def update_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Exchange with other ranks from now on."""
        self.process_group = process_group
        self.number = self.connect().new_user(self)
        self.restart()

    def restart(self) -> None:
        """Reset the counts of forwards and backwards, on which all ranks have agreed."""
        self._n_forwards = self._n_backwards = 0  # synchronized ones
        self.n_passes = 0
        self._awaited = 0  # the number of the latest backward in which this rank has waited for others

    def connect(self) -> connections.Connections:
        """Find gradwire's connections on the process group; raises RuntimeError if it was destroyed."""
        self.connections = connections.connections_of(self.process_group)
        return self.connections

    @property
    def transport(self) -> GroupTransport:
        """The collectives of the reducer itself, and of the default reduction on CPUs."""
        return self.connections.transport("backward", self.device, self.check_in_step)

    def begin_forward(self) -> None:
        """Note that this thread begins a synchronized forward."""
        self._thread = threading.get_ident()
        self._n_forwards += 1
        self.n_passes += 1

    def begin_backward(self, user: object, has_groups: bool) -> None:
        """Note that ``user`` exchanges in the current backward; see `Connections.begin_exchange`.

        ``has_groups``: whether a user's hook runs in it.
        """
        self.connections.begin_exchange(user, self._thread)
        if self._n_backwards == 0:
            self.n_passes = 1
        self._n_backwards += 1
        if has_groups:
            self._counts = {group: collective_counts(group) for group in all_groups()}

    def agree_to_reduce_again(self) -> None:
        """Compare the counts of passes before a further reduction for one forward. A collective call.

        It goes through the store, because a rank that is elsewhere would match the collectives with others.

        Raises:
            RuntimeError: another rank is in another forward or backward; raised on every rank.
        """
        if self.process_group.size() == 1:
            return
        here = self.n_passes, self._n_backwards
        self.connections.announce(self.number, "again", json.dumps([dist.get_rank(self.process_group), *here]))
        purpose = "A further backward pass of a synchronized forward pass"
        forwards, backwards = zip(*gather_json(self.process_group, purpose, here, self.check_in_step), strict=True)
        if (problem := out_of_step(forwards, backwards)) is not None:
            raise RuntimeError(problem)

    def note_use(self, settings: object, group: dist.ProcessGroup) -> None:
        """Note that a user's hook calls one of gradwire's with these settings on ``group``."""
        if group is not self.process_group:
            self.hook_groups.add(group)
        if isinstance(settings, HookState):
            self.hook_states[settings] = weakref.ref(group)

    def note_groups(self) -> None:
        """Note the process groups on which collectives were issued since the begin of the backward."""
        counts, self._counts = self._counts, {}
        for group in all_groups() if counts else ():
            now = collective_counts(group)
            if group is not self.process_group and any(now) and now != counts.get(group):
                self.hook_groups.add(group)

    def fail(self, user: object, step: int, cause: str, is_of_peer: bool = False) -> str | None:
        """Leave the exchange. Returns the error of another rank that left before this one.

        ``is_of_peer``: a connection has closed, so the notice of the rank that closed it is on its way.
        """
        own = self.connect()
        elsewhere = own.failure_elsewhere(wait=is_of_peer)
        self.note_groups()
        failure = elsewhere or f"Step {step} failed on rank {dist.get_rank(self.process_group)}: {cause}"
        for each in (own, *filter(None, map(connections.existing_connections, self.hook_groups))):
            each.fail(failure)
        own.end_exchange(user)
        return elsewhere

    def announce_forward(self) -> None:
        """While a forward waits for other ranks: tell them where this one is; raise RuntimeError if one has left."""
        here = [dist.get_rank(self.process_group), self._n_forwards, self._n_backwards]
        self.connections.announce(self.number, "forward", json.dumps(here))
        self.connections.check_peers()

    def check_in_step(self) -> None:
        """While a backward waits for other ranks: tell them so; raise RuntimeError if one has left, or is elsewhere."""
        connections, number = self.connections, self.number
        connections.check_peers()
        if self._awaited != self._n_backwards:
            self._awaited = self._n_backwards
            connections.announce(number, f"backward/{self.process_group.rank()}", str(self._n_backwards))
        if (text := connections.announced(number, "forward")) is not None:
            rank, forwards, backwards = json.loads(text)
            if forwards > self._n_forwards and backwards < self._n_backwards:
                raise RuntimeError(errors.BACKWARD_SKIPPED.format(rank=rank))
        if not self.has_hook and (text := connections.announced(number, "hook")):
            raise RuntimeError(errors.HOOK_ELSEWHERE.format(hook=text))
        if (text := connections.announced(number, "again")) is not None:
            rank, forwards, backwards = json.loads(text)
            if backwards == self._n_backwards and forwards != self.n_passes:
                counts = [0] * self.process_group.size()
                counts[rank], counts[self.process_group.rank()] = forwards, self.n_passes
                raise RuntimeError(out_of_step(counts))

    def late_ranks(self) -> str | None:
        """The error of ranks that have not come to the backward in which this rank waits; None if there are none."""
        if self._awaited == 0 or self._awaited != self._n_backwards:
            return None
        told = [self.connections.announced(self.number, f"backward/{k}") for k in range(self.process_group.size())]
        late = [rank for rank, text in enumerate(told) if text is None or int(text) < self._n_backwards]
        return errors.RANKS_LATE.format(who=format_ranks(late), number=self._n_backwards) if late else None


class Phase(Enum):
    """The progress of a backward."""

    PREPARED = "no gradient is ready yet"
    REDUCING = "gradients are ready, and buckets are launched once they are complete"
    DONE = "all results are in the gradients, or the backward was discarded"
    AGAIN = "gradients of a further backward of a synchronized forward come in; its end reduces all buckets"


class Backward:
    """The state of one synchronized backward pass.

    A gradient is *ready* once autograd adds nothing more to it. A bucket is *complete* once all its gradients are
    ready. It is *launched* once it and all buckets before it are complete.

    Args:
        buckets: the buckets.
        n_parameters: number of parameters.
        phase: the first phase.
        may_leave_out: whether parameters may stay without a gradient: the ranks then exchange which have one.
    """

    def __init__(self, buckets: Sequence[Bucket], n_parameters: int, phase: Phase, may_leave_out: bool) -> None:
        self.phase, self.may_leave_out = phase, may_leave_out
        self.is_again = phase is Phase.AGAIN  # whether it is not the first of its forward
        self.ready = bytearray(n_parameters)  # 1 for each parameter whose gradient is ready
        self.ready_order: list[int] = []  # of parameters, as autograd completed their gradients; without unused ones
        self.n_pending = [len(bucket.members) for bucket in buckets]  # gradients that each bucket still waits for
        self.expected_last = bytearray(n_parameters)  # 1 for the only parameter of its bucket whose hook notifies
        self.calls = [0] * n_parameters  # of each parameter's autograd hook, with a static graph
        self.n_launched = 0  # buckets, skipped ones included
        self.skipped: set[int] = set()  # positions of the buckets that are not reduced: no parameter of them is used
        self.futures: list[Future[Any] | None] = [None] * len(buckets)  # None before the launch, and if not reduced

    @property
    def missing(self) -> list[int]:
        """The parameters whose gradients are not ready."""
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]

    def take_values(self) -> list[Any]:
        """The values of the futures that are done; None for the others and for failed ones. Drops the futures.

        On a GPU, the current stream waits for the values.
        """
        values = []
        while self.futures:
            future = self.futures.pop(0)
            try:
                values.append(future.wait() if future is not None and future.done() else None)
            except Exception as error:
                clear_frames(error)
                values.append(None)
            finally:
                del future  # it holds the error, too
        return values

    def deferrable(
        self, buckets: Sequence[Bucket], first: int, unused: Sequence[int], expected_calls: Sequence[int] | None
    ) -> bytearray:
        """The mask of parameters whose autograd hooks need only record: see `AutogradHooks`.

        Not the one expected last in each bucket, nor gradients that come ``first``, never, or in several calls.
        """
        mask = bytearray(b"\1") * len(self.ready)
        for index in unused:
            mask[index] = 0
        if expected_calls is not None:
            for index, (expected, calls) in enumerate(zip(expected_calls, self.calls, strict=True)):
                if expected - calls > 1:
                    mask[index] = 0
        for bucket in buckets:
            for last in reversed(bucket.members):
                if mask[last]:
                    mask[last], self.expected_last[last] = 0, 1
                    break
        mask[first] = 0
        return mask


class AutogradHooks:
    """Hooks on the autograd nodes of the parameters, which call back only where a gradient can complete a bucket.

    A call from autograd into Python is the largest cost of a small parameter in a backward, and a bucket waits for its
    last gradient. So the hook of a *deferred* parameter only records its index, once; the next hook that is not
    deferred calls ``notify``, which takes all recorded indices.

    Args:
        parameters: the parameters, by index. None of their hooks is deferred.
        notify: called with the gradient that has come in, from any of autograd's threads; takes the `recorded` indices,
            which another call may have taken.

    Attributes:
        nodes: the autograd node of each parameter that accumulates its gradient.
        recorded: indices of completed gradients that ``notify`` has not taken yet, in order. Other threads append.
    """

    def __init__(self, parameters: Sequence[Tensor], notify: Callable[[Tensor | None], None]) -> None:
        self._parameters = parameters
        self.nodes = [torch_internals.gradient_node(parameter) for parameter in parameters]
        self.recorded: list[int] = []
        self._deferred = bytearray(len(parameters))
        # The nodes must not keep the reducer alive: a module may be wrapped again, and the old reducer is then freed.
        method = weakref.WeakMethod(notify)
        self._hooks = [_make_hook(index, self.recorded, self._deferred, method) for index in range(len(self.nodes))]
        self._handles = [node.register_hook(hook) for node, hook in zip(self.nodes, self._hooks, strict=True)]
        weakref.finalize(self, _remove_all, self._handles)

    def reset(self) -> None:
        """Drop the recorded indices, and defer no hook any longer."""
        self.recorded.clear()
        self._deferred[:] = bytes(len(self._deferred))

    def record(self, index: int) -> None:
        """Act as the hook of a parameter whose gradient came through another autograd node."""
        self._hooks[index](None, (None,))

    def defer(self, mask: bytes | bytearray) -> None:
        """Defer the hooks of the parameters that have a 1 in ``mask``, once each; no others."""
        self._deferred[:] = mask

    def expect_one(self, members: Iterable[int], ready: bytearray) -> int | None:
        """Stop deferring one of these parameters whose gradient is not ready; returns it. None if none is deferred."""
        for index in members:
            if self._deferred[index] and not ready[index]:
                self._deferred[index] = 0
                return index
        return None

    def find_lost(self, indices: Iterable[int]) -> int | None:
        """The first of these parameters whose gradient another node accumulates, without the hook; None if none."""
        for index in indices:
            parameter = self._parameters[index]
            if parameter.requires_grad and torch_internals.gradient_node(parameter) is not self.nodes[index]:
                return index
        return None

    def remove(self) -> None:
        """Remove the hooks."""
        _remove_all(self._handles)


def _make_hook(
    index: int, recorded: list[int], deferred: bytearray, notify: weakref.WeakMethod[Callable[[Tensor | None], None]]
) -> Callable[[object, Sequence[Tensor | None]], None]:
    record = recorded.append

    def hook(_: object, incoming: Sequence[Tensor | None]) -> None:
        record(index)  # first: a thread that stops deferring it meanwhile must find it
        if deferred[index]:
            deferred[index] = 0
        elif (method := notify()) is not None:
            method(incoming[0])

    return hook


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


TIMED_ITERATIONS = 10  # number of first iterations that are all timed
_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class StepTimes:
    """Durations of the forward, of the backward and of its communication, in nanoseconds, and their averages.

    The first `TIMED_ITERATIONS` are timed, then one in ``sample_rate``; on a GPU, on the current stream. Nothing waits
    for the device: a step that has not ended when its times are read does not count, nor one captured in a CUDA graph,
    because recording or querying a timing event would end the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iterations = 0  # synchronized forwards so far
        self.reported = 0  # index of the last timed iteration, which PyTorch reports as the iteration
        self.unused_bytes = 0  # size of the parameters that the last backward left out on this rank
        self.n_reduced = 0  # buckets that the last backward reduced
        self._device, self._is_gpu = device, device.type == "cuda"
        self._is_timed = False
        self._marks: dict[str, Any] = {}  # nanoseconds, or on a GPU events
        self._unix_times: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._n_timed = 0

    def begin_forward(self) -> None:
        """Count a synchronized forward; add the previous step's times to the averages."""
        self._settle()
        is_due = self.iterations <= TIMED_ITERATIONS or self.iterations % self.sample_rate == 0
        self._is_timed = is_due and not (self._is_gpu and is_capturing(self._device))
        if self._is_timed:
            self.reported = self.iterations
            self._marks, self._unix_times = {}, {}
        self.iterations += 1
        self.record("forward_compute_time_start")

    def record(self, event: str) -> None:
        """Record the time of an event in ``_DURATIONS``: the first of its name in an iteration that is timed."""
        if not self._is_timed or event in self._marks:
            return
        if self._is_gpu and is_capturing(self._device):
            self._is_timed = False
            self._marks, self._unix_times = {}, {}
            return
        if self._is_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
            self._marks[event] = now
        else:
            self._marks[event] = time.perf_counter_ns()
        self._unix_times[event] = time.time_ns()

    def _settle(self) -> None:
        """Compute the durations of a timed iteration once it has ended."""
        end = self._marks.get("backward_comm_time_end")
        if end is None or (self._is_gpu and (is_capturing(self._device) or not end.query())):
            return
        for name, (first, last) in _DURATIONS.items():
            begin, end = self._marks[first], self._marks[last]
            self._last[name] = max(0, int(1e6 * begin.elapsed_time(end)) if self._is_gpu else end - begin)
            self._sums[name] = self._sums.get(name, 0) + self._last[name]
        self._n_timed += 1
        self._is_timed = False
        self._marks = {}

    def summary(self) -> dict[str, int]:
        """The last durations, the Unix times of their events, and the averages, under PyTorch's names."""
        self._settle()
        averages = {f"avg_{name}": total // self._n_timed for name, total in self._sums.items()}
        counts = {"unused_parameter_size": self.unused_bytes, "num_buckets_reduced": self.n_reduced}
        return self._last | self._unix_times | averages | counts
