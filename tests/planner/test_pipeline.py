"""The model of the executors: cases worked out by hand, and laws that hold for any durations."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comm.pipeline import BucketTimes, busy_until, exchange_ends

seconds = st.integers(0, 100)
SMALL = BucketTimes((2, 3), (10,), (1,))
SLOW = BucketTimes((2, 30), (1,), (0,))
TWO_MESSAGES = BucketTimes((1, 1, 1), (10, 10), (0, 0))


@st.composite
def exchanges(draw):
    """Launch times and buckets."""
    buckets = []
    for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)):
        compute, busy, latency = ([draw(seconds) for _ in range(size)] for size in (n + 1, n, n))
        buckets.append(BucketTimes(compute, busy, latency))
    return sorted(draw(seconds) for _ in buckets), buckets


@pytest.mark.parametrize(
    ("ready", "buckets", "in_flight", "ends"),
    [
        ([5], [BucketTimes((1, 2, 3), (10, 20), (100, 200))], None, [5 + 1 + 110 + 2 + 220 + 3]),
        ([7], [BucketTimes((4,), (), ())], None, [11]),  # an algorithm that sends nothing
        ([0, 0], [SMALL] * 2, None, [16, 26]),  # the second message waits for the link from 4 to 12
        ([0, 0], [SMALL] * 2, 1, [16, 32]),  # the second bucket waits for the end of the first
        ([0, 0, 0], [SMALL] * 3, 2, [16, 26, 36]),
        ([0, 100], [SMALL] * 2, None, [16, 116]),  # nothing to wait for
        ([0, 0], [SLOW] * 2, None, [33, 63]),  # last parts run one after another
        ([0, 0], [TWO_MESSAGES] * 2, None, [23, 35]),  # first messages do not wait for second ones
    ],
)
def test_ends_of_exchanges_worked_out_by_hand(ready, buckets, in_flight, ends):
    assert exchange_ends(ready, buckets, in_flight) == ends


@pytest.mark.parametrize(
    ("ready", "buckets", "bound"),
    [
        ([5], [TWO_MESSAGES], 5 + 1 + 20),  # bound by the link
        ([5], [SLOW], 5 + 32),  # bound by the worker
        ([0, 0], [SMALL] * 2, 2 + 20),
        ([0, 100], [SMALL] * 2, 112),  # the second bucket alone
        ([0, 1], [SLOW] * 2, 64),
    ],
)
def test_time_until_which_link_or_worker_are_busy_worked_out_by_hand(ready, buckets, bound):
    assert busy_until(ready, buckets) == bound


@settings(deadline=None)
@given(exchanges())
def test_ends_follow_bucket_order_and_no_bucket_is_faster_than_alone(case):
    ready, buckets = case
    ends = exchange_ends(ready, buckets)
    assert ends == sorted(ends)
    for at, bucket, end in zip(ready, buckets, ends, strict=True):
        (alone,) = exchange_ends([at], [bucket])
        assert alone == at + sum(bucket.compute) + sum(bucket.busy) + sum(bucket.latency) <= end


@settings(deadline=None)
@given(exchanges())
def test_more_buckets_in_flight_end_no_later(case):
    ready, buckets = case
    by_limit = [exchange_ends(ready, buckets, limit) for limit in range(1, len(buckets) + 1)]
    assert by_limit[-1] == exchange_ends(ready, buckets)
    for fewer, more in itertools.pairwise(by_limit):
        assert all(later >= sooner for later, sooner in zip(fewer, more, strict=True))
    one_by_one = 0
    for at, bucket, end in zip(ready, buckets, by_limit[0], strict=True):
        one_by_one = max(at, one_by_one) + sum(bucket.compute) + sum(bucket.busy) + sum(bucket.latency)
        assert end == one_by_one
    assert busy_until(ready, buckets) <= one_by_one


@settings(deadline=None)
@given(exchanges(), st.data())
def test_longer_duration_makes_no_end_earlier(case, data):
    ready, buckets = case
    index = data.draw(st.integers(0, len(buckets) - 1))
    kind = data.draw(st.integers(0, 2))
    parts = [list(part) for part in buckets[index]]
    parts[kind][data.draw(st.integers(0, len(parts[kind]) - 1))] += data.draw(st.integers(1, 50))
    longer = [*buckets[:index], BucketTimes(*parts), *buckets[index + 1 :]]
    for limit in (None, 1, 2):
        pairs = zip(exchange_ends(ready, buckets, limit), exchange_ends(ready, longer, limit), strict=True)
        assert all(before <= after for before, after in pairs)
    assert busy_until(ready, buckets) <= busy_until(ready, longer)
