"""The model of a step, on drawn costs: no processes, no clocks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.planner.step_model import (
    BucketCost,
    HookCost,
    Link,
    Message,
    MessageCost,
    ModelCost,
    Overlap,
    break_even,
    step_seconds,
    with_larger_buckets,
)

KINDS = ("all-reduce float32", "all-to-all")
seconds = st.floats(0, 1, allow_subnormal=False)
bandwidths = st.floats(1e6, 1e12)


@st.composite
def buckets(draw):
    messages = draw(st.lists(st.builds(Message, st.sampled_from(KINDS), st.integers(1, 10**9)), min_size=1, max_size=3))
    compute = tuple(draw(seconds) for _ in range(len(messages) + 1))
    return BucketCost(draw(seconds), compute, tuple(messages), draw(seconds))


@st.composite
def links(draw):
    costs = {kind: MessageCost(draw(seconds), draw(st.floats(1e-13, 1e-5))) for kind in KINDS}
    return Link(world_size=draw(st.integers(2, 64)), bandwidth=draw(bandwidths), costs=costs)


@st.composite
def cases(draw, n_hooks=1):
    n = draw(st.integers(1, 5))
    ready = sorted(draw(seconds) for _ in range(n))
    model = ModelCost(
        forward=draw(seconds),
        backward=ready[-1] + draw(seconds),
        ready=tuple(ready),
        gradient_bytes=1,
        overlap=draw(st.sampled_from(Overlap)),
    )
    hooks = [
        HookCost(name="a hook", buckets=tuple(draw(buckets()) for _ in range(n)), memory_bytes=0)
        for _ in range(n_hooks)
    ]
    return model, *hooks, draw(links())


def plain(model, nbytes, launch=0.0):
    """A hook of one all-reduce for each bucket of the model."""
    bucket = BucketCost(launch, (0.0, 0.0), (Message(KINDS[0], nbytes),), 0.0)
    return HookCost(name="none", buckets=(bucket,) * len(model.ready), memory_bytes=0)


def fast_link(latency=0.0, per_byte=1e-12):
    return Link(world_size=2, bandwidth=1e9, costs={kind: MessageCost(latency, per_byte) for kind in KINDS})


@given(cases())
@settings(deadline=None)
def test_step_is_never_shorter_than_its_computation_and_its_messages(case):
    model, hook, link = case
    step = step_seconds(model, hook, link) * (1 + 1e-9)
    assert step >= model.forward + model.backward
    assert step >= sum(link.busy(message) for bucket in hook.buckets for message in bucket.messages)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (Overlap.EVERYTHING, 57.0),
        (Overlap.MESSAGES, 30.0 + 4 * 10 + 9),  # computations of all buckets, and the messages of the last
        (Overlap.NOTHING, 30.0 + 4 * 10 + 4 * 9),
    ],
)
def test_step_of_four_buckets_is_that_worked_out_by_hand(overlap, expected):
    """Launches delay the backward pass by 1 each, so the buckets are launched at 16, 22, 28 and 34.

    | bucket | encoded | first message | computed | second message | decoded |
    | 0 | 16 + 6 = 22 | leaves 26, arrives 28 | 29 | leaves 30, arrives 32 | 33 |
    | 1 | 22 + 6 = 28 | leaves 32, arrives 34 | 35 | leaves 36, arrives 38 | 39 |
    | 2 | 33 + 6 = 39, in the place of bucket 0 | 43, 45 | 46 | 47, 49 | 50 |
    | 3 | 39 + 6 = 45, in the place of bucket 1 | 49, 51 | 52 | 53, 55 | 56 |

    The last one finishes at 57; with three buckets in flight, it would at 52.
    """
    model = ModelCost(forward=10, backward=20, ready=(5, 10, 15, 20), gradient_bytes=1, overlap=overlap)
    bucket = BucketCost(1, (6, 1, 1), (Message(KINDS[0], 4), Message(KINDS[1], 1)), 1)
    hook = HookCost(name="a hook", buckets=(bucket,) * 4, memory_bytes=0)
    assert step_seconds(model, hook, fast_link(latency=2.0, per_byte=1.0)) == expected


@given(cases(), st.integers(1, 6))
@settings(deadline=None)
def test_larger_buckets_send_the_same_bytes_in_fewer_messages(case, factor):
    model, hook, _ = case
    larger_model, larger = with_larger_buckets(model, hook, factor)
    assert larger.payload_bytes == hook.payload_bytes
    assert len(larger_model.ready) == len(larger.buckets) <= len(hook.buckets)
    assert larger_model.ready[-1] == model.ready[-1]
    computed = [
        sum(sum(bucket.compute) + bucket.launch + bucket.finish for bucket in h.buckets) for h in (hook, larger)
    ]
    assert computed[0] == pytest.approx(computed[1])
    if factor == 1:
        assert larger.buckets == hook.buckets


def test_three_buckets_become_a_small_first_one_and_one_of_two():
    model = ModelCost(forward=1, backward=3, ready=(1, 2, 3), gradient_bytes=1, overlap=Overlap.EVERYTHING)
    larger_model, larger = with_larger_buckets(model, plain(model, 10), 2)
    assert larger_model.ready == (1, 3)
    assert [[message.nbytes for message in bucket.messages] for bucket in larger.buckets] == [[10], [20]]


@given(cases(n_hooks=2))
@settings(deadline=None, max_examples=50)
def test_steps_at_break_even_bandwidth_are_equally_long(case):
    model, hook, other, link = case
    at = break_even(model, hook, other, link)
    if at is not None and not math.isinf(at):
        mine, others = (step_seconds(model, each, link.at(at)) for each in (hook, other))
        assert mine == pytest.approx(others, rel=1e-6)
