"""``gradwire run --collectives``: gradients are compressed, other tensors are not, and the report says which."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import collectives
from gradwire.cli.run_collectives import compressed_collectives
from gradwire.collectives import agreement
from gradwire.collectives.group import MIN_NUMEL
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks


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


def compressed(tensor, op=dist.ReduceOp.SUM):
    tensor = tensor.clone()
    collectives.all_reduce(tensor, op, wire="int8")
    return tensor


def plain(tensor, op=dist.ReduceOp.SUM):
    """The result without gradwire, also while it compresses the calls of a script."""
    tensor, options = tensor.clone(), dist.AllreduceOptions()
    options.reduceOp = op
    dist.group.WORLD.allreduce([tensor], options).wait()
    return tensor


@on_ranks(2)
def test_gradients_are_compressed_and_other_tensors_are_passed_on():
    parameters, others = case([MIN_NUMEL, 2 * MIN_NUMEL, 100])
    with compressed_collectives("int8", []) as found:
        averaged(parameters, others)
    expected, exact = case([MIN_NUMEL, 2 * MIN_NUMEL, 100])
    for parameter in expected[:2]:
        collectives.all_reduce(parameter.grad, wire="int8")
    dist.all_reduce(expected[2].grad, dist.ReduceOp.AVG)
    for other in exact:
        dist.all_reduce(other)
    assert_same_bits([each.grad for each in parameters], [each.grad for each in expected])
    assert_same_bits(others, exact)
    text = found.report()
    assert re.search(r"test_run_collectives.py:\d+  all_reduce\n    \[65536\], 1 calls of 262 kB: compressed", text), (
        text
    )
    assert "\n    [131072], 1 calls of 524 kB: compressed" in text
    (call,) = re.findall(r"1 calls of 262 kB: passed on: not the grad of a parameter; --call (\S+) compresses", text)

    parameters, others = case([MIN_NUMEL])
    with compressed_collectives("int8", [call]) as named:
        averaged(parameters, others)
    assert_same_bits(others[0], compressed(drawn(7)))
    assert named.report().count("compressed") == 2


@on_ranks(2)
def test_other_groups_and_scripts_without_large_collectives_are_left_alone():
    group = dist.new_group()
    parameters, _ = case([MIN_NUMEL])
    expected = plain(parameters[0].grad)
    with compressed_collectives("int8", []) as found:
        dist.all_reduce(parameters[0].grad, group=group)
    assert_same_bits(parameters[0].grad, expected)
    assert "none: the script has called neither" in found.report()


@on_ranks(2)
def test_default_group_passed_by_name_is_compressed():
    parameters, _ = case([MIN_NUMEL])
    expected = compressed(parameters[0].grad)
    with compressed_collectives("int8", []):
        dist.all_reduce(parameters[0].grad, group=dist.group.WORLD)
    assert_same_bits(parameters[0].grad, expected)


@pytest.mark.parametrize("numel", [MIN_NUMEL - 2, MIN_NUMEL, 2 * MIN_NUMEL - 2])
@on_ranks(2)
def test_tensors_of_min_numel_elements_or_more_are_compressed(numel):
    """A reduce-scatter counts the elements of its input."""
    (parameter,), _ = case([numel])
    part, expected_part = torch.empty(numel // 2), torch.empty(numel // 2)
    with compressed_collectives("int8", []) as found:
        dist.reduce_scatter_tensor(part, parameter.grad)
        dist.all_reduce(parameter.grad)
    if numel < MIN_NUMEL:
        dist.reduce_scatter_tensor(expected_part, drawn(0, numel))
        expected = plain(drawn(0, numel))
    else:
        collectives.reduce_scatter_tensor(expected_part, drawn(0, numel), dist.ReduceOp.SUM, wire="int8")
        expected = compressed(drawn(0, numel))
    assert_same_bits([part, parameter.grad], [expected_part, expected])
    is_counted = [(name, is_compressed) for _, name, _, is_compressed in found.counts]
    names = ["reduce_scatter_tensor", "all_reduce"] if numel >= MIN_NUMEL else []
    assert is_counted == [(name, True) for name in names]


@on_ranks(2)
def test_reduce_scatter_of_a_gradient_is_compressed():
    size = dist.get_world_size()
    (parameter,), _ = case([size * MIN_NUMEL])
    output, expected = torch.empty(MIN_NUMEL), torch.empty(MIN_NUMEL)
    other, exact = drawn(5, size * MIN_NUMEL), torch.empty(MIN_NUMEL)
    dist.reduce_scatter_tensor(exact, other)
    with compressed_collectives("bf16", []) as found:
        for _ in range(2):
            dist.reduce_scatter_tensor(output, parameter.grad)
        passed = torch.empty(MIN_NUMEL)
        dist.reduce_scatter_tensor(passed, other)
    collectives.reduce_scatter_tensor(expected, parameter.grad, dist.ReduceOp.SUM, wire="bf16")
    assert_same_bits([output, passed], [expected, exact])
    text = found.report()
    assert "2 calls of 524 kB: compressed" in text and "1 calls of 524 kB: passed on" in text


def through_helper(tensors):
    """One line of a script averages tensors of several kinds."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


@pytest.mark.parametrize("first", ["gradient", "other"])
@on_ranks(2, 3)
def test_line_that_averages_gradients_and_other_tensors_compresses_gradients_only(first):
    """Counters of 100,000 and weights have the shape of a gradient."""
    module = nn.Linear(MIN_NUMEL, 1, bias=False)
    weights, counts = drawn(3).view(1, -1), torch.full((1, MIN_NUMEL), 100_000.0 + dist.get_rank())
    with compressed_collectives("int8", []):
        for step in range(4):
            module.weight.grad = drawn(step).view(1, -1)
            tensors = [module.weight.grad, weights.clone(), counts.clone()]
            expected = [
                compressed(tensors[0], dist.ReduceOp.AVG),
                *(plain(each, dist.ReduceOp.AVG) for each in tensors[1:]),
            ]
            order = (0, 1, 2) if first == "gradient" else (1, 2, 0)
            through_helper([tensors[i] for i in order])
            assert_same_bits(tensors, expected)


@on_ranks(2, 3)
def test_rank_without_data_that_passes_zeros_takes_part():
    parameter = nn.Parameter(torch.zeros(MIN_NUMEL))
    with compressed_collectives("int8", []) as found:
        for step in range(4):
            has_data = dist.get_rank() == 0 or step % 2 == 0
            parameter.grad = drawn(step) if has_data else None
            tensor = parameter.grad if has_data else torch.zeros(MIN_NUMEL)
            expected = compressed(tensor)
            if has_data:
                dist.all_reduce(tensor)
            else:
                dist.all_reduce(tensor)  # on a line of its own
            assert_same_bits(tensor, expected)
            assert_same_on_all_ranks(from_all_ranks(tensor))
    assert "passed on" not in found.report()


@on_ranks(2)
def test_ranks_stop_asking_once_no_rank_has_wanted_many_calls():
    parameter = nn.Parameter(torch.zeros(MIN_NUMEL))
    with compressed_collectives("int8", []) as found, mock.patch.object(agreement, "PLAIN_AFTER", 3):
        with mock.patch.object(agreement, "_on_any_rank", side_effect=agreement._on_any_rank) as asked:
            for step in range(6):
                tensor, exact = drawn(step), plain(drawn(step))
                dist.all_reduce(tensor)
                assert_same_bits(tensor, exact)
        assert asked.call_count == 3
        parameter.grad = drawn(9)
        exact = plain(parameter.grad)
        dist.all_reduce(parameter.grad)
        assert_same_bits(parameter.grad, exact)
    assert "compressed\n" not in found.report() + "\n"


@on_ranks(2)
def test_gradients_are_compressed_after_many_unwanted_calls_with_their_shape():
    """As of an evaluation."""
    parameter = nn.Parameter(torch.zeros(MIN_NUMEL))
    with compressed_collectives("int8", []), mock.patch.object(agreement, "PLAIN_AFTER", 3):
        for step in range(3):
            parameter.grad = drawn(step)
            expected = compressed(parameter.grad)
            dist.all_reduce(parameter.grad)
            assert_same_bits(parameter.grad, expected)
            for _ in range(5):
                dist.all_reduce(drawn(7))


@on_ranks(2)
def test_gradients_of_new_and_of_unregistered_parameters_are_found():
    with compressed_collectives("int8", []):
        for make in (lambda: nn.Linear(MIN_NUMEL, 1).weight, lambda: nn.Parameter(torch.zeros(MIN_NUMEL))):
            for step in range(4):
                if step % 2 == 0:
                    parameter = make()
                parameter.grad = drawn(step).view_as(parameter)
                expected = compressed(parameter.grad)
                through = parameter.grad.view(-1)
                dist.all_reduce(through)
                assert_same_bits(parameter.grad, expected)
