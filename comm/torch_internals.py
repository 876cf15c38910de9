"""PyTorch's private names that `gradwire.comm` uses: a new release can break only this file."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_group,
    _get_process_group_store,
    _world,
)

__all__ = [
    "PrefixStore",
    "Store",
    "default_group",
    "device_timeouts",
    "is_initialized_group",
    "lifetime_token",
    "store_of_group",
]


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        ValueError: ``init_process_group`` was not called.
    """
    return _get_default_group()


def is_initialized_group(group: dist.ProcessGroup) -> bool:
    """Whether PyTorch knows ``group``: it was initialised here and not destroyed."""
    return group in _world.pg_map


def lifetime_token(group: dist.ProcessGroup) -> object:
    """The group's store, which PyTorch drops when the group is destroyed.

    PyTorch gives no other sign that a group was destroyed.
    """
    return _world.pg_map[group][1]


def store_of_group(group: dist.ProcessGroup) -> Store:
    """The key-value store through which the group's ranks found each other."""
    return _get_process_group_store(group)


def device_timeouts(group: dist.ProcessGroup, default: timedelta) -> list[timedelta]:
    """The collective timeout of each of the group's backends; ``default`` for one that does not tell."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [getattr(getattr(backend, "options", None), "_timeout", default) for backend in backends]
