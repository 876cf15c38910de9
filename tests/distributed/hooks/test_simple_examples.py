"""The reading editions in examples/: law 1, the exact mean over several steps, and gradwire's own hooks.

Law 1: gradient + old error = result + new error, in the mean over the ranks.
"""

import runpy

import pytest
import torch
import torch.distributed as dist

from tests.support.bits import assert_same_bits
from tests.support.example_programs import EXAMPLES
from tests.support.powersgd_steps import HOOKS as POWERSGD_HOOKS
from tests.support.powersgd_steps import Fed, matrix, new_state, noise
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, gradients, register

SHAPES = [(40, 60), (24, 5, 3, 3), (70,)]


def example(name):
    """The names of an example's module."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def powersgd(rank):
    names = example("powersgd_simple")
    return names["PowerSGDState"](rank), names["powersgd_hook"]


def quantization(bits):
    names = example("quantization_simple")
    return names["QuantizationState"](bits), names["quantization_hook"]


MAKERS = {"powersgd": lambda: powersgd(4), "int4": lambda: quantization(4), "int8": lambda: quantization(8)}


def mean_over_ranks(tensors):
    """The mean of each tensor over the ranks, in fp64."""
    means = [tensor.double() for tensor in tensors]
    for mean in means:
        dist.all_reduce(mean)
    return [mean / dist.get_world_size() for mean in means]


def reduced(ddp, tensors):
    """The result of one step whose gradients are ``tensors``."""
    ddp.zero_grad()
    ddp(*tensors).backward()
    return list(gradients(ddp).values())


def total_errors(state, parameters):
    """What later steps will add to the mean, by parameter, in fp64 and in the gradients' shapes."""
    totals = []
    for parameter in parameters:
        error = state.errors.get(parameter, torch.zeros_like(parameter)).double()
        if parameter in getattr(state, "shard_errors", {}):  # this rank's shard of the mean: zeros elsewhere
            error = error.clone()
            error[dist.get_rank()] += dist.get_world_size() * state.shard_errors[parameter].double()
        totals.append(error.flatten()[: parameter.numel()].view_as(parameter))
    return mean_over_ranks(totals)


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(2, 3)
def test_law1_simple_hook_conserves_gradients_and_averages_over_steps(name):
    steps = noise(dist.get_world_size(), 40, SHAPES)
    state, hook = MAKERS[name]()
    ddp = WRAPPERS["pytorch"](Fed(steps[0][0]))
    ddp.register_comm_hook(state, hook)
    parameters = list(ddp.parameters())
    errors, distances = total_errors(state, parameters), []
    sums = [[torch.zeros_like(error) for error in errors] for _ in range(2)]
    for ranks in steps:
        results = reduced(ddp, ranks[dist.get_rank()])
        means, before, errors = mean_over_ranks(ranks[dist.get_rank()]), errors, total_errors(state, parameters)
        for k, result in enumerate(results):
            torch.testing.assert_close(result + errors[k], means[k] + before[k], rtol=0, atol=1e-5)
            others = [torch.empty_like(result) for _ in range(dist.get_world_size())]
            dist.all_gather(others, result.contiguous())
            assert_same_bits(others[0], result)
            sums[0][k] += result
            sums[1][k] += means[k]
        differences = [result - mean for result, mean in zip(*sums, strict=True)]
        distances.append([d.norm() / mean.norm() for d, mean in zip(differences, sums[1], strict=True)])
    assert all(last < max(first / 2, 1e-6) for first, last in zip(distances[0], distances[-1], strict=True))


@on_ranks(2, 3)
def test_simple_powersgd_takes_the_steps_of_gradwire():
    """Factors and errors are copied once; then the results stay equal up to rounding, with warm starts of both."""
    steps = noise(dist.get_world_size(), 8, SHAPES)
    fast, (simple, hook) = new_state(matrix_approximation_rank=4), powersgd(4)
    ours, theirs = (WRAPPERS["pytorch"](Fed(steps[0][0])) for _ in range(2))
    register(ours, (fast, POWERSGD_HOOKS["powersgd"]()))
    theirs.register_comm_hook(simple, hook)
    for step, ranks in enumerate(steps):
        expected = reduced(ours, ranks[dist.get_rank()])
        if step >= 4:
            for result, one in zip(reduced(theirs, ranks[dist.get_rank()]), expected, strict=True):
                torch.testing.assert_close(result, one, rtol=0, atol=1e-4)
        if step == 3:  # two compressed steps; the simple hook has taken none
            for i, parameter in enumerate(theirs.module.weights[:2]):
                simple.q[parameter] = fast.memory.tensors("q")[f"weights.{i}"][0].T.clone()
                simple.errors[parameter] = matrix(fast.memory.tensors("errors")[f"weights.{i}"]).float()
