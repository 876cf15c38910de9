"""``gradwire run --collectives``: gradients are compressed, other tensors are not, and the report says which."""

import re

import torch
import torch.distributed as dist
from torch import nn

from gradwire import collectives
from gradwire.cli.run_collectives import compressed_collectives
from gradwire.collectives.group import MIN_NUMEL
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks


def drawn(seed, numel=MIN_NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def averaged(parameters, others):
    """What a training loop does by hand; the lines of its calls are in the report."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    works = [dist.all_reduce(other, async_op=True) for other in others]
    for work in works:
        work.wait()


def case(numels):
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    for seed, parameter in enumerate(parameters):
        parameter.grad = drawn(seed, parameter.numel())
    return parameters, [drawn(7), drawn(8, 100), torch.arange(MIN_NUMEL)]


@on_ranks(2)
def test_gradients_are_compressed_and_other_tensors_are_passed_on():
    parameters, others = case([MIN_NUMEL, 2 * MIN_NUMEL, 100])
    with compressed_collectives("int8", []) as found:
        averaged(parameters, others)
    expected, plain = case([MIN_NUMEL, 2 * MIN_NUMEL, 100])
    for parameter in expected[:2]:
        collectives.all_reduce(parameter.grad, wire="int8")
    dist.all_reduce(expected[2].grad, dist.ReduceOp.AVG)
    for other in plain:
        dist.all_reduce(other)
    assert_same_bits([each.grad for each in parameters], [each.grad for each in expected])
    assert_same_bits(others, plain)
    text = found.report()
    assert re.search(r"test_run_collectives.py:\d+  all_reduce, 2 calls of 393 kB: compressed", text), text
    (call,) = re.findall(
        r"1 calls of 262 kB: passed on: it is not the grad of a parameter; --call (\S+) compresses", text
    )

    parameters, others = case([MIN_NUMEL])
    with compressed_collectives("int8", [call]) as named:
        averaged(parameters, others)
    expected = drawn(7)
    collectives.all_reduce(expected, dist.ReduceOp.SUM, wire="int8")
    assert_same_bits(others[0], expected)
    assert named.report().count("compressed") == 2


@on_ranks(2)
def test_other_groups_and_scripts_without_large_collectives_are_left_alone():
    group = dist.new_group()
    parameters, _ = case([MIN_NUMEL])
    plain = parameters[0].grad.clone()
    with compressed_collectives("int8", []) as found:
        dist.all_reduce(parameters[0].grad, group=group)
    dist.all_reduce(plain)
    assert_same_bits(parameters[0].grad, plain)
    assert "none: the script has called neither" in found.report()


@on_ranks(2)
def test_reduce_scatter_of_a_gradient_is_compressed():
    size = dist.get_world_size()
    (parameter,), _ = case([size * MIN_NUMEL])
    output, expected = torch.empty(MIN_NUMEL), torch.empty(MIN_NUMEL)
    with compressed_collectives("bf16", []) as found:
        dist.reduce_scatter_tensor(output, parameter.grad.view(size, -1))
    collectives.reduce_scatter_tensor(expected, parameter.grad, dist.ReduceOp.SUM, wire="bf16")
    assert_same_bits(output, expected)
    assert "reduce_scatter_tensor, 1 calls of 524 kB: compressed" in found.report()
