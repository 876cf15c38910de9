"""Parts of the programs in examples/: simple hooks, weighted means, local SGD.

Law 1: gradient + old error = result + new error, in the mean over the ranks.
"""

import copy
import re
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import gradwire
from tests.support.bits import assert_same_bits
from tests.support.example_programs import EXAMPLES
from tests.support.powersgd_steps import HOOKS as POWERSGD_HOOKS
from tests.support.powersgd_steps import Fed, matrix, new_state, noise
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import WRAPPERS, gradients, register

DOCS = Path(__file__).parents[3] / "docs"
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


def batches_of(rank, padding):
    """Three batches of classified inputs; those of rank 1 are small, padded or empty."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for size in [(40, 9, 30), (6, 7, 0)][rank]:
        targets = torch.randint(0, 10, [size], generator=generator)
        targets[: size // 2 * rank] = padding
        batches.append((torch.randn(size, 64, generator=generator), targets))
    return batches


@pytest.mark.parametrize(("name", "tolerance"), [("none", 1e-6), ("int8", 0.015)])
@on_ranks(2)
def test_weighted_loss_gives_the_gradient_of_one_process(name, tolerance):
    """Relative errors; that of int8 is 0.008 for normal numbers (docs/quantization.md)."""
    names = example("weighted_mean")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    alone = copy.deepcopy(model)
    batches = [batches_of(rank, names["PADDING"]) for rank in range(2)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches[0], *batches[1], strict=True))
    loss = nn.functional.cross_entropy(alone(inputs), targets, ignore_index=names["PADDING"])
    loss.backward()

    ddp = gradwire.DistributedDataParallel(model)
    gradwire.attach(ddp, name, **({} if name == "none" else {"start_iter": 0}))
    part = names["backward"](ddp, batches[dist.get_rank()])
    dist.all_reduce(part)
    torch.testing.assert_close(part, loss.detach())
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (parameter.grad - expected.grad).norm() < tolerance * expected.grad.norm()


@on_ranks(2)
def test_error_memory_is_right_when_losses_are_scaled_but_not_when_results_are():
    """Sums over 64 steps of one gradient, weighted by 1 and 3 in turn, minus what error feedback has still to apply."""
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    weights = [1.0, 3.0] * 32
    exact = mean_over_ranks([gradient])[0] * sum(weights)
    distances = {}
    for scaled in ("loss", "result"):
        layer = nn.Linear(64, 64, bias=False)
        ddp = gradwire.DistributedDataParallel(layer)
        gradwire.attach(ddp, "int4", start_iter=0)
        total = torch.zeros(64, 64)
        for weight in weights:
            layer.zero_grad()
            before, after = (weight, 1.0) if scaled == "loss" else (1.0, weight)
            (ddp(torch.eye(64)).T * gradient).sum().mul(before).backward()
            total += layer.weight.grad * after
        distances[scaled] = (total - exact).norm() / exact.norm()
    assert distances["loss"] < 0.005 < 2 * distances["loss"] < distances["result"]


def local_steps(model, differ):
    """Batches for nine steps; ``differ`` gets, for each step, whether the parameters of the ranks differ after it."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(9):
        yield torch.randn(8, 64, generator=generator)
        pairs = zip(*from_all_ranks(list(model.parameters())), strict=True)
        differ.append(any(not torch.equal(*pair) for pair in pairs))


def mean_square(model, batch):
    return model(batch).square().mean()


def linear_training():
    torch.manual_seed(0)
    model = gradwire.DistributedDataParallel(nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@on_ranks(2)
def test_local_sgd_averages_parameters_in_one_of_so_many_steps():
    model, optimizer = linear_training()
    optimizer = example("local_sgd")["post_local_sgd"](model, optimizer, node_size=1, warm_up=2, period=3)
    differ = []
    for batch in local_steps(model, differ):
        mean_square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Two steps of warm-up; then every third one averages, beginning with the first.
    assert differ == [False, False, False, True, True, False, True, True, False]


@on_ranks(2)
def test_local_steps_follow_a_compressed_warm_up_as_documented():
    (_, block) = re.findall(r"```python\n(.*?)```", (DOCS / "local-sgd.md").read_text(), re.DOTALL)
    model, optimizer = linear_training()
    differ = []
    names = {"model": model, "optimizer": optimizer, "loader": local_steps(model, differ), "loss_of": mean_square}
    names |= {"gradwire": gradwire, "PeriodicModelAverager": PeriodicModelAverager, "nullcontext": nullcontext}
    exec(block.replace("period=100", "period=3"), names | {"warm_up": 4})
    assert differ == [False] * 5 + [True, True, False, True]
