"""The model of the executors: cases worked out by hand, and laws that hold for any durations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.planner.step_model import BucketTimes, busy_until, exchange_ends

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
        ([5], [BucketTimes((1, 2, 3), (10, 20), (100, 200))], 9, [5 + 1 + 110 + 2 + 220 + 3]),
        ([7], [BucketTimes((4,), (), ())], 9, [11]),  # an algorithm that sends nothing
        ([0, 0], [SMALL] * 2, 9, [16, 26]),  # the second message waits for the link from 4 to 12
        ([0, 0], [SMALL] * 2, 1, [16, 32]),  # the second bucket waits for the end of the first
        ([0, 0, 0], [SMALL] * 3, 2, [16, 26, 36]),
        ([0, 100], [SMALL] * 2, 9, [16, 116]),  # nothing to wait for
        ([0, 0], [SLOW] * 2, 9, [33, 63]),  # last parts run one after another
        ([0, 0], [TWO_MESSAGES] * 2, 9, [23, 35]),  # first messages do not wait for second ones
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
    ends = exchange_ends(ready, buckets, 9)
    assert ends == sorted(ends)
    for at, bucket, end in zip(ready, buckets, ends, strict=True):
        (alone,) = exchange_ends([at], [bucket], 9)
        assert alone == at + sum(bucket.compute) + sum(bucket.busy) + sum(bucket.latency) <= end
