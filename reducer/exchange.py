"""`Exchange`: a reducer's part in the exchange of gradients on a process group, and how it leaves after an error."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import GroupTransport, connections
from gradwire.comm.rank_differences import format_ranks, out_of_step
from gradwire.comm.shared_facts import UNKNOWN, SharedFacts
from gradwire.comm.store_collectives import gather_json
from gradwire.comm.torch_internals import all_groups, collective_counts
from gradwire.exchange.hook_state import HookState
from gradwire.exchange.names import plain_name
from gradwire.kernels import layout_guard
from gradwire.reducer.model_sync import Layouts, describe_layouts, layouts_of

_REMEDY_OF_BUFFERS = (
    "Nothing was sent. Register, resize and cast the buffers alike on all ranks. Keep a buffer that each rank sizes by "
    "its own data, such as a cache of positions or a mask, in a plain attribute, or name it in "
    "module._ddp_params_and_buffers_to_ignore before you wrap the model. With forward_sync_buffers=False, no buffer is "
    "synchronized before a forward pass."
)


_REMEDY_OF_NAMES = "Register the same parameters and buffers, frozen ones included, in the same order on all ranks."


def describe_names(names: Sequence[str]) -> dict[str, str]:
    """The plain names as facts that must be equal on all ranks."""
    return {plain_name(name): "there" for name in names}


class Exchange:
    """This rank's part in the exchange of gradients on a process group.

    After an error in a forward, a backward, a hook or the end of a backward, the rank *leaves* (`leave`): its peers get
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
        buffers: the layouts of the buffers that are synchronized, compared by `compare_buffers`.
        connections: gradwire's connections on the process group, as the last forward found them.
        has_hook: whether the model has a communication hook on this rank.
        hook_groups: the further process groups that the hook has used.
        hook_states: the states of gradwire's hooks that a user's hook has called, in order of their first use, with the
            process group of each.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, buffers: object = UNKNOWN) -> None:
        self.device = device
        self.has_streams = connections.has_streams(device)
        self.has_hook = False
        self._thread = 0  # the thread that called the latest forward
        self.hook_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.hook_states = weakref.WeakKeyDictionary[HookState, weakref.ref[dist.ProcessGroup]]()
        # Collectives issued on each process group before the current backward, if a user's hook runs in it.
        self._counts: dict[dist.ProcessGroup, list[int]] = {}
        self._layouts: Layouts = []  # of the buffers that were compared last, with their names and guard
        self._buffer_names: list[str] = []
        self._buffer_guard: Callable[..., bool] | None = None
        self.update_process_group(process_group, buffers)

    def update_process_group(self, process_group: dist.ProcessGroup, buffers: object = UNKNOWN) -> None:
        """Exchange with other ranks from now on, which have agreed on the layouts of the ``buffers``."""
        self.process_group = process_group
        self.number = self.connect().new_reducer(self)
        self.buffers = SharedFacts(self.connections, "buffers", _REMEDY_OF_BUFFERS, describe_layouts, buffers)
        self._drift_names = SharedFacts(
            self.connections, "tensors that check_every compares", _REMEDY_OF_NAMES, describe_names
        )
        self.restart()

    def restart(self) -> None:
        """Reset the counts of forwards and backwards, on which all ranks have agreed."""
        self.n_passes = self._n_backwards = 0  # synchronized ones
        self._n_comparisons = 0  # calls of `compare_buffers` since the latest backward began
        self._awaited = 0  # the number of the latest backward in which this rank has waited for others

    def connect(self) -> connections.Connections:
        """Find gradwire's connections on the process group; raises RuntimeError if it was destroyed."""
        self.connections = connections.connections_of(self.process_group)
        return self.connections

    @property
    def transport(self) -> GroupTransport:
        """The collectives of the reducer itself, and of the default reduction on CPUs."""
        return self.connections.transport(connections.BACKWARD, self.device, self.check_in_step)

    def begin_forward(self) -> None:
        """Note that this thread begins a synchronized forward."""
        self._thread = threading.get_ident()
        self.n_passes += 1

    def begin_backward(self, has_groups: bool) -> None:
        """Note that the current backward exchanges gradients; ``has_groups``: whether a user's hook runs in it."""
        self.connections.begin_exchange(self, self._thread)
        if self._n_backwards == 0:
            self.n_passes = 1
        self._n_backwards += 1
        self._n_comparisons, self.buffers.passed = 0, (self._n_backwards, 0)
        if has_groups:
            self._counts = {group: collective_counts(group) for group in all_groups()}

    def compare_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Before buffers are synchronized: RuntimeError, on every rank, unless all ranks have the same ones.

        Places are counted anew in every backward, because a rank may make a forward without buffers alone.
        """
        names, tensors = list(buffers), buffers.values()
        # 0.1 us a buffer instead of 0.4
        if self._buffer_guard is None or names != self._buffer_names or not self._buffer_guard(*tensors):
            self._buffer_guard, self._buffer_names = layout_guard([*tensors]), names
            self._layouts = layouts_of(buffers)
        self._n_comparisons += 1
        self.buffers.check(self._layouts, (self._n_backwards, self._n_comparisons))

    def compare_names(self, names: list[str]) -> None:
        """Before tensors are compared in a backward: RuntimeError, on every rank, unless the ranks have equal names."""
        self._drift_names.check(names, (self._n_backwards,))

    def agree_to_reduce_again(self) -> None:
        """Before a further reduction for one forward: RuntimeError, on every rank, if ranks are in different passes.

        Through the store: elsewhere, a collective would pair with an unrelated one.
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

    def states_on(self, group: dist.ProcessGroup) -> list[HookState]:
        """Those of `hook_states` that have exchanged on ``group``."""
        return [state for state, its_group in self.hook_states.items() if its_group() is group]

    def note_groups(self) -> None:
        """Note the process groups on which collectives were issued since the begin of the backward."""
        counts, self._counts = self._counts, {}
        for group in all_groups() if counts else ():
            now = collective_counts(group)
            if group is not self.process_group and any(now) and now != counts.get(group):
                self.hook_groups.add(group)

    def leave(self, step: int, cause: str, is_of_peer: bool = False) -> str | None:
        """Leave the exchange. Returns the error of another rank that left before this one.

        ``is_of_peer``: a connection has closed, so the notice of the rank that closed it is on its way.
        """
        own = self.connect()
        elsewhere = own.failure_elsewhere(wait=is_of_peer)
        self.note_groups()
        failure = elsewhere or f"Step {step} failed on rank {dist.get_rank(self.process_group)}: {cause}"
        for each in self._all_connections():
            each.fail(failure)
        own.end_exchange(self)
        return elsewhere

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors until all that this exchange has begun is done, after an error, too.

        On a GPU, nothing waits for the buckets of a failed step, and the user frees their gradients.
        """
        for each in self._all_connections():
            each.keep(tensors)

    def _all_connections(self) -> list[connections.Connections]:
        """Those on the process group, and on the groups that the hook has used."""
        found = map(connections.existing_connections, self.hook_groups)
        return [self.connections, *(each for each in found if each is not None)]

    def announce_forward(self) -> None:
        """While a forward waits for other ranks: tell them where this one is; raise RuntimeError if one has left."""
        here = [dist.get_rank(self.process_group), self.n_passes, self._n_backwards]
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
            if forwards > self.n_passes and backwards < self._n_backwards:
                raise RuntimeError(  # this rank waits in a backward, the other one in a forward
                    f"Rank {rank} skipped the backward pass that this rank is in and has begun its next forward pass, "
                    "so each waits for the other. Its loss may have raised an exception. Call resynchronize() on every "
                    "rank after a failed step."
                )
        if not self.has_hook and (text := connections.announced(number, "hook")):
            raise RuntimeError(
                f"{text} for this model, and this rank has no communication hook. Register the same hook on every "
                "rank, not only after `if rank == 0:`."
            )
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
        if not late:
            return None
        return (
            f"This rank has waited in synchronized backward pass {self._n_backwards} of this model for "
            f"{format_ranks(late)}, until the process group's timeout. Make as many forward and backward passes on "
            "every rank, or use join() for uneven inputs."
        )
