"""A bucket is launched at the moment when its last gradient has come, in whatever order they come."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training import WRAPPERS

from gradwire.reducer.arrivals import Arrivals

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
    """What happened in each step: "came" for a gradient, "went" for a bucket, in turn."""
    options = {"find": {"find_unused_parameters": True}, "static": {"static_graph": True}, "plain": {}}[mode]
    model = Chain(count)
    ddp = WRAPPERS[wrapper](model, bucket_cap_mb_list=caps, **options)
    place = {id(number): i for i, number in enumerate(model.numbers)}
    happened = []
    for i, number in enumerate(model.numbers):
        number.register_post_accumulate_grad_hook(lambda _, i=i: happened.append(("came", i)))

    def hook(_, bucket):
        happened.append(("went", [place[id(p)] for p in bucket.parameters()]))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    steps = []
    for order in orders:
        happened.clear()
        ddp(torch.ones(1), order).backward()
        steps.append(list(happened))
    return steps


# In which the gradients of five numbers come, by rank.
ORDERS = [[3, 0, 4, 1, 2], [1, 4, 2, 0, 3], [2, 3, 1, 4, 0]]


def rebuild_from_own_order(mode):
    """The buckets after four steps, and the gradients of each; every rank's come in an order of its own."""
    model = Chain(5)
    for i, number in enumerate(model.numbers):
        number.data.fill_(i + 1)
    ddp = WRAPPERS["gradwire"](model, bucket_cap_mb=PAIRS, static_graph=mode == "static")
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(1) + dist.get_rank(), ORDERS[dist.get_rank()]).backward()
        seen.append([number.grad.item() for number in model.numbers])
    return ddp.reducer.has_rebuilt_buckets, ddp.reducer.members, seen


@pytest.mark.parametrize("mode", ["plain", "static"])
def test_ranks_of_other_arrival_orders_rebuild_the_buckets_of_rank_0(world, mode):
    mean = sum(range(1, world.size + 1)) / world.size
    for rebuilt, members, seen in world.run(rebuild_from_own_order, mode=mode):
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


def test_buckets_are_launched_when_pytorch_launches_them(worlds):
    world = worlds(1)

    @given(loop=loops())
    @PROPERTY
    def launches_agree(loop):
        (pytorch,) = world.run(launches, wrapper="pytorch", **loop)
        (gradwire,) = world.run(launches, wrapper="gradwire", **loop)
        assert gradwire == pytorch

    launches_agree()


def test_quiet_parameters_are_noted_and_react_the_second_time():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    seen = Watcher(parameters)
    seen.arrivals.quieten(bytes([1, 1, 0]))
    (parameters[0] * parameters[1]).backward()
    assert seen.calls == 0
    (parameters[2] * 1).backward()
    assert seen.calls == 1
    assert sorted(seen.taken) == [0, 1, 2]
    (parameters[1] * 1).backward()
    assert seen.calls == 2
    assert seen.taken[3:] == [1]


def test_no_arrival_is_lost_between_threads():
    """Threads arrive at quiet parameters while another wakes them: each must be taken by somebody."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            parameters = [nn.Parameter(torch.ones(1)) for _ in range(64)]
            seen = Watcher(parameters, wakes=True)
            seen.arrivals.quieten(bytes([0, *[1] * 63]))
            threads = [threading.Thread(target=arrive, args=(parameters[k::4],)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(seen.taken) == list(range(64))
    finally:
        sys.setswitchinterval(interval)


def arrive(parameters):
    for parameter in parameters:
        (parameter * 1).backward()


class Watcher:
    """Takes arrivals as the reducer does: one that is awaited wakes another, until all have come."""

    def __init__(self, parameters, wakes=False):
        self.arrivals = Arrivals(parameters, self.react)
        self.lock = threading.Lock()
        self.taken = []
        self.calls = 0
        self.wakes = wakes
        self.awaited = 0

    def react(self):
        with self.lock:
            self.calls += 1
            for index in self.arrivals.new():
                self.taken.append(index)
                if self.wakes and index == self.awaited:
                    self.awaited = self.arrivals.wake_one(set(range(64)).difference(self.taken))


class Doubles(nn.Module):
    """An output for each number."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(4))

    def forward(self):
        return [2 * number for number in self.numbers]


def arrive_while_the_first_is_taken():
    """A gradient comes in a second thread while the reducer takes the first; gradients, and what is left pending."""
    ddp = WRAPPERS["gradwire"](Doubles())
    reducer = ddp.reducer
    sum(ddp()).backward()
    ddp.zero_grad()
    outputs = ddp()
    early, late, first, awaited = reducer.members[0]  # the last is awaited; the first would be woken in its place
    second = threading.Thread(target=outputs[early].backward)
    begin = reducer._begin_reduction
    has_come = threading.Event()

    def begin_with_company(index):
        reducer.parameters[early].register_post_accumulate_grad_hook(lambda _: has_come.set())
        second.start()
        has_come.wait()
        while not reducer._arrivals._noted:  # its hook runs next, and then waits for the reducer's lock
            pass
        begin(index)

    reducer._begin_reduction = begin_with_company
    outputs[first].backward()
    second.join()
    reducer._begin_reduction = begin
    outputs[awaited].backward()
    outputs[late].backward()
    pending = [bucket.pending for bucket in reducer.buckets]
    return [number.grad.item() for number in ddp.module.numbers], pending, reducer._requires_finalize


def test_a_gradient_that_has_come_is_not_waited_for(worlds):
    (result,) = worlds(1).run(arrive_while_the_first_is_taken)
    assert result == ([2.0] * 4, [4], False)
