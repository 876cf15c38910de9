"""Helpers for the tests of `PowerSGDState` checkpoints."""

import io

import torch
from torch.utils._pytree import tree_leaves

from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.support.training import build, train

EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
# Half an ulp.
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
CUT, TOTAL = 6, 10
# In half ulps. A gradient is sums over at most 31 units and 12 samples in each of 4 layers and back, and PowerSGD adds
# three products over at most 31 terms: about 8 * 31 + 3 * 31 < 400 roundings. A step adds its own to those that the
# parameters, the error and the factors bring from the step before, and a column of P loses |M| |q| / |M q| < 10 more.
TOLERANCE = 400 * 10 * (TOTAL - CUT)


def save_and_load(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def own_memory(state):
    """The memory of this rank: errors that are not averaged, and factors."""
    return state.__getstate__()["memory"]


def trained(wrapper, model="mlp", *, state=None, steps=5, hook=powerSGD_hook, options=None, **ddp_options):
    """A state after some steps, on this rank's own batches."""
    module = build(model)
    state = PowerSGDState(None, **(EARLY | (options or {}))) if state is None else state
    train(wrapper, module, hook=(state, hook), steps=steps, **ddp_options)
    return state, module


VARIANTS = {
    "plain": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "no feedback": {"use_error_feedback": False},
    "cold": {"warm_start": False},
    "alternating": {"alternating": True},
    "bf16 factors": {"factor_dtype": torch.bfloat16},
}


def relative_deviation(steps, expected):
    """Of all gradients of a step together, the largest of the steps."""
    worst = 0.0
    for step, other in zip(steps, expected, strict=True):
        flat = [torch.cat([gradient.double().flatten() for gradient in tree_leaves(s)]) for s in (step, other)]
        worst = max(worst, ((flat[0] - flat[1]).norm() / flat[1].norm()).item())
    return worst
