"""A model of the executors: the end time of each bucket's exchange, from the durations of its parts, in one unit.

A bucket passes through the parts of its algorithm in bucket order, as in `WorkerExecutor`:

    first part, first message        up to ``in_flight`` buckets at a time
    ... further parts and messages, of the oldest bucket only
    last part

Messages leave the link one after another, first messages and later ones on links of their own. Every end is a maximum
of sums of durations, so no end gets earlier if a duration gets longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class BucketTimes(NamedTuple):
    """Durations of the exchange of one bucket."""

    compute: Sequence[float]  # before the first message, between messages, and after the last one
    busy: Sequence[float]  # time for which each message keeps the link busy; one less than ``compute``
    latency: Sequence[float]  # time until each message arrives, after it has left the link


def exchange_ends(ready: Sequence[float], buckets: Sequence[BucketTimes], in_flight: int) -> list[float]:
    """The end time of each bucket's exchange, if only the order of the parts delays it; see also `busy_until`.

    Args:
        ready: launch time of each bucket, not decreasing.
        buckets: durations of each bucket.
        in_flight: largest number of buckets in flight.
    """
    ends: list[float] = []
    started = finished = 0.0
    free = [0.0, 0.0]  # times at which the links of first and of later messages are free
    for b, (at, bucket) in enumerate(zip(ready, buckets, strict=True)):
        slot = ends[b - in_flight] if b >= in_flight else 0.0
        started = now = max(at, started, slot) + bucket.compute[0]
        for i, (busy, latency, seconds) in enumerate(zip(bucket.busy, bucket.latency, bucket.compute[1:], strict=True)):
            free[i > 0] = max(now, free[i > 0]) + busy
            now = finished = max(free[i > 0] + latency, finished) + seconds
        ends.append(now)
    return ends


def busy_until(ready: Sequence[float], buckets: Sequence[BucketTimes]) -> float:
    """A lower bound of the last end: all messages share one link, and all parts one worker."""
    on_link = _suffix_sums([sum(bucket.busy) for bucket in buckets])
    on_worker = _suffix_sums([sum(bucket.compute) for bucket in buckets])
    return max(
        max(at + bucket.compute[0] + link, at + worker)
        for at, bucket, link, worker in zip(ready, buckets, on_link, on_worker, strict=True)
    )


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]
