"""Loops of other projects on `gradwire.collectives`: bits of the plain loops, exact means, errors on one rank."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from gradwire import collectives
from gradwire.bench import loops
from gradwire.bench.loops import LOOPS, DistributedMuon
from gradwire.bench.tasks import Gpt
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks, summed

MATRIX = "layers.1.linear1.weight"
# Three matrices of each shape: parts of unequal size, and on four ranks one without a matrix.
LAYERS = 3
WITH_WIRE = ("each", "all", "muon")  # a compressed group, in "zero", has neither fp32 nor memory
LARGEST_ERRORS = {"int8": 1.5e-2, "int4": 0.2}


def make_model():
    torch.manual_seed(0)
    return Gpt(layers=LAYERS, width=16, length=8)


def loss_on(step):
    """The loss on this rank's batch of a step."""
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(256, (2, 9), generator=draw)

    def loss(model):
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def trained(loop, wire, steps, prepare=lambda model: None):
    """The parameters after a training of so many steps, and the loop."""
    model = make_model()
    prepare(model)
    with mock.patch.object(loops, "compressed_group", partial(collectives.compressed_group, min_numel=256)):
        made = LOOPS[loop](model, wire)
    for step in range(steps):
        made.step(loss_on(step))
    return parameters_of(model), made


def parameters_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def exactly_summable(model):
    """Round gradients to multiples of 2^-20, so that fp32 sums of them are exact in any order."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: (gradient * 2**20).round() / 2**20)


@pytest.mark.parametrize("loop", WITH_WIRE)
@on_ranks(2, 4)
def test_loop_in_full_precision_has_the_bits_of_the_plain_loop(loop):
    plain, _ = trained(loop, None, 4, exactly_summable)
    found, _ = trained(loop, "fp32", 4, exactly_summable)
    assert_same_bits(found, plain)
    assert_same_on_all_ranks(from_all_ranks(found))


@pytest.mark.parametrize(
    ("loop", "wire"),
    [*((loop, wire) for loop in LOOPS for wire in (None, "int8")), *((loop, "int4") for loop in WITH_WIRE)],
)
@on_ranks(2, 4)
def test_optimizers_of_a_loop_use_the_mean_gradients(loop, wire):
    model = make_model()
    loss_on(0)(model).backward()
    exact = {name: summed(p.grad) / dist.get_world_size() for name, p in model.named_parameters()}
    parameters, made = trained(loop, wire, 1)
    means = made.means()
    assert set().union(*from_all_ranks(set(means))) == set(exact)
    found, mean = (parameters_to_vector([each[name] for name in means]) for each in (means, exact))
    assert (found - mean).norm() <= LARGEST_ERRORS.get(wire, 1e-5) * mean.norm()
    assert_same_on_all_ranks(from_all_ranks(parameters))


@on_ranks(2, 4)
def test_distributed_muon_steps_like_pytorchs_muon_on_mean_gradients():
    draw = torch.Generator().manual_seed(0)
    shapes = [(24, 16), (16, 24), (24, 16), (24, 16)]
    initial = [torch.randn(shape, generator=draw) for shape in shapes]
    own, reference = ([nn.Parameter(matrix.clone()) for matrix in initial] for _ in range(2))
    optimizer = DistributedMuon(own, None, None)
    expected = torch.optim.Muon(reference, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        draw.manual_seed(1 + 10 * step + dist.get_rank())
        for parameter, other in zip(own, reference, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            other.grad = (summed(parameter.grad) / dist.get_world_size()).float()
        optimizer.step()
        expected.step()
    for parameter, other, before in zip(own, reference, initial, strict=True):
        # PyTorch's iterates in bf16.
        assert (parameter - other).norm() < 0.1 * (other - before).norm()


def failing(problem, loop, step):
    """A step that fails on rank 1: in its loss, or because the gradient of a matrix is sparse."""
    loss = loss_on(step)
    if dist.get_rank() != 1:
        return loop.step(loss)
    if problem == "loss":

        def loss(model):
            raise ValueError("no batch")

        return loop.step(loss)
    matrix = dict(loop.model.named_parameters())[MATRIX]
    handle = matrix.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse()))
    try:
        loop.step(loss)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("loop", "wire", "problem"),
    [
        *((loop, "int8", "loss") for loop in LOOPS),
        *((loop, wire, "sparse") for loop in WITH_WIRE for wire in ("int8", "int4")),
    ],
)
@on_ranks(2, 4)
def test_error_on_one_rank_raises_on_all_and_training_goes_on(loop, wire, problem):
    expected, _ = trained(loop, wire, 4)
    before, made = trained(loop, wire, 2)
    memories = [made.memory] if wire == "int4" else []
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        failing(problem, made, 2)
    model = made.model.module if loop == "zero" else made.model
    assert_same_bits(parameters_of(model), before)
    collectives.resynchronize(None, *memories)
    for step in (2, 3):
        made.step(loss_on(step))
    found = parameters_of(model)
    assert_same_on_all_ranks(from_all_ranks(found))
    if wire == "int8":
        assert_same_bits(found, expected)
