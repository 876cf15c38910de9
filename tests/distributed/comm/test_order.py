"""All ranks issue the collectives of all buckets in one order, whatever delays a backward or a worker thread."""

import random
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import DistributedDataParallel as DDP
from gradwire.comm import GroupTransport, connections_of, executor_for
from gradwire.exchange.bucket import Bucket
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import settings_of
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import HOOKS, SMALLEST, register
from tests.support.zoo import Probe

STEPS = 12
SHAPES = [(size,) for size in (3, 7, 1, 64, 5, 2, 9, 33, 4, 8, 1, 6)] + [(3, 5), (2, 2, 2), ()]
WEIGHT_OF_SQUARES = 64  # keeps both sums apart in the result


def nap(draw):
    """A fault that the order must not depend on: now and then, up to 5 ms."""
    if draw.random() < 0.1:
        time.sleep(draw.random() * 0.005)


async def all_reduced(wire, transport):
    """The sum of a wire over all ranks, in place."""
    await transport.all_reduce(wire)
    return wire


async def summed_in_two_shots(wire, transport):
    """The sum of a wire over all ranks, which each rank computes for its cells."""
    pieces, n, numel = 2, transport.world_size, wire.numel()
    sent = torch.zeros(pieces, n, -(-numel // (pieces * n)))
    sent.view(-1)[:numel] = wire
    received, gathered = torch.empty_like(sent), torch.empty_like(sent)
    await transport.all_to_all(received.view(torch.uint8), sent.view(torch.uint8))
    await transport.all_gather(gathered.view(torch.uint8), received.sum(1).view(torch.uint8))
    return gathered.view(-1)[:numel]


SUMS = {"all-reduces": all_reduced, "shots": summed_in_two_shots}


def sums_and_squares(draw, sum_of=all_reduced):
    """A hook of several collectives a bucket: the sum, and the sum of squares that travels on its own."""

    async def algorithm(step):
        nap(draw)
        table, transport = step.source.table, step.transport
        wire = step.source.flatten(step.workspace.wire(table.numel, table.dtype))
        squares = wire * wire
        wire = await sum_of(wire, transport)
        nap(draw)
        squares = await sum_of(squares, transport)
        step.target.unflatten(wire + WEIGHT_OF_SQUARES * squares)

    def hook(state, bucket):
        return reduce_bucket(connections_of(state), Bucket.of(bucket), algorithm, settings_of("test_hook"))

    return hook


def inputs(rank, step):
    """Whole numbers from -3 to 3: sums and sums of squares are exact."""
    generator = torch.Generator().manual_seed(997 * step + rank)
    return [torch.randint(-3, 4, shape, generator=generator).float() for shape in SHAPES]


def expected(step):
    ranks = [inputs(rank, step) for rank in range(dist.get_world_size())]
    return [sum(xs) + WEIGHT_OF_SQUARES * sum(x * x for x in xs) for xs in zip(*ranks, strict=True)]


class Straggler(Probe):
    """A probe in which one rank, another one every step, is late with some of its gradients."""

    def __init__(self, *shapes, draw):
        super().__init__(*shapes)
        self.is_late = False
        for weight in self.weights:
            weight.register_hook(lambda gradient: nap(draw) if self.is_late else None)


WRAPPERS = {
    "pytorch": partial(TorchDDP, bucket_cap_mb=SMALLEST),
    "pytorch_finding_unused": partial(TorchDDP, bucket_cap_mb=SMALLEST, find_unused_parameters=True),
    "gradwire": partial(DDP, bucket_cap_mb=SMALLEST),
    "gradwire_views": partial(DDP, bucket_cap_mb=SMALLEST, gradient_as_bucket_view=True),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("exchange", SUMS)
@on_ranks(2, 3)
def test_collectives_of_buckets_keep_their_order_under_delays(exchange, wrapper):
    rank = dist.get_rank()
    module = Straggler(*SHAPES, draw=random.Random(rank))
    ddp = WRAPPERS[wrapper](module)
    register(ddp, (None, sums_and_squares(random.Random(100 + rank), SUMS[exchange])))
    seen, issued = [], ([], [])
    transport = executor_for(None, torch.device("cpu")).transport
    start = transport.start

    def recorded_start(collective, group=None):
        issued[group is not None].append((type(collective).__name__, collective.payload_bytes))
        return start(collective, group)

    with mock.patch.object(transport, "start", recorded_start):
        for step in range(STEPS):
            ddp.zero_grad()
            module.is_late = step % dist.get_world_size() == rank
            ddp(*inputs(rank, step)).backward()
            seen.append([weight.grad.clone() for weight in module.weights])
            assert_same_bits(seen[-1], expected(step))
    assert_same_on_all_ranks(from_all_ranks((seen, issued)))
    kinds = [{name for name, _ in group_calls} for group_calls in issued]
    assert kinds == ([{"AllToAll"}, {"AllToAll", "AllGather"}] if exchange == "shots" else [{"AllReduce"}] * 2)


LONG = 200  # steps
MATRICES = [(9, 7), (3,), (8, 2, 3), (5, 6), (), (7, 7), (12, 11)]  # what low rank is worth the trouble for, and rest


def train_long(hook, wrapper, is_delayed):
    """Parameters after each step of a training in which every rank is late at places of its own."""
    rank = dist.get_rank()
    draw = random.Random(rank) if is_delayed else None
    start = GroupTransport.start

    def late_start(self, *arguments):
        nap(draw)
        return start(self, *arguments)

    torch.manual_seed(0)
    module = Probe(*MATRICES)
    if is_delayed:
        for weight in module.weights:
            weight.register_hook(lambda gradient: nap(draw))
    ddp = WRAPPERS[wrapper](module)
    register(ddp, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    steps = []
    with mock.patch.object(GroupTransport, "start", late_start if is_delayed else start):
        for _ in range(LONG):
            optimizer.zero_grad()
            ddp(*(torch.randn(shape, generator=generator) for shape in MATRICES)).backward()
            optimizer.step()
            steps.append([weight.detach().clone() for weight in module.weights])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["pytorch", "gradwire"])
@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(3)
def test_training_under_delays_is_bitwise_equal_to_training_without(hook, wrapper):
    punctual, late = (train_long(hook, wrapper, is_delayed) for is_delayed in (False, True))
    assert_same_on_all_ranks(from_all_ranks(late))
    assert_same_bits(late, punctual)
