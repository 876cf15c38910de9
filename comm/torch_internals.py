"""PyTorch's private names that `gradwire.comm` and `gradwire.hooks` use: a new release can break only this file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d as c10d

TESTED_TORCH = ("2.11", "2.15")  # the oldest and the newest release of docs/compatibility.md


@contextmanager
def private_names(
    problem: str = "gradwire uses private names of PyTorch, and torch {} lacks one: {}.",
    error_type: type[Exception] = ImportError,
) -> Iterator[None]:
    """Raise an error with the release of PyTorch and the remedy if the body lacks a private name."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        oldest, newest = TESTED_TORCH
        raise error_type(
            f"{problem.format(torch.__version__, error)} gradwire is tested with torch {oldest} to {newest}: install "
            "one of these, or a newer gradwire."
        ) from error


NO_BACKWARD = -1
GLOO_THREADS = 2  # PyTorch's default: gloo works on as many collectives of a group at a time
# The base class of gradwire's own groups. Builds of PyTorch without gloo lack it, and have no group to duplicate.
GlooGroup: Any = getattr(dist, "ProcessGroupGloo", dist.ProcessGroup)

with private_names():
    PrefixStore = bindings.PrefixStore
    Store = bindings.Store
    profiler_range: Any = torch._C._profiler._RecordFunctionFast
    world: Any = c10d._world  # `pg_map` has every process group that was initialized here and not destroyed
    _engine: Any = torch.autograd.Variable._execution_engine
    # The number of the backward that runs in this thread; `NO_BACKWARD` outside. A reentrant backward has its own.
    current_backward: Callable[[], int] = torch._C._current_graph_task_id
    # Calls a function at the end of the running backward, after the functions queued before.
    queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
    _ATTRIBUTES = (
        bindings.AllgatherOptions,
        bindings.AllreduceOptions,
        bindings.AllToAllOptions,
        bindings.Backend._get_sequence_number_for_group,  # type: ignore[attr-defined]
        PrefixStore._underlying_non_prefix_store,  # type: ignore[attr-defined]
        c10d._get_default_group,
        c10d._get_process_group_store,
        dist.ProcessGroup._allgather_base,
        dist.ProcessGroup._device_types,
        dist.ProcessGroup._get_backend,
        dist.ProcessGroup._register_backend,
        dist.ProcessGroup.alltoall_base,
        torch._foreach_norm,
        torch.cuda._exchange_device,
        torch.cuda._maybe_exchange_device,
        torch.nn.Module().__dict__["_modules"],
        Tensor._indices,
        Tensor._values,
        world.pg_group_ranks,
        world.pg_map,
    )
    if GlooGroup is not dist.ProcessGroup:
        _GLOO_ATTRIBUTES = (
            GlooGroup.create_default_device,
            GlooGroup.create_device,
            GlooGroup._Options._devices,
            GlooGroup._Options._threads,
            GlooGroup._Options._timeout,
        )


class EndCallback:
    """A callback at the end of a backward. Autograd alone keeps it, until the backward has ended or raised."""

    def __init__(self) -> None:
        self._callback: Callable[[], object] = lambda: None

    @property
    def is_queued(self) -> bool:
        """Whether the backward that it was queued in still runs."""
        return self._callback() is not None

    def queue(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, a method, once at the end of the running backward."""
        if not self.is_queued:
            self._callback = weakref.ref(callback)
            queue_callback(callback)


def share_backends(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Give ``other``, which was written in Python, the backends of ``group``."""
    kinds = dist.ProcessGroup.BackendType
    for device in group._device_types:
        backend = group._get_backend(device)
        other._register_backend(device, getattr(kinds, backend.name().upper(), kinds.CUSTOM), backend)


def stand_for(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Let ``dist`` say of ``other``, a registered group of the same ranks, what it says of ``group``."""
    world.pg_map[other] = world.pg_map[group][0], world.pg_map[other][1]
    world.pg_group_ranks[other] = dict(world.pg_group_ranks[group])


def default_group() -> dist.ProcessGroup:
    """The default process group; raises ValueError before ``init_process_group``."""
    return c10d._get_default_group()


def is_initialized_group(group: dist.ProcessGroup) -> bool:
    """Whether PyTorch knows ``group``: it was initialized here and not destroyed."""
    return group in world.pg_map


def lifetime_token(group: dist.ProcessGroup) -> object:
    """The group's store. PyTorch drops it when the group is destroyed, and gives no other sign of that."""
    return world.pg_map[group][1]


def store_of_group(group: dist.ProcessGroup) -> Store:
    """The key-value store through which the group's ranks found each other."""
    return c10d._get_process_group_store(group)


def can_delete_keys(store: Store) -> bool:
    """Whether keys can be deleted from the store, or the one under its prefixes: PyTorch's can, others may raise."""
    return isinstance(_innermost(store), (bindings.TCPStore, bindings.FileStore, bindings.HashStore))


def port_of(store: Store) -> int | None:
    """The port on which rank 0 serves the store, or the one under its prefixes; None if it is no `TCPStore`."""
    innermost = _innermost(store)
    return innermost.port if isinstance(innermost, bindings.TCPStore) else None


def _innermost(store: Store) -> Store:
    return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store  # type: ignore[attr-defined]


def gloo_keys(rank: int) -> list[str]:
    """The keys under which a gloo group made with `gloo_options` tells a rank's addresses: one for each device."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [f"{number}/{rank}" for number in range(len(interfaces))]


def device_timeouts(group: dist.ProcessGroup, default: timedelta) -> dict[str, timedelta]:
    """The collective timeout of the backend of each device type; ``default`` for one that does not tell."""
    backends = {device.type: group._get_backend(device) for device in group._device_types}
    return {kind: getattr(getattr(each, "options", None), "_timeout", default) for kind, each in backends.items()}


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups that were initialized in this process and not destroyed, in order."""
    return list(world.pg_map)


def collective_counts(group: dist.ProcessGroup) -> list[int]:
    """Collectives that this rank has issued on each of the group's backends; 0 if a backend does not count them."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return list(map(_collective_count, backends))


def _collective_count(backend: Any) -> int:
    try:
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:  # "Backend ... does not yet support sequence numbers."
        return 0


def unique_name(group: dist.ProcessGroup) -> str:
    """A name of the process group that is equal on its ranks, and that no other group has."""
    return f"{group.group_name}, ranks {dist.get_process_group_ranks(group)}"


def gloo_options(timeout: timedelta) -> Any:
    """Options of a gloo group on the network devices that PyTorch would choose, with `GLOO_THREADS` for each."""
    options = GlooGroup._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        options._devices = [GlooGroup.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [GlooGroup.create_default_device()]
    options._threads = GLOO_THREADS * len(options._devices)
    options._timeout = timeout
    return options


# The names below exist in every release from 2.11 on. torch.distributed's own functions do not serve: they take no
# unregistered groups, and PyTorch 2.13 warns of `all_gather_into_tensor`.


@cache
def _options(kind: str, is_async: bool, **fields: Any) -> Any:
    options: Any = getattr(bindings, kind)()
    for name, value in {"asyncOp": is_async, **fields}.items():
        setattr(options, name, value)
    return options


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
    """Launch an in-place reduction of a real tensor over the ranks; see `all_to_all`."""
    return group.allreduce([tensor], _options("AllreduceOptions", is_async, reduceOp=op))


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    *,
    is_async: bool,
    splits: Sequence[int] = (),
    received_splits: Sequence[int] | None = None,
) -> dist.Work | None:
    """Launch the exchange of the first dimension's parts: part i of ``sent`` goes to rank i and is received from it.

    Both tensors are contiguous. ``splits`` are the sizes of the parts, by rank; by default, they are equal.
    ``received_splits`` are those of ``received``, by default the same. On gloo, they may be larger than what arrives,
    except for this rank's own part. If not ``is_async``, NCCL uses the current stream, and the result may be None.
    """
    received_splits = splits if received_splits is None else received_splits
    options = _options("AllToAllOptions", is_async)
    return group.alltoall_base(received, sent, list(received_splits), list(splits), options)


def all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
    """Launch the concatenation of the ranks' 1-D contiguous tensors, of one size, in rank order; see `all_to_all`."""
    return group._allgather_base(gathered, own, _options("AllgatherOptions", is_async))
