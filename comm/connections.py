"""`Connections`: gradwire's own groups and executors on a process group, and whether an exchange on it has failed.

A rank on which a step fails *leaves*: it posts a notice with the reason in the store, issues no more collectives, and
closes gradwire's own connections. A waiting peer sees the closed connection at once, or the notice within half a
second, raises with that reason, and leaves too. Every exchange raises until all ranks agree to start again
(`Connections.renew`), so collectives of different steps never match. On NCCL gradwire has no connections of its own:
peers wait on their devices until the process group's timeout.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.executor import EXIT_TIMEOUT_SECONDS, TWO_THREADS, Executor
from gradwire.comm.forks import in_this_process
from gradwire.comm.groups import duplicate_group, is_gloo_on_cpu, keys_of_duplicate
from gradwire.comm.nodes import local_size, node_name
from gradwire.comm.store_collectives import (
    POLL_SECONDS,
    StoreRequests,
    collective_timeout,
    delete_keys,
    delete_on_last,
    get_all,
    gradwire_store,
    text_at,
)
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.comm.torch_internals import NO_BACKWARD, Store, current_backward, default_group, lifetime_token, world
from gradwire.comm.transport import GroupTransport
from gradwire.comm.worker_executor import WorkerExecutor

DESTROYED = (
    "The process group was destroyed. Initialize a new one, then wrap the model again or assign the new group to the "
    "hook state's process_group."
)
FORKED = (
    "Process {child} was forked from process {parent}, to which the process group belongs: the threads of its "
    "connections are not here. Exchange gradients in process {parent}, or start this process with the method spawn or "
    "forkserver, and give it a process group of its own."
)
UNKNOWN = (
    "torch.distributed does not know this process group, a {kind}, and gradwire needs its ranks and its store. Make a "
    "process group with init_process_group, new_group or a device mesh. A class of your own is made in the same way: "
    "register it with dist.Backend.register_backend, and name it in new_group(backend=...)."
)
BACKWARD = "backward"  # the purpose of collectives of a backward that no executor runs; see `Connections.transport`
ENDED = "ended/why"  # store key under which a rank tells that its connections have ended for good, and why
NOTICE = "failure"  # store key under which a rank announces that it leaves, and why
ADVICE = (
    "No more gradients are exchanged until all ranks are resynchronized. Do not apply the gradients of this step. "
    "Call resynchronize() of the DistributedDataParallel, of the Attachment or of gradwire.collectives on every rank, "
    "or restart from a checkpoint."
)


class Connections:
    """gradwire's own groups and executors on one process group; see `connections_of`.

    They are created at their first use, on CPUs by a collective call. All ranks create the same ones.

    Attributes:
        group: the process group.
        failure: why no exchange is possible; None while exchanges work.
        generation: number of times that the connections were created; equal on all ranks, part of their store keys.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self._rank = group, dist.get_rank()  # for messages: this rank's number in the default group
        self.failure: str | None = None
        self._process = os.getpid()
        self._store = gradwire_store(group)
        self._requests = StoreRequests(self._store)
        self._node_keys = [f"node/{rank}" for rank in range(group.size())]
        self._counters = [f"generation/{rank}" for rank in range(group.size())]
        # Keys that this rank has set in this generation, besides a notice, with their reducer's number; 0 for none.
        self._keys: dict[str, int] = {}
        self.generation = self._requests.require(self._begin, collective_timeout(group))
        self._executors: dict[torch.device, Executor] = {}
        self._abandoned: list[StreamExecutor] = []  # since the latest `renew`: their last work may still run
        self._transports: dict[tuple[str, str], GroupTransport] = {}  # by purpose and type of device
        # Reducers, and wrappers in a forward, that exchange at present, with their thread and backward.
        self._exchanging: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._n_reducers = 0
        self._reducers: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()  # by number
        self._watchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # likewise
        self._is_connecting = threading.Lock()

    def _begin(self, store: Store) -> int:
        """Publish the name of this rank's node; returns the generation."""
        store.set(self._node_keys[self.group.rank()], node_name())
        return int(store.add(self._counters[self.group.rank()], 1))

    @property
    def has_failed(self) -> bool:
        """Whether an exchange has failed, including in a task of PyTorch's DDP, which does not report it."""
        return self.failure is not None or any(executor.has_failed for executor in self._executors.values())

    def check(self) -> None:
        """Raise RuntimeError if no exchange is possible."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED.format(child=os.getpid(), parent=self._process))
        if self.failure is not None:
            raise RuntimeError(self.failure if self.failure == DESTROYED else f"{self.failure}\n{ADVICE}")

    def nodes(self) -> list[str]:
        """The name of each rank's node, as the ranks have found it. Waits until all ranks have connections."""
        return get_all(self.group, self._store, self._node_keys, "The search for nodes", self.check_peers)

    def executor(self, device: torch.device) -> Executor:
        """The executor that runs the hooks' algorithms on a device."""
        executor = self._executors.get(device)
        if executor is None:  # not created yet, or dropped by a failure
            self.check()
            is_on_streams = has_streams(device)
            transport = GroupTransport(self.group if is_on_streams else self._duplicate_group("first"))
            later = None if is_on_streams else self._duplicate_group("later")
            transport.local_size = local_size(self.nodes())
            if later is None:
                executor = StreamExecutor(transport, device)
            else:
                announce = partial(self._post_failed_task, self.generation)
                executor = WorkerExecutor(transport, later, device, self.check_peers, announce)
            self._executors[device] = executor
            if self.failure is not None:  # another thread has failed meanwhile
                self._executors.pop(device, None)
                executor.abandon()
                self.check()
        return executor

    def existing_executor(self, device: torch.device) -> Executor | None:
        """The executor on a device; None if there is none yet, or an exchange has failed."""
        return self._executors.get(device)

    def replace_executor(self, executor: Executor, device: torch.device) -> None:
        """Run the hooks' algorithms on a device in ``executor`` from now on, to measure a hook without a network."""
        if device in self._executors:
            self._executors[device].close(EXIT_TIMEOUT_SECONDS)
        self._executors[device] = executor

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors until all tasks so far are done, failed ones included; see `Executor.keep`."""
        kept = list(tensors)
        for executor in (*self._executors.values(), *self._abandoned):
            executor.keep(kept)

    def finish(self) -> None:
        """Enqueue the rest of all tasks; see `Executor.finish`."""
        for executor in self._executors.values():
            executor.finish()

    def start_step(self) -> None:
        """Mark the start of a step whose first bucket no executor gets; see `Workspace.start_step`."""
        for executor in self._executors.values():
            executor.start_step()

    def transport(self, purpose: str, device: torch.device, check: Callable[[], None] | None = None) -> GroupTransport:
        """The transport of collectives outside the executors, one per purpose and type of device.

        On gloo, each has a group of its own. While the ranks connect it, ``check`` may raise to end the wait; by
        default it is `check_peers`.
        """
        key = purpose, device.type
        if key not in self._transports:  # not created yet, or dropped by a failure
            self.check()
            is_own = device.type == "cpu" and is_gloo_on_cpu(self.group)
            group = self._duplicate_group(purpose, check) if is_own else self.group
            transport = self._transports[key] = GroupTransport(group, self.check_peers)
            if self.failure is not None:  # another thread has failed meanwhile
                self._transports.pop(key, None)
                transport.close()
                self.check()
        return self._transports[key]

    def _duplicate_group(self, purpose: str, check: Callable[[], None] | None = None) -> dist.ProcessGroup:
        if not self._is_connecting.acquire(blocking=False):
            self.fail(TWO_THREADS)
            raise RuntimeError(TWO_THREADS)
        try:
            key = f"{self.generation}/{purpose}"
            self._keys.update(dict.fromkeys(keys_of_duplicate(key, self.group.rank()), 0))
            return duplicate_group(self.group, self._store, key, check or self.check_peers)
        finally:
            self._is_connecting.release()

    def new_reducer(self, reducer: object) -> int:
        """A number for a reducer on the process group, equal on all ranks, which create their reducers in one order.

        Deletes what reducers that are gone have announced.
        """
        self._n_reducers += 1
        self._reducers[self._n_reducers] = reducer
        gone = [key for key, number in list(self._keys.items()) if number > 0 and number not in self._reducers]
        if gone:
            self._requests.tell(lambda store: delete_keys(store, gone))
        for key in gone:
            self._keys.pop(key, None)
        return self._n_reducers

    def new_watcher(self, watcher: object) -> int:
        """A number as for a reducer. While this rank waits for others, ``watcher.watch()`` is called; it may raise."""
        number = self.new_reducer(watcher)
        self._watchers[number] = watcher
        return number

    def begin_exchange(self, owner: object, thread: int) -> None:
        """Note that ``owner``, a reducer or a wrapper, exchanges in the current backward or in a forward, until
        `end_exchange`. ``thread`` called the forward.

        Two owners of one thread or of one backward may exchange at the same time.

        Raises:
            RuntimeError: another thread is exchanging: the order of the collectives would differ between ranks.
        """
        backward = current_backward()
        for other_thread, other_backward in self._exchanging.values():
            if other_thread != thread and (backward == NO_BACKWARD or other_backward != backward):
                raise RuntimeError(TWO_THREADS)
        self._exchanging[owner] = thread, backward

    def end_exchange(self, owner: object) -> None:
        """Note that ``owner`` has ended its exchange."""
        self._exchanging.pop(owner, None)

    def end_exchanges(self) -> None:
        """Forget all exchanges: models whose last step did not finish are abandoned."""
        self._exchanging.clear()

    def announce(self, reducer: int, topic: str, text: str) -> None:
        """Tell the other ranks, in the store, where the reducer with this number waits."""
        key = f"{self.generation}/{reducer}/{topic}"
        self._keys[key] = reducer
        self._requests.tell(lambda store: store.set(key, text))

    def announced(self, reducer: int, topic: str, wait: bool = False) -> str | None:
        """The text that a rank has announced; None if none has. With ``wait``, it has a moment to arrive."""
        return self._read(f"{self.generation}/{reducer}/{topic}", wait)

    def failure_elsewhere(self, wait: bool = False) -> str | None:
        """Why another rank has left; None if none has. With ``wait``, its notice has a moment to arrive."""
        return self._read(f"{self.generation}/{NOTICE}", wait)

    def _read(self, key: str, wait: bool) -> str | None:
        def look(store: Store) -> str | None:
            if wait:
                with suppress(RuntimeError):
                    store.wait([key], timedelta(seconds=2 * POLL_SECONDS))
            return text_at(store, key)

        return self._requests.ask(look)

    def check_peers(self) -> None:
        """Raise RuntimeError if another rank has left, or if a watcher finds that it waits for this one."""
        if (reason := self.failure_elsewhere()) is not None:
            raise RuntimeError(f"{reason}\n{ADVICE}")
        for watcher in list(self._watchers.values()):
            watcher.watch()

    def check_alive(self) -> None:
        """Raise RuntimeError if a rank has exited, or has destroyed the process group: a restart would wait for it."""
        if (reason := self._read(ENDED, wait=False)) is not None:
            raise RuntimeError(f"{reason}\nThe ranks cannot start again without it. Restart the job from a checkpoint.")

    def fail(self, reason: str) -> None:
        """Leave, abandoning everything in flight: every exchange raises from now on, soon also on the other ranks.

        A group of one rank starts again at once.
        """
        if self.failure is not None:
            return
        if self.group.size() == 1:
            self.renew(self.generation + 1)
        else:
            self.failure = reason
            self.post(reason)
            self._abandon()

    def post(self, reason: str, generation: int | None = None) -> None:
        """Tell the other ranks why this one leaves, unless another one has told it before."""
        key = f"{self.generation if generation is None else generation}/{NOTICE}"

        def post(store: Store) -> None:
            if not store.check([key]):
                store.set(key, reason)

        self._requests.tell(post)

    def _post_failed_task(self, generation: int, error: Exception) -> None:
        """Announce a failed task of PyTorch's DDP: gradwire's reducer, which knows the step, has announced its own.

        An abandoned executor may call it after `renew`.
        """
        self.post(f"A gradient exchange failed on rank {self._rank}: {error}", generation)

    def renew(self, generation: int) -> None:
        """Start again with connections of a new generation, on which all ranks have agreed.

        On a GPU, the current stream waits for the work of the old ones: it may still use error memory, and tables of
        addresses.
        """
        self._abandon()
        for executor in self._abandoned:
            executor.join()
        self._abandoned = []
        n_further, counter = generation - self.generation, self._counters[self.group.rank()]
        self._requests.require(lambda store: store.add(counter, n_further), collective_timeout(self.group))
        old, self._keys = [*self._keys, f"{self.generation}/{NOTICE}"], {}  # which no rank reads any more
        self._requests.tell(lambda store: delete_keys(store, old))
        self.generation = generation
        self.failure = None

    def end(self) -> None:
        """End the connections: the process group was destroyed, or the interpreter exits."""
        self.failure = DESTROYED
        if not self._requests.is_stuck:
            reason = _why_it_ends(self._rank)
            self._requests.tell(lambda store: store.set(ENDED, reason))
            self.post(reason)
        for transport in self._transports.values():
            transport.close()
        for executor in self._executors.values():
            executor.close(EXIT_TIMEOUT_SECONDS)
        if self._transports and not threading.main_thread().is_alive():
            # Time for gloo's threads to run the callbacks of failed collectives: later they would abort the process.
            time.sleep(0.05)
        self._executors, self._transports = {}, {}

    def forget(self) -> None:
        """Delete the keys: the process group was destroyed. Its last rank deletes those that others may still read."""
        own, n_ranks = [*self._keys], self.group.size()
        shared = [*self._counters, *self._node_keys, f"{self.generation}/{NOTICE}", ENDED]

        def delete(store: Store) -> None:
            delete_keys(store, own)
            delete_on_last(store, "ended", n_ranks, shared)

        if not self._requests.is_stuck:
            self._requests.tell(delete)

    def _abandon(self) -> None:
        executors, transports = self._executors, self._transports
        self._executors, self._transports = {}, {}
        self._exchanging.clear()
        for executor in executors.values():
            executor.abandon()
        self._abandoned += [each for each in executors.values() if isinstance(each, StreamExecutor)]
        for transport in transports.values():
            transport.close()


def _why_it_ends(rank: int) -> str:
    if threading.main_thread().is_alive():
        return f"The process group was destroyed on rank {rank}."
    error = getattr(sys, "last_value", None)  # set by an uncaught exception
    return f"Rank {rank} has exited" + ("." if error is None else f" after {type(error).__name__}: {error}")


def may_follow_from_peer(error: BaseException) -> bool:
    """Whether an error may come from a collective that failed because another rank has."""
    return type(error) in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is enqueued on streams; raises NotImplementedError if gradwire does not run there."""
    if device.type not in ("cuda", "cpu"):
        raise NotImplementedError(
            f"The gradients are on {device}; gradwire runs on CUDA and ROCm GPUs, which PyTorch calls cuda, and on "
            "CPUs. Use PyTorch's DistributedDataParallel with its own hooks there."
        )
    return device.type == "cuda"


_connections: dict[dist.ProcessGroup, Connections] = {}
_ended: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # whose connections have ended
_creation = threading.Lock()  # two threads that begin at once must get the same connections


def connections_of(group: dist.ProcessGroup | None) -> Connections:
    """The connections on a process group, created at the first call. They end when the group is destroyed.

    Args:
        group: the process group; None for the default one.

    Raises:
        RuntimeError: the group was destroyed, or PyTorch has never known it.
    """
    group = group if group is not None else default_group()
    if group not in world.pg_map:  # `is_initialized_group`, which every bucket would call
        _end(group)
        was_known = type(group) is dist.ProcessGroup or group in _ended
        raise RuntimeError(DESTROYED if was_known else UNKNOWN.format(kind=type(group).__qualname__))
    connections = _connections.get(group)
    if connections is None:
        with _creation:
            connections = _connections.get(group)
            if connections is None:
                connections = _connections[group] = Connections(group)
                # A child that it forks has the same sockets and exits, too, but has not left.
                weakref.finalize(lifetime_token(group), in_this_process(_end), group)
    return connections


def existing_connections(group: dist.ProcessGroup) -> Connections | None:
    """The connections on a process group; None if there are none yet."""
    return _connections.get(group)


def _end(group: dist.ProcessGroup) -> None:
    if (connections := _connections.pop(group, None)) is not None:
        _ended.add(group)
        connections.end()
        if threading.main_thread().is_alive():
            connections.forget()


def executor_for(group: dist.ProcessGroup | None, device: torch.device) -> Executor:
    """The executor of a process group, None for the default one; raises RuntimeError if an exchange has failed."""
    return connections_of(group).executor(device)
