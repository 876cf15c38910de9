"""When buckets are launched: as soon as the last gradient is ready, in whatever order gradients come."""

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.reducer.reducer import Phase
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS

PAIRS = 5e-6  # MiB: a bucket for every two numbers
PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=60)


class Chain(nn.Module):
    """A product of numbers in a chosen order, the last of which gets its gradient first."""

    def __init__(self, count):
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x, order):
        for i in reversed(order):
            x = x * self.numbers[i]
        return x


def launches(wrapper, orders, count, caps, mode):
    """The events of each step: "ready" for a gradient, "launched" for a bucket."""
    options = {"find": {"find_unused_parameters": True}, "static": {"static_graph": True}, "plain": {}}[mode]
    model = Chain(count)
    ddp = WRAPPERS[wrapper](model, bucket_cap_mb_list=caps, **options)
    place = {id(number): i for i, number in enumerate(model.numbers)}
    events = []
    for i, number in enumerate(model.numbers):
        number.register_post_accumulate_grad_hook(lambda _, i=i: events.append(("ready", i)))

    def hook(_, bucket):
        events.append(("launched", [place[id(p)] for p in bucket.parameters()]))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    steps = []
    for order in orders:
        events.clear()
        ddp(torch.ones(1), order).backward()
        steps.append(list(events))
    return steps


# The order of the five gradients on each rank.
ORDERS = [[3, 0, 4, 1, 2], [1, 4, 2, 0, 3], [2, 3, 1, 4, 0]]


@pytest.mark.parametrize("mode", ["plain", "static"])
@on_ranks(2, 3)
def test_ranks_with_other_gradient_orders_rebuild_the_buckets_of_rank_0(mode):
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    model = Chain(5)
    for i, number in enumerate(model.numbers):
        number.data.fill_(i + 1)
    ddp = WRAPPERS["gradwire"](model, bucket_cap_mb=PAIRS, static_graph=mode == "static")
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(1) + dist.get_rank(), ORDERS[dist.get_rank()]).backward()
        seen.append([number.grad.item() for number in model.numbers])
    rebuilt, members = (ddp.reducer.has_rebuilt_buckets, [bucket.members for bucket in ddp.reducer.buckets])
    assert rebuilt
    assert members == [[3, 0], [4, 1], [2]]
    for step in seen:
        assert step == pytest.approx([mean * 120 / (i + 1) for i in range(5)], rel=1e-6)


@st.composite
def loops(draw):
    count = draw(st.integers(1, 7))
    mode = draw(st.sampled_from(("plain", "find", "static")))
    used = st.permutations(range(count))
    if mode == "find":
        used = used.flatmap(lambda order: st.integers(1, count).map(lambda n: order[:n]))
    if mode == "static":
        members = draw(used)[: draw(st.integers(1, count))]
        used = st.permutations(members)
    caps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return {
        "count": count,
        "mode": mode,
        "orders": draw(st.lists(used, min_size=4, max_size=6)),
        "caps": [4 * n / 2**20 for n in caps],
    }


def test_bucket_launches_match_pytorch(worlds):
    world = worlds(1)

    @given(loop=loops())
    @PROPERTY
    def launches_agree(loop):
        (pytorch,) = world.run(launches, wrapper="pytorch", **loop)
        (gradwire,) = world.run(launches, wrapper="gradwire", **loop)
        assert gradwire == pytorch

    launches_agree()


class Doubles(nn.Module):
    """An output for each number."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(4))

    def forward(self):
        return [2 * number for number in self.numbers]


@on_ranks(1)
def test_gradient_that_is_ready_is_not_expected_last():
    ddp = WRAPPERS["gradwire"](Doubles())
    reducer = ddp.reducer
    sum(ddp()).backward()
    ddp.zero_grad()
    outputs = ddp()
    early, late, first, awaited = reducer.buckets[0].members  # the last is expected last; the first would be next
    second = threading.Thread(target=outputs[early].backward)
    begin = reducer._begin_reduction
    has_come = threading.Event()

    def begin_with_company(index):
        reducer.parameters[early].register_post_accumulate_grad_hook(lambda _: has_come.set())
        second.start()
        has_come.wait()
        while not reducer._autograd_hooks.recorded:  # its hook runs next, and then waits for the reducer's lock
            pass
        begin(index)

    reducer._begin_reduction = begin_with_company
    outputs[first].backward()
    second.join()
    reducer._begin_reduction = begin
    outputs[awaited].backward()
    outputs[late].backward()
    backward = reducer._backward
    result = ([number.grad.item() for number in ddp.module.numbers], backward.n_pending, backward.phase)
    assert result == ([2.0] * 4, [0], Phase.DONE)
