"""`Connections`: gradwire's own groups and executors on a process group, and whether an exchange on it has failed.

A rank on which a step fails *leaves*. It posts a notice with the reason in the store, issues no more collectives, and
closes gradwire's own connections. A peer that waits for this rank sees the closed connection at once, or the notice
within half a second. It raises with that reason and leaves too. From then on every gradient exchange raises, until all
ranks have agreed to start again: `Connections.renew`.

So a collective of one step is never matched with a collective of a later step on another rank. On
NCCL gradwire has no connections of its own to close: peers wait on their devices until the process
group's own timeout.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm.executor import Executor
from gradwire.comm.groups import duplicate_group, is_gloo_on_cpu
from gradwire.comm.store_collectives import gradwire_store
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.comm.torch_internals import default_group, is_initialized_group, lifetime_token
from gradwire.comm.transport import GroupTransport, wait_for
from gradwire.comm.worker_executor import EXIT_TIMEOUT_SECONDS, WorkerExecutor

T = TypeVar("T")
DESTROYED = (
    "The process group was destroyed. Initialize a new one, then wrap the model again or assign the new group to the "
    "hook state's process_group."
)
ADVICE = (
    "No more gradients are exchanged until all ranks are resynchronized. Do not apply the gradients of this step. "
    "Call resynchronize() of the DistributedDataParallel on every rank, or restart from a checkpoint."
)


class Connections:
    """gradwire's own groups and executors on one process group; see `connections_of`.

    Groups and executors are created at their first use. On CPUs creating one is a collective call,
    and all ranks create the same ones.

    Attributes:
        group: the process group.
        failure: why no exchange is possible; None while exchanges work.
        generation: how many times the connections were created, this time included; equal on all
            ranks, and part of their store keys.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.failure: str | None = None
        self._store = gradwire_store(group)
        self.generation = self._store.add(self._counter, 1)
        self._executors: dict[torch.device, Executor] = {}
        self._transports: dict[str, GroupTransport] = {}

    @property
    def _counter(self) -> str:
        return f"generation/{self.group.rank()}"

    @property
    def has_failed(self) -> bool:
        """Whether an exchange has failed, including in a task of PyTorch's DDP, which does not report it."""
        return self.failure is not None or any(executor.has_failed for executor in self._executors.values())

    def check(self) -> None:
        """Raise RuntimeError if no exchange is possible."""
        if self.failure is not None:
            raise RuntimeError(self.failure if self.failure == DESTROYED else f"{self.failure}\n{ADVICE}")

    def executor(self, device: torch.device) -> Executor:
        """The executor that runs the hooks' algorithms on a device."""
        self.check()
        if device not in self._executors:
            if has_streams(device):
                self._executors[device] = StreamExecutor(GroupTransport(self.group), device)
            else:
                transport = GroupTransport(self._duplicate_group("first"))
                self._executors[device] = WorkerExecutor(transport, self._duplicate_group("later"), device)
        return self._executors[device]

    def replace_executor(self, executor: Executor, device: torch.device) -> None:
        """Run the hooks' algorithms on a device in ``executor`` from now on, to measure a hook without a network."""
        self._executors[device] = executor

    def transport(self, purpose: str, device: torch.device) -> GroupTransport:
        """The transport of collectives outside the executors, one per purpose: "backward" for those of its buckets.

        On gloo each transport has a group of its own.
        """
        self.check()
        if purpose not in self._transports:
            is_own = device.type == "cpu" and is_gloo_on_cpu(self.group)
            group = self._duplicate_group(purpose) if is_own else self.group
            self._transports[purpose] = GroupTransport(group, self.check_peers)
        return self._transports[purpose]

    def start_step(self) -> None:
        """Mark the start of a step whose first bucket no executor gets; see `Workspace.start_step`."""
        for executor in self._executors.values():
            for workspace in executor.workspaces:
                workspace.start_step()

    def _duplicate_group(self, purpose: str) -> dist.ProcessGroup:
        return duplicate_group(self.group, self._store, f"{self.generation}/{purpose}", self.check_peers)

    def wait(self, future: Future[T]) -> T:
        """Wait for a future that depends on other ranks, and return its value.

        Raises:
            RuntimeError: another rank has left.
        """
        return wait_for(future, self.check_peers)

    def check_peers(self) -> None:
        """Raise RuntimeError if another rank has left."""
        if (reason := self.failure_elsewhere()) is not None:
            raise RuntimeError(reason)

    def failure_elsewhere(self) -> str | None:
        """Why another rank has left since the ranks last agreed; None if none has."""
        with suppress(RuntimeError):  # rank 0, which hosts the store, may have exited
            if self._store.check([self._notice]):
                return self._store.get(self._notice).decode()
        return None

    @property
    def _notice(self) -> str:
        return f"{self.generation}/failure"

    def fail(self, reason: str) -> None:
        """Leave: from now on every exchange raises, here and, within moments, on the other ranks.

        Abandons everything in flight. A group of one rank has nobody to agree with and starts again at once.
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
        with suppress(RuntimeError):  # rank 0, which hosts the store, may have exited
            if not self._store.check([self._notice]):
                self._store.set(self._notice, reason)

    def renew(self, generation: int) -> None:
        """Start again with connections of a new generation, on which all ranks have agreed."""
        self._abandon()
        self._store.add(self._counter, generation - self.generation)
        self.generation = generation
        self.failure = None

    def end(self) -> None:
        """End the connections: the process group was destroyed."""
        self.failure = DESTROYED
        self._post(f"The process group was destroyed on rank {self.group.rank()}.")
        for executor in self._executors.values():
            executor.close(EXIT_TIMEOUT_SECONDS)
        for transport in self._transports.values():
            transport.close(EXIT_TIMEOUT_SECONDS)
        self._executors, self._transports = {}, {}

    def _abandon(self) -> None:
        for executor in self._executors.values():
            executor.abandon()
        for transport in self._transports.values():
            transport.close(timeout=0)
        self._executors, self._transports = {}, {}


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is enqueued on streams, so that no thread has to wait for it."""
    return device.type != "cpu"


_connections: dict[dist.ProcessGroup, Connections] = {}


def connections_of(group: dist.ProcessGroup | None) -> Connections:
    """The connections on a process group, created at the first call. They end when the group is destroyed.

    Args:
        group: the process group; None for the default one.

    Raises:
        RuntimeError: the group was destroyed.
    """
    group = group if group is not None else default_group()
    if not is_initialized_group(group):
        _end(group)
        raise RuntimeError(DESTROYED)
    if group not in _connections:
        _connections[group] = Connections(group)
        weakref.finalize(lifetime_token(group), _end, group)
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
