"""Meetings: ranks exchange small messages through the process group's store, outside of every collective.

A meeting works while collectives are stuck, and a rank that waits for the others knows who has not come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from gradwire.compress.transport import POLL

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
        who = f"ranks {ranks} have not made it" if ranks else "some ranks have not made it"
        super().__init__(f"{purpose} is a collective call: {who} within {timeout}. Call it on every rank.")
        self.ranks = ranks


def describe(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def store_of(group: dist.ProcessGroup) -> Store:
    """The part of the group's store that belongs to gradwire."""
    return PrefixStore("gradwire", _get_process_group_store(group))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective on ``group`` waits."""
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", TIMEOUT) for backend in backends]
    return min(timeouts, default=TIMEOUT)


def gather(
    group: dist.ProcessGroup,
    purpose: str,
    value: str,
    timeout: timedelta = TIMEOUT,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the value of every rank, in rank order. A collective call.

    The n-th call on one rank meets the n-th call for the same purpose on every other rank. The first rank that has
    seen all others, or has given up, decides for all of them whether the ranks have met. A rank that comes later than
    that goes on to the next meeting.

    Args:
        group: the ranks that meet.
        purpose: names the meeting, in its keys and in the error message.
        value: of this rank, some kilobytes at most.
        timeout: how long to wait for the other ranks.
        check: called now and then while waiting; raises where there is no use in it.

    Raises:
        RanksMissing: some ranks did not call within ``timeout``; names them.
    """
    store = PrefixStore("meet", store_of(group))
    meeting = ""
    while not meeting or _has_failed(store, meeting):
        meeting = f"{purpose}/{store.add(f'{purpose}/{group.rank()}', 1)}"
    keys = [f"{meeting}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], value)
    try:
        missing = missing_ranks(group, store, keys, min(timeout, PATIENCE), check)
        if missing and timeout > PATIENCE:
            logger.warning("%s: still waiting for %s after %s.", purpose, describe(missing), PATIENCE)
            missing = missing_ranks(group, store, keys, timeout - PATIENCE, check)
    except BaseException:
        _decide(store, meeting, "failed")
        raise
    if _decide(store, meeting, "failed" if missing else "met") == "failed":
        raise RanksMissing(purpose, missing, timeout)
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]  # type: ignore[attr-defined]
    return [each.decode() for each in values]


def _decide(store: Store, meeting: str, outcome: str) -> str:
    """Whether the ranks "met", or the meeting "failed": what the first rank to ask has found."""
    if store.add(f"{meeting}/deciders", 1) == 1:
        store.set(f"{meeting}/outcome", outcome)
    return store.get(f"{meeting}/outcome").decode()


def _has_failed(store: Store, meeting: str) -> bool:
    return store.check([f"{meeting}/outcome"]) and store.get(f"{meeting}/outcome") == b"failed"


def missing_ranks(
    group: dist.ProcessGroup, store: Store, keys: list[str], timeout: timedelta, check: Callable[[], None]
) -> list[int]:
    """The ranks that have not come after ``timeout``; none as soon as all have."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        try:
            store.wait(keys, timedelta(seconds=max(min(left, POLL), 0.001)))  # 0 ms would be for ever
        except RuntimeError:
            check()
        else:
            return []
    ranks = zip(dist.get_process_group_ranks(group), keys, strict=True)
    return [rank for rank, key in ranks if not store.check([key])]


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
