"""Connections: what gradwire owns on a process group, and whether an exchange has failed on it.

A rank on which a step fails *leaves*: it puts a notice with the reason into the store, issues nothing more, and closes
the connections that gradwire made for itself. A peer that waits for this rank sees the closed connection, or the notice
half a second later, raises with that reason, and leaves as well. From then on every exchange of gradients raises, until
all ranks have agreed to begin anew: `Connections.renew`.

So no rank's collective of one step ever meets another rank's of a later step. On NCCL there is nothing to close: peers
wait on their devices until the process group's own timeout.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _world
from torch.futures import Future

from gradwire.compress import Transport, wait_for
from gradwire.hooks.executor import EXIT_LIMIT, Executor, StreamExecutor, WorkerExecutor
from gradwire.hooks.meeting import missing_ranks, store_of

T = TypeVar("T")
DESTROYED = (
    "The process group was destroyed. Initialise a new one, and wrap the model anew or give the hook's state the new "
    "group."
)
ADVICE = (
    "The ranks exchange no more gradients until all of them agree to go on. Do not apply the gradients of this step. "
    "Call resynchronize() of the DistributedDataParallel on every rank, or restart from a checkpoint."
)


class Connections:
    """gradwire's own groups and executors on one process group; see `connections_of`.

    All ranks make the same ones, each at its first use, which is a collective call on CPUs.

    Attributes:
        group: the process group.
        failure: why no exchange is possible; None where one is.
        generation: how often connections were made; equal on all ranks, and part of the keys under which they meet.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.failure: str | None = None
        self._store = store_of(group)
        self.generation = self._store.add(self._counter, 1)
        self._executors: dict[torch.device, Executor] = {}
        self._transports: dict[str, Transport] = {}

    @property
    def _counter(self) -> str:
        return f"generation/{self.group.rank()}"

    @property
    def has_failed(self) -> bool:
        """Whether an exchange has failed, also behind PyTorch's DDP, which does not tell."""
        return self.failure is not None or any(executor.has_failed for executor in self._executors.values())

    def check(self) -> None:
        """Raise RuntimeError if no exchange is possible."""
        if self.failure is not None:
            raise RuntimeError(self.failure if self.failure == DESTROYED else f"{self.failure}\n{ADVICE}")

    def executor(self, device: torch.device) -> Executor:
        """The executor of the hooks' algorithms on a device."""
        self.check()
        if device not in self._executors:
            if has_streams(device):
                self._executors[device] = StreamExecutor(Transport(self.group), device)
            else:
                transport = Transport(self._own_group("first"))
                self._executors[device] = WorkerExecutor(transport, self._own_group("later"), device)
        return self._executors[device]

    def transport(self, purpose: str, device: torch.device) -> Transport:
        """Collectives outside of the executors: for one purpose, on gloo over a group of their own."""
        self.check()
        if purpose not in self._transports:
            is_own = device.type == "cpu" and self._is_gloo
            self._transports[purpose] = Transport(self._own_group(purpose) if is_own else self.group, self.check_peers)
        return self._transports[purpose]

    @property
    def _is_gloo(self) -> bool:
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        return backends.get("cpu") == "gloo"

    def _own_group(self, purpose: str) -> dist.ProcessGroup:
        """A gloo group of the same ranks and timeout, which only these ranks have to make.

        Not ``dist.new_group``: that names a group by how many the process has, which may differ between its ranks.
        """
        if not self._is_gloo:
            raise NotImplementedError(
                f"The process group's backends are {dist.get_backend_config(self.group)}; gradwire's hooks need gloo "
                'for CPU tensors. Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
            )
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        self._await_peers(purpose, timeout)
        store = PrefixStore(f"{self.generation}/{purpose}", self._store)
        group = dist.ProcessGroupGloo(store, self.group.rank(), self.group.size(), timeout)
        return cast("dist.ProcessGroup", group)

    def _await_peers(self, purpose: str, timeout: timedelta) -> None:
        """Return when all ranks are about to make the same group: making it cannot be given up.

        Raises:
            RuntimeError: another rank has left, or did not come within ``timeout``.
        """
        keys = [f"{self.generation}/{purpose}/{rank} is here" for rank in range(self.group.size())]
        self._store.set(keys[self.group.rank()], "")
        if missing := missing_ranks(self.group, self._store, keys, timeout, self.check_peers):
            raise RuntimeError(
                f"Ranks {missing} have not begun to exchange gradients within {timeout}, as this rank has. Use "
                "the same model, wrapper and hook on every rank."
            )

    def wait(self, future: Future[T]) -> T:
        """The value of a future that needs the other ranks.

        Raises:
            RuntimeError: another rank has left.
        """
        return wait_for(future, self.check_peers)

    def check_peers(self) -> None:
        """Raise RuntimeError if another rank has left."""
        if (reason := self.failure_elsewhere()) is not None:
            raise RuntimeError(reason)

    def failure_elsewhere(self) -> str | None:
        """Why another rank has left since the last agreement, if one has."""
        with suppress(RuntimeError):  # the store may have gone with rank 0
            if self._store.check([self._notice]):
                return self._store.get(self._notice).decode()
        return None

    @property
    def _notice(self) -> str:
        return f"{self.generation}/failure"

    def fail(self, reason: str) -> None:
        """Leave: no exchange is possible from now on, here and, within moments, on the other ranks.

        What this rank has in flight is given up. A process group of one rank has nobody to agree with and begins anew
        at once.
        """
        if self.failure is not None:
            return
        if self.group.size() == 1:
            self.renew(self.generation + 1)
            return
        self.failure = reason
        self._post(reason)
        self._abandon()

    def _post(self, reason: str) -> None:
        with suppress(RuntimeError):  # the store may have gone with rank 0
            if not self._store.check([self._notice]):
                self._store.set(self._notice, reason)

    def renew(self, generation: int) -> None:
        """Begin anew with connections of another generation, on which all ranks have agreed."""
        self._abandon()
        self._store.add(self._counter, generation - self.generation)
        self.generation = generation
        self.failure = None

    def end(self) -> None:
        """The process group was destroyed."""
        self.failure = DESTROYED
        self._post(f"The process group was destroyed on rank {self.group.rank()}.")
        for executor in self._executors.values():
            executor.close(EXIT_LIMIT)
        for transport in self._transports.values():
            transport.close(EXIT_LIMIT)
        self._executors, self._transports = {}, {}

    def _abandon(self) -> None:
        for executor in self._executors.values():
            executor.abandon()
        for transport in self._transports.values():
            transport.close(timeout=0)
        self._executors, self._transports = {}, {}


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is enqueued, so that nothing needs a thread to wait in."""
    return device.type != "cpu"


_connections: dict[dist.ProcessGroup, Connections] = {}


def connections_of(group: dist.ProcessGroup | None) -> Connections:
    """The connections on a process group, made at the first call.

    They end when the group is destroyed: PyTorch then lets go of the group's store, which is the only sign it gives.

    Args:
        group: the process group; None for the default one.

    Raises:
        RuntimeError: the group was destroyed.
    """
    group = group if group is not None else _get_default_group()
    if group not in _world.pg_map:
        _end(group)
        raise RuntimeError(DESTROYED)
    if group not in _connections:
        _connections[group] = Connections(group)
        weakref.finalize(_world.pg_map[group][1], _end, group)
    return _connections[group]


def _end(group: dist.ProcessGroup) -> None:
    if (connections := _connections.pop(group, None)) is not None:
        connections.end()


def executor_for(group: dist.ProcessGroup | None, device: torch.device) -> Executor:
    """The executor of a process group on a device.

    Args:
        group: the process group; None for the default one.
        device: where the gradients are.

    Raises:
        RuntimeError: the group was destroyed, or an exchange on it has failed.
    """
    return connections_of(group).executor(device)
