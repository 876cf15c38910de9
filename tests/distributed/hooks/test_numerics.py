"""Law 5 and accuracy: extreme gradients, and error bounds against the exact mean."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import HOOKS, WRAPPERS, gradients, register, train
from tests.support.zoo import Probe

wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def reduce(mine, hook, wrapper="gradwire", steps=1, **options):
    """The gradients after ``steps`` steps in which this rank's are ``mine``, a list of tensors."""
    ddp = WRAPPERS[wrapper](Probe(*(value.shape for value in mine)), **options)
    if hook is not None:
        register(ddp, hook)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*mine).backward()
    return list(gradients(ddp).values())


@wrappers
@pytest.mark.parametrize("hook", [name for name in HOOKS if not name.startswith("fp16_of")])
@on_ranks(2, 3)
def test_law5_representable_mean_survives_an_unrepresentable_gradient(hook, wrapper):
    mine = [torch.tensor([0.0 if dist.get_rank() else 5e4 * dist.get_world_size()])]
    (mean,) = reduce(mine, hook, wrapper)
    assert math.isclose(mean.item(), 5e4, rel_tol=2.0**-8)
    (mean,) = reduce(mine, (None, torch_hooks.fp16_compress_hook), wrapper)
    assert mean.isinf()


def real(tensor):
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer", "complex", "frozen"])
@pytest.mark.parametrize("hook", [None, *HOOKS])
@on_ranks(2, 3)
def test_hooks_are_within_their_error_bound_of_the_exact_mean(hook, model):
    # Each of n contributions is rounded to the wire once, and so is each of the n - 1 sums: n u mean|g| to first order,
    # where u is half a unit in the last place: 2^-11 for fp16, 2^-8 for bf16, 2^-24 for fp32. The wrappers round once
    # more, before the division. Arithmetic in fp32 around it adds two roundings of 2^-24, and the factor 1 / n one
    # where nothing is cast. Below fp16's normal range
    # a contribution is off by up to 2^-25 instead; scaled, by 2^-25 / scale, with scale >= 2^7 / max|g| over all ranks.
    is_cast = hook not in (None, "allreduce")
    roundings = dist.get_world_size() + (is_cast and "_of_" in hook)
    u = 2.0**-24 if not is_cast else 2.0**-8 if "bf16" in hook else 2.0**-11
    reduced = train("gradwire", model, hook=hook, steps=1).gradients[0]
    local = from_all_ranks(train(None, model, steps=1).gradients[0])
    largest = max(real(g).abs().max() for rank in local for g in rank.values() if g is not None)
    floor = {"scaled_fp16": 2.0**-25 * 2.0**-7 * largest}.get(hook, 2.0**-25 if u == 2.0**-11 else 0.0)
    for name, gradient in reduced.items():
        if gradient is None:  # of a frozen parameter
            continue
        ranks = torch.stack([real(gradients_of_rank[name]) for gradients_of_rank in local])
        relative = roundings * u * (1 + 4 * u) + 2.0 ** (-23 if is_cast else -24)
        bound = relative * ranks.abs().mean(0) + roundings * floor
        assert ((real(gradient) - ranks.mean(0)).abs() <= bound).all(), name
