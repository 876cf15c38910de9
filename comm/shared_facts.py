"""`SharedFacts`: facts that must be equal on all ranks, which compare them when they change on any rank."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.comm.connections import Connections
from gradwire.comm.rank_differences import format_ranks
from gradwire.comm.store_collectives import RanksMissing, collective_timeout, differences_between_ranks

UNKNOWN = object()  # in place of the facts on which ranks have agreed: they have compared none


class SharedFacts:
    """Facts that must be equal on all ranks in every step, such as the layouts of the buffers before their broadcast.

    1. Every rank calls `check` before each exchange that depends on the facts. While this rank's facts are those on
       which all ranks have agreed, it sends nothing.
    2. A rank whose facts have changed *asks*: it announces its place in the training loop in the store, and waits
       there for the facts of all ranks.
    3. Ranks with the same change ask, too. A rank without it goes on, and soon waits in a collective for the rank that
       asks. A rank that waits looks for questions (`Connections.check_peers`). Once it has passed the place of a
       question, it *answers* with the facts that it had there.
    4. If the facts differ, every rank raises the same error, and the rank that asks has sent nothing.

    On NCCL no host waits, so a rank without the change does not answer, and the rank that asks raises after half of the
    process group's timeout.

    Args:
        connections: those on the process group of the ranks.
        what: names the facts in errors, in the plural.
        remedy: the last sentences of an error.
        describe: returns the texts of some facts by name, which are compared in their order.
        agreed: facts on which all ranks have agreed already.

    Attributes:
        passed: the latest place in the training loop that this rank has passed: numbers that grow, and are equal on all
            ranks.
    """

    def __init__(
        self,
        connections: Connections,
        what: str,
        remedy: str,
        describe: Callable[[Any], Mapping[str, str]],
        agreed: object = UNKNOWN,
    ) -> None:
        self._connections = weakref.ref(connections)  # a hook's state may outlive the process group
        self._what = what
        self._remedy = remedy
        self._describe = describe
        self._agreed = agreed
        self._number = connections.new_watcher(self)
        self._generation = connections.generation  # of the connections, in which places are counted
        self.passed: tuple[int, ...] = ()
        self._compared: tuple[int, ...] = ()  # place of the latest comparison
        self._is_comparing = threading.Lock()  # the worker thread of an executor may answer

    @property
    def connections(self) -> Connections:
        """The connections, which the caller of a method has."""
        connections = self._connections()
        assert connections is not None
        return connections

    def belong_to(self, connections: Connections) -> bool:
        """Whether these are facts of the ranks of ``connections``."""
        return self._connections() is connections

    def check(self, facts: object, place: tuple[int, ...] = ()) -> None:
        """Raise RuntimeError, on every rank, unless all ranks have the same facts at this place.

        By default, the number of calls is the place.
        """
        connections = self.connections
        if self._generation != connections.generation:
            self._generation = connections.generation
            self._compared = ()
            self.passed = ()
        place = place or (sum(self.passed) + 1,)
        if facts is not self._agreed and facts != self._agreed:
            if connections.group.size() > 1:
                connections.check()
                with self._is_comparing:
                    connections.announce(self._number, "asks", json.dumps(place))
                    self._compare(facts, place)
            self._agreed = facts
        self.passed = place  # at the end: a rank that asks does not answer

    def watch(self) -> None:
        """Take part in the comparison for which another rank asks, if there is one that this rank would miss."""
        connections = self.connections
        if self._agreed is UNKNOWN or self._generation != connections.generation:
            return
        text = connections.announced(self._number, "asks")
        if text is None or not self._is_comparing.acquire(blocking=False):
            return
        try:
            place = tuple(json.loads(text))
            if place <= self.passed and place != self._compared:
                self._compare(self._agreed, place)
        finally:
            self._is_comparing.release()

    def _compare(self, facts: object, place: tuple[int, ...]) -> None:
        self._compared = place
        connections, agreed = self.connections, self._agreed
        # Half: where nobody answers, the others already wait in a collective, and must get the reason before it ends.
        timeout = collective_timeout(connections.group) / (1 if agreed is UNKNOWN else 2)
        purpose = f"The comparison of {self._what} ({self._number})"
        try:
            lines = differences_between_ranks(
                connections.group, purpose, self._describe(facts), timeout, connections.check_peers
            )
        except RanksMissing as error:
            changed = "" if agreed is UNKNOWN else ", which have changed"
            raise RuntimeError(
                f"This rank compares its {self._what}{changed}: {format_ranks(error.ranks)} did not compare "
                f"{'its' if len(error.ranks) == 1 else 'their'} own within {timeout}. {self._remedy}"
            ) from error
        if lines:
            raise RuntimeError(f"The {self._what} differ between ranks:{lines}\n{self._remedy}")
