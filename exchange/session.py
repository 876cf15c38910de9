"""`Session`: an exchange on some process groups, which a rank leaves after an error and all ranks begin again.

1. A rank that fails *leaves* all its groups at once (`Session.leave`): its peers find the notice, raise and leave, too.
2. An error that follows from another rank's names that rank's (`Session.attempt`).
3. To *resynchronize*, all ranks leave, exchange facts through the store, check them, and replace the connections
   (`Session.resynchronize`). All checks come before any change: collectives may be stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from gradwire.comm.connections import ADVICE, connections_of, existing_connections, may_follow_from_peer
from gradwire.comm.rank_differences import check_collectives
from gradwire.comm.store_collectives import gather_json
from gradwire.comm.torch_internals import collective_counts, unique_name

Facts = Mapping[str, Any]  # of one rank, as JSON
Check = Callable[[Sequence[Facts]], None]  # raises if the facts of all ranks do not allow to go on


class Session:
    """An exchange on process groups.

    Args:
        groups: the process groups, in the same order on all ranks. Facts of all ranks reach each through them.

    Attributes:
        groups: the process groups. It may grow.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        self.groups = list(dict.fromkeys(groups))

    def check(self) -> None:
        """Raise RuntimeError if this rank has left, or a group was destroyed."""
        for group in self.groups:
            connections_of(group).check()

    def leave(self, cause: str) -> None:
        """Leave the exchange in all process groups; see `Connections.fail`."""
        for group in self.groups:
            with suppress(RuntimeError):  # the group was destroyed
                connections_of(group).fail(cause)

    @contextmanager
    def attempt(self, what: str, group: dist.ProcessGroup) -> Iterator[None]:
        """Leave if the body, an exchange on ``group`` that ``what`` names, raises.

        Raises:
            RuntimeError: the body's error, with its name and with the error of the rank that has left first, if it may
                follow from that.
            BaseException: any other error of the body.
        """
        try:
            yield
        except BaseException as error:
            may_follow = may_follow_from_peer(error)
            elsewhere = connections_of(group).failure_elsewhere(wait=may_follow)
            own = f"{what} failed on rank {dist.get_rank()}: {error}"
            self.leave(elsewhere or own)
            if not may_follow or (elsewhere is not None and elsewhere in str(error)):
                raise
            raise RuntimeError(own if elsewhere is None else f"{elsewhere}\n{ADVICE}\n{own}") from error

    def resynchronize(
        self,
        call: str,
        facts: Facts,
        check: Check = lambda _: None,
        *,
        used: Sequence[dist.ProcessGroup] = (),
        known: Sequence[dist.ProcessGroup] = (),
    ) -> list[Facts]:
        """Replace the connections on all process groups; returns the facts of all ranks. A collective call.

        Args:
            call: its name, in errors.
            facts: facts of this rank. The number of collectives and the generation of each group are added.
            check: is called with all ranks' facts.
            used: further process groups that a hook has used on this rank.
            known: process groups that a hook may have used on other ranks.

        Raises:
            RuntimeError: ranks have issued different numbers of collectives on a group that any rank uses, a rank has
                exited, or does not make the call in time; and what ``check`` raises. Nothing has changed.
        """
        self.leave(f"{call} was called")
        groups = {unique_name(group): group for group in (*self.groups, *used, *known)}
        in_use = {*self.groups, *used}
        facts_of_groups = {name: _facts_of(group, group in in_use) for name, group in groups.items()}
        by_rank, groups_by_rank = self._gather(call, facts, facts_of_groups)
        by_group = _by_used_group(groups_by_rank)
        own = {unique_name(group): unique_name(group) if len(self.groups) > 1 else "itself" for group in self.groups}
        for name, each in by_group.items():
            which = own.get(name, f"{name}, which the communication hook uses")
            check_collectives([one["collectives"] for one in each], which)
        check(by_rank)
        for name, each in by_group.items():
            if name in groups and (generation := max(one["generation"] for one in each)) > 0:
                connections_of(groups[name]).renew(1 + generation)
        return by_rank

    def _gather(self, call: str, *facts: Facts) -> list[list[Facts]]:
        """For each of the ``facts``, those of all ranks, in the order of the ranks in the default group."""
        gathered: dict[str, Any] = {str(dist.get_rank()): facts}
        for group in self.groups:  # then, in a mesh of two dimensions, those of all ranks
            parts = gather_json(group, call, gathered, connections_of(group).check_alive)
            gathered = {rank: each for part in parts for rank, each in part.items()}
        return [list(each) for each in zip(*(gathered[rank] for rank in sorted(gathered, key=int)), strict=True)]


def _facts_of(group: dist.ProcessGroup, is_used: bool) -> Facts:
    connections = existing_connections(group)
    generation = 0 if connections is None else connections.generation
    return {"is used": is_used, "generation": generation, "collectives": collective_counts(group)}


def _by_used_group(groups_by_rank: Sequence[Facts]) -> dict[str, list[Facts]]:
    """For each group that any rank uses, the facts of the ranks that know it."""
    used = {name for groups in groups_by_rank for name, each in groups.items() if each["is used"]}
    return {name: [groups[name] for groups in groups_by_rank if name in groups] for name in sorted(used)}
