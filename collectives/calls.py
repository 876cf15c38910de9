"""`Calls`: the calls on a process group, in one order on all ranks, and how a difference between ranks is found."""

from __future__ import annotations

import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist

from gradwire.collectives.call_site import CallSite, is_marked, is_other_call
from gradwire.collectives.compressors import AverageCompressor, Compressor, ScatterCompressor
from gradwire.comm import Connections
from gradwire.compress import Quantization, Stamp
from gradwire.exchange.handshake import Words, compare_settings
from gradwire.kernels import WIRE_FORMATS

logger = logging.getLogger("gradwire.collectives")
MOST_COMPRESSORS = 256  # without memory on a process group; then the least recently used one is dropped
PASS_MEMORY = "Pass memory=memory['name'] with memory = gradwire.collectives.Memory(), or choose int8."
SAME_CALLS = "Make the same calls in the same order on every rank, then resynchronize."
WORDS = Words(
    subject="Calls of gradwire.collectives",
    missing="Rank {rank} is in {what}, but there was no such call on {ranks} within {timeout}.",
    missing_again="Rank {rank} is in {what}, but there was no such call on {ranks} within {timeout}.",
    hint="Every rank must make the same calls in the same order.",
    remedy=SAME_CALLS,
    purpose="A new call of gradwire.collectives",
    waiting="Rank {rank} is in {what}",
)


class Calls:
    """The calls on a process group, which all its ranks make in one order.

    1. A call site that is new is compared with the other ranks' through the store, by `compare`. No collective is
       issued before.
    2. Messages of known call sites carry a `stamp` of the call, on CPUs only: if a rank has skipped a call, or makes
       another one, every rank finds another stamp than its own and raises. Receives have `room` for the messages of
       all known call sites.
    3. A rank with a known call site may wait for a rank that compares a new one. It finds that in the store, by
       `watch`.

    Attributes:
        count: number of calls so far.
        room: bytes of the largest cell of all known call sites, equal on all ranks.
    """

    def __init__(self, connections: Connections) -> None:
        self.count = self.room = 0
        # Calls in flight for which the marks of the ranks differ, by number: whether another rank has one.
        self._marks: dict[int, bool] = {}
        self._connections, self._number = weakref.proxy(connections), connections.new_watcher(self)
        self._compressors: OrderedDict[CallSite, Compressor] = OrderedDict()  # without memory
        self._in_flight: dict[int, CallSite] = {}  # the exchanges that have begun, by number of the call
        self._told = 0  # the latest call that `watch` has announced
        self._rank = dist.get_rank()

    def restart(self, count: int) -> None:
        """Begin anew after ``count`` calls: some ranks have finished the latest one, others have not."""
        self.count = count
        self._compressors.clear()
        self._in_flight.clear()
        self._marks.clear()

    def compressor(self, site: CallSite, group: dist.ProcessGroup) -> Compressor:
        """The compressor of a call without memory; made at its first call, on every rank."""
        found = self._compressors.get(site)
        if found is None:
            self.compare(site, group)
            if len(self._compressors) == MOST_COMPRESSORS:
                self._compressors.popitem(last=False)
            if site.collective == "all_reduce" and WIRE_FORMATS[site.wire].bits < WIRE_FORMATS["int6"].bits:
                text = "all_reduce in %s without memory loses small values in every call. %s"
                logger.warning(text, site.wire, PASS_MEMORY)
            found = self._compressors[site] = new_compressor(site, group, Quantization(error_dtype=None))
            self.know(found)
        self._compressors.move_to_end(site)
        return found

    def compare(self, site: CallSite, group: dist.ProcessGroup, facts: Mapping[str, str] = {}) -> None:
        """Raise RuntimeError on every rank unless all make this call, with equal facts. For a new call site.

        Raises ValueError if it is not possible.
        """
        site.check_layouts()
        settings = {"hook": f"call {self.count} of gradwire.collectives, {site}", **site.facts(), **facts}
        compare_settings(group, settings, False, self._number, WORDS)

    def know(self, compressor: Compressor) -> None:
        """Expect calls of a compressor's call site from now on."""
        compressor.prepare()
        self.room = max(self.room, compressor.cell_bytes)

    def begin(self, site: CallSite, mark: bool = False) -> Stamp:
        """The stamp of the current call, whose exchange begins."""
        number = self.count
        self._in_flight[number] = site
        return Stamp(site.stamp(number, mark), partial(self._explain, site, number))

    def end(self, number: int) -> bool:
        """Note that the exchange of a call is done; returns whether another rank's messages had a mark."""
        self._in_flight.pop(number, None)
        return self._marks.pop(number, False)

    def watch(self) -> None:
        """Raise RuntimeError if a rank compares another call than one in flight here."""
        if not self._in_flight:
            return
        number, site = next(iter(self._in_flight.items()))
        if number != self._told:  # this rank waits
            self._told = number
            self._tell(number, site)
        told = self._connections.announced(self._number, "hook") or ""
        found = re.search(r" is in call (\d+) of ", told)
        if found is not None and (mine := self._in_flight.get(int(found[1]))) is not None:
            problem = f"{told}, which is new, and rank {self._rank} in {mine}, which is not. {SAME_CALLS}"
            self._connections.post(problem)
            raise RuntimeError(problem)

    def _explain(self, site: CallSite, number: int, by_rank: Mapping[int, int]) -> str | None:
        """The error of ranks in different calls. In the executor's thread."""
        group = self._connections.group
        own = by_rank.get(group.rank(), site.stamp(number, False))
        others = [rank for rank, stamp in by_rank.items() if is_other_call(stamp, own)]
        if not others:
            self._marks[number] = any(map(is_marked, by_rank.values()))
            return None
        self._tell(number, site)
        ranks = dist.get_process_group_ranks(group)
        told = self._connections.announced(self._number, f"call of {others[0]}", wait=True) or "another call"
        problem = (
            f"The ranks are in different calls of gradwire.collectives: rank {self._rank} in call {number}, {site}, "
            f"and rank {ranks[others[0]]} in {told}. {SAME_CALLS}"
        )
        self._connections.post(problem)  # before connections close: the others then know why
        return problem

    def _tell(self, number: int, site: CallSite) -> None:
        """Tell the other ranks, in the store, in which call this one is."""
        rank = self._connections.group.rank()
        self._connections.announce(self._number, f"call of {rank}", f"call {number}, {site}")


def new_compressor(site: CallSite, group: dist.ProcessGroup, options: Quantization) -> Compressor:
    """The compressor of a call site on a process group."""
    kind = AverageCompressor if site.collective == "all_reduce" else ScatterCompressor
    return kind(site, group, options)


_calls: weakref.WeakKeyDictionary[Connections, Calls] = weakref.WeakKeyDictionary()


def calls_on(connections: Connections) -> Calls:
    """The calls on the group of these connections."""
    if connections not in _calls:
        _calls[connections] = Calls(connections)
    return _calls[connections]
