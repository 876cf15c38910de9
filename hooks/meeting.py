"""Meetings: ranks exchange small messages through the process group's store, outside of every collective.

A meeting works while collectives are stuck, and a rank that waits for the others knows who has not come.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

TIMEOUT = timedelta(minutes=2)


def store_of(group: dist.ProcessGroup) -> Store:
    """The part of the group's store that belongs to gradwire."""
    return PrefixStore("gradwire", _get_process_group_store(group))


def gather(group: dist.ProcessGroup, purpose: str, value: str, timeout: timedelta = TIMEOUT) -> list[str]:
    """Return the value of every rank, in rank order. A collective call.

    The n-th call on one rank meets the n-th call for the same purpose on every other rank. A meeting that some rank
    gave up on is skipped by those that come later.

    Args:
        group: the ranks that meet.
        purpose: names the meeting, in its keys and in the error message.
        value: of this rank, some kilobytes at most.
        timeout: how long to wait for the other ranks.

    Raises:
        RuntimeError: some ranks did not call within ``timeout``; names them.
    """
    store = PrefixStore("meet", store_of(group))
    meeting = ""
    while not meeting or store.check([f"{meeting}/failed"]):
        meeting = f"{purpose}/{store.add(f'{purpose}/{group.rank()}', 1)}"
    keys = [f"{meeting}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], value)
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        store.set(f"{meeting}/failed", "")
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"{purpose} is a collective call: ranks {missing} have not made it within {timeout}. Call it on every rank."
        ) from error
    return [store.get(key).decode() for key in keys]


def meet(group: dist.ProcessGroup, purpose: str, timeout: timedelta = TIMEOUT) -> None:
    """Return when every rank has called it for the same purpose as often as this one; see `gather`."""
    gather(group, purpose, "here", timeout)
