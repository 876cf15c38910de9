"""Steps of PowerSGD on chosen gradients, with what the state remembers after each."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks import default_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.training import WRAPPERS, gradients, register

START = 2  # the first compressed step, as early as a state with error feedback allows
U = 2.0**-24
NEARLY_ONE = 1 + 2.0**-20  # for the second-order terms of bounds


VARIANTS = {
    "plain": {},
    "alternating": {"alternating": True},
    "cold": {"warm_start": False},
    "no_feedback": {"use_error_feedback": False},
    "int8_factors": {"factor_wire": "int8"},
}

HOOKS = {
    "powersgd": lambda: powerSGD_hook,
    "batched": lambda: batched_powerSGD_hook,
    "fp16_of_powersgd": lambda: default_hooks.fp16_compress_wrapper(powerSGD_hook),
    "bf16_of_powersgd": lambda: default_hooks.bf16_compress_wrapper(powerSGD_hook),
}


class Fed(nn.Module):
    """Parameters whose gradients are the inputs, exactly, in their dtypes and strides."""

    def __init__(self, likes):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(like) for like in likes)

    def forward(self, *inputs):
        products = [(weight * x.conj()).sum() for weight, x in zip(self.weights, inputs, strict=True)]
        return sum(product.real.double() for product in products)


@dataclass
class Step:
    """The outcome of a step: reduced gradients by parameter, and the state's memory by name where it was asked for."""

    gradients: list
    errors: dict
    q: dict
    p: dict


def new_state(**options):
    options = {"start_powerSGD_iter": START, "min_compression_rate": 1} | options
    return PowerSGDState(None, **options)


def run_steps(
    values, hook="powersgd", wrapper="gradwire", options=None, changes=None, load=None, remember=False, **ddp_options
):
    """One step for each of ``values``, whose gradient on rank r is the list of tensors ``values[step][r]``.

    Args:
        values: the gradients, or the arguments of `noise`, which is faster than to send them.
        hook: a name of `HOOKS`.
        wrapper: a name of `WRAPPERS`.
        options: options of the state.
        changes: attributes of the state that are set before a step, by step.
        load: what the state loads first.
        remember: whether to return the state's memory too.
        ddp_options: arguments of the wrapper's constructor.
    """
    values = noise(**values) if isinstance(values, dict) else values
    mine = [ranks[dist.get_rank()] for ranks in values]
    ddp = WRAPPERS[wrapper](Fed(mine[0]), **ddp_options)
    state = register(ddp, (new_state(**(options or {})), HOOKS[hook]()))
    if load is not None:
        state.load_state_dict(load)
    steps = []
    for step, tensors in enumerate(mine):
        for name, value in (changes or {}).get(step, {}).items():
            setattr(state, name, value)
        ddp.zero_grad()
        ddp(*tensors).backward()
        reduced = list(gradients(ddp).values())
        memory = [state.memory.tensors(entry) for entry in state.memory.declared] if remember else ({}, {}, {})
        steps.append(Step(reduced, *({name: tensor.clone() for name, tensor in kind.items()} for kind in memory)))
    return steps


def noise(world_size, steps, shapes, dtype=torch.float32, scale=1.0):
    """Random gradients: a part that stays and a part that is new in each step, different on every rank.

    They have 8 significant bits and ordinary magnitudes, so that they are exact in every dtype.
    """
    generator = torch.Generator().manual_seed(0)

    def draw():
        return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(world_size)]

    constant = draw()
    return [
        [
            [((c + x / 2).bfloat16() * scale).to(dtype) for c, x in zip(*rank, strict=True)]
            for rank in zip(constant, draw(), strict=True)
        ]
        for _ in range(steps)
    ]


def matrix(tensor):
    return tensor.reshape(tensor.shape[0], -1).double()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The oracle's matrices are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
