"""PyTorch's private names that `gradwire.comm` uses: a new release can break only this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d as c10d

TESTED_TORCH = ("2.11", "2.15")  # the oldest and the newest release of docs/compatibility.md


@contextmanager
def private_names() -> Iterator[None]:
    """Name the release of PyTorch and the remedy if a private name is missing in the body.

    Raises:
        ImportError: a name is missing.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        oldest, newest = TESTED_TORCH
        raise ImportError(
            f"gradwire uses private names of PyTorch, and torch {torch.__version__} lacks one: {error}. gradwire is "
            f"tested with torch {oldest} to {newest}: install one of these, or a newer gradwire."
        ) from error


NO_BACKWARD = -1

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
        bindings.AllToAllOptions,
        c10d._get_default_group,
        c10d._get_process_group_store,
        dist.ProcessGroup._allgather_base,
        dist.ProcessGroup._device_types,
        dist.ProcessGroup._get_backend,
        dist.ProcessGroup.alltoall_base,
        world.pg_map,
    )


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


def device_timeouts(group: dist.ProcessGroup, default: timedelta) -> list[timedelta]:
    """The collective timeout of each of the group's backends; ``default`` for one that does not tell."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [getattr(getattr(backend, "options", None), "_timeout", default) for backend in backends]


# The names below exist in every release from 2.11 on. torch.distributed's own functions do not serve: they take no
# unregistered groups, and PyTorch 2.13 warns of `all_gather_into_tensor`.


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
    """Launch the exchange of the first dimension's parts: part i of ``sent`` goes to rank i and is received from it.

    Both tensors are contiguous. If not ``is_async``, NCCL uses the current stream, and the result may be None.
    """
    options: Any = bindings.AllToAllOptions()
    options.asyncOp = is_async
    return group.alltoall_base(received, sent, [], [], options)


def all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> dist.Work | None:
    """Launch the concatenation of the ranks' 1-D contiguous tensors, of one size, in rank order; see `all_to_all`."""
    options: Any = bindings.AllgatherOptions()
    options.asyncOp = is_async
    return group._allgather_base(gathered, own, options)
