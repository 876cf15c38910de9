"""Meetings: ranks exchange small messages through the process group's store, outside of every collective.

A meeting works while collectives are stuck, and a rank that waits for the others knows who has not come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

TIMEOUT = timedelta(minutes=2)
# How long a rank waits before it says in the log whom it is waiting for.
PATIENCE = timedelta(seconds=20)
# Differences between ranks that an error shows.
SHOWN = 12

logger = logging.getLogger(__name__)


class RanksMissing(RuntimeError):
    """Some ranks have not come to a meeting.

    Attributes:
        ranks: their numbers in the default group.
    """

    def __init__(self, purpose: str, ranks: list[int], timeout: timedelta) -> None:
        super().__init__(
            f"{purpose} is a collective call: ranks {ranks} have not made it within {timeout}. Call it on every rank."
        )
        self.ranks = ranks


def describe(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
        RanksMissing: some ranks did not call within ``timeout``; names them.
    """
    store = PrefixStore("meet", store_of(group))
    meeting = ""
    while not meeting or store.check([f"{meeting}/failed"]):
        meeting = f"{purpose}/{store.add(f'{purpose}/{group.rank()}', 1)}"
    keys = [f"{meeting}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], value)
    missing = _missing(group, store, keys, min(timeout, PATIENCE))
    if missing and timeout > PATIENCE:
        logger.warning("%s: still waiting for %s after %s.", purpose, describe(missing), PATIENCE)
        missing = _missing(group, store, keys, timeout - PATIENCE)
    if missing:
        store.set(f"{meeting}/failed", "")
        raise RanksMissing(purpose, missing, timeout)
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]  # type: ignore[attr-defined]
    return [each.decode() for each in values]


def _missing(group: dist.ProcessGroup, store: Store, keys: list[str], timeout: timedelta) -> list[int]:
    """The ranks that have not come after ``timeout``; none as soon as all have."""
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        ranks = zip(dist.get_process_group_ranks(group), keys, strict=True)
        return [rank for rank, key in ranks if not store.check([key])]
    return []


def meet(group: dist.ProcessGroup, purpose: str, timeout: timedelta = TIMEOUT) -> None:
    """Return when every rank has called it for the same purpose as often as this one; see `gather`."""
    gather(group, purpose, "here", timeout)


def differences(everybodys: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """A line for each fact that is not the same on all ranks: every value, and the ranks that have it.

    Args:
        everybodys: the facts of each rank, by name.
        ranks: the numbers of these ranks.
    """
    lines = []
    for name in dict.fromkeys(name for facts in everybodys for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in zip(ranks, everybodys, strict=True):
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {describe(of)}" for value, of in holders.items()))
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} differences more"]
    return "".join(f"\n  {line}" for line in lines)
