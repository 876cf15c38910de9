"""Random sequences of training steps, and of what a training loop does between them, as plain data.

Hypothesis draws and shrinks a `Sequence`, and every rank runs the same. Its repr, which hypothesis prints for a failing
one, is the call that makes it. tests/support/sequence_training.py runs it; tests/support/sequence_events.py has the
events.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks.default_hooks import (
    CastState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.testing._cases import Parameter
from tests.support.training import SMALLEST, topk

REPLAYS, DDPS, LAWS = "with and without replays", "on both DDPs", "laws"  # modes: what is compared


class Event(NamedTuple):
    """A name in `EVENTS` of tests/support/sequence_events.py, and the value that is drawn for it."""

    name: str
    value: object = None


@dataclass(frozen=True)
class Sequence:
    """A model, its hook and DDP, and what happens.

    Attributes:
        mode: what is compared.
        kind: a name in `HOOKS`.
        options: of the hook.
        wrapper: "gradwire" or "pytorch"; None for both.
        ddp: options of DDP.
        parameters: the parameters, named weights.0.weight and so on.
        tied: indices of parameters that a forward uses twice.
        events: each of them makes a step, or is followed by one.
    """

    mode: str
    kind: str
    options: dict = field(default_factory=dict)
    wrapper: str | None = "gradwire"
    ddp: dict = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = (Parameter((12, 8)), Parameter((5,)))
    tied: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def hook(self):
        return HOOKS[self.kind]

    @property
    def is_ours(self):
        return self.wrapper == "gradwire"

    @property
    def has_bucket_per_parameter(self):
        return self.ddp.get("bucket_cap_mb") == SMALLEST


# --- hooks

SOME = "*.0.weight"  # a pattern that matches a parameter of every model
ALL_RANKS = "all ranks"  # the world size
CAST_OPTIONS = {"accumulate": ["wire", "fp32"], "local_size": ["auto", 1, ALL_RANKS]}
QUANTIZATION_OPTIONS = {
    "wire": ["int4", "int8", "int6", "int2", "sign", "fp8", "bf16", "fp16"],
    "block_size": [32, 64, 128],
    "use_error_feedback": [None, True, False],
    "start_iter": [0, 2, 3, 5],
    "exempt": [(), (SOME,)],
    "wires": [{}, {SOME: "int8"}, {SOME: "fp32"}, {"*": "int4"}],
    "error_dtype": [torch.float32, torch.bfloat16],
    "seed": [0, 1],
    "local_size": ["auto", 1, ALL_RANKS],
}
POWERSGD_OPTIONS = {
    "matrix_approximation_rank": [1, 2, 3, 5],
    "start_powerSGD_iter": [2, 3, 5],
    "min_compression_rate": [1, 1.5, 3],
    "use_error_feedback": [True, False],
    "warm_start": [True, False],
    "orthogonalization_epsilon": [0, 0.1],
    "random_seed": [0, 1],
    "compression_stats_logging_frequency": [1, 3, 10_000],
    "ranks": [{}, {SOME: 0}, {SOME: 3}],
    "factor_dtype": [None, torch.float32, torch.bfloat16],
    "alternating": [False, True],
    "factor_wire": [None, "int8", "bf16"],
}
SCALING_OPTIONS = {
    "dtype": [torch.float16, torch.bfloat16],
    "margin": [4, 6, 9],
    "growth": [1, 2],
    "backoff": [4, 6],
}


class Hook(NamedTuple):
    """A kind of hook.

    Attributes:
        make: state and hook, of a process group and options; None for no hook.
        state_type: type of the state; None for a process group or a user's state.
        values: values of the options, by name.
        precision: largest relative error of the norm of a mean; None if compressed steps are lossy.
        plain_precision: likewise, in plain steps.
        has_memory: whether it may keep errors.
        is_replayed: whether its steps may be replayed on a GPU.
    """

    make: Callable | None
    state_type: type | None = None
    values: dict = {}  # noqa: RUF012
    precision: float | None = None
    plain_precision: float = 0
    has_memory: bool = False
    is_replayed: bool = False


def resolved(options):
    """Options for this world size."""
    size = dist.get_world_size() if dist.is_initialized() else 2
    return {name: size if value == ALL_RANKS else value for name, value in options.items()}


def of_state(hook, state_type, **defaults):
    return lambda group, **options: (state_type(group, **(defaults | resolved(options))), hook)


def of_group(hook):
    return lambda group: (group, hook)


def of_powersgd(hook):
    return of_state(hook, PowerSGDState, start_powerSGD_iter=2, min_compression_rate=1)


def flat_hook(group, bucket):
    """A hook as in PyTorch's documentation."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def two_hooks(group):
    """A user's hook that passes every second bucket to another hook; which ones, ``phase`` decides."""
    state = {"group": group, "state": CastState(group), "phase": 0}

    def hook(state, bucket):
        if (bucket.index() + state["phase"]) % 2:
            return fp16_compress_hook(state["group"], bucket)
        return bf16_compress_hook(state["state"], bucket)

    return state, hook


FP16, BF16 = 2e-3, 2e-2  # precision
HOOKS = {
    "none": Hook(None, precision=0, is_replayed=True),
    "allreduce": Hook(of_group(allreduce_hook), precision=0, is_replayed=True),
    "flat": Hook(of_group(flat_hook), precision=0),
    "fp16": Hook(of_state(fp16_compress_hook, CastState), CastState, CAST_OPTIONS, precision=FP16, is_replayed=True),
    "bf16": Hook(of_state(bf16_compress_hook, CastState), CastState, CAST_OPTIONS, precision=BF16, is_replayed=True),
    "two_hooks": Hook(two_hooks, precision=BF16, is_replayed=True),
    "scaled": Hook(of_state(scaled_cast_hook, ScaledCastState), ScaledCastState, SCALING_OPTIONS, precision=FP16),
    "perchannel": Hook(of_group(quantization_perchannel_hook), is_replayed=True),
    "pertensor": Hook(of_group(quantization_pertensor_hook), is_replayed=True),
    "quantization": Hook(
        of_state(quantization_hook, QuantizationState),
        QuantizationState,
        QUANTIZATION_OPTIONS,
        has_memory=True,
        is_replayed=True,
    ),
    "powersgd": Hook(of_powersgd(powerSGD_hook), PowerSGDState, POWERSGD_OPTIONS, has_memory=True, is_replayed=True),
    "batched_powersgd": Hook(of_powersgd(batched_powerSGD_hook), PowerSGDState, POWERSGD_OPTIONS, has_memory=True),
    "fp16_of_powersgd": Hook(
        of_powersgd(fp16_compress_wrapper(powerSGD_hook)), PowerSGDState, plain_precision=FP16, has_memory=True
    ),
    "topk": Hook(of_state(topk.topk_hook, topk.TopKState), topk.TopKState, {"density": [0.25, 0.5]}, has_memory=True),
}


# --- the model


class Weight(nn.Module):
    """A parameter whose gradient is the input, exactly."""

    def __init__(self, parameter):
        super().__init__()
        self.weight = parameter.new()

    def forward(self, x):
        return (self.weight * x.conj()).sum().real.double()


class Weights(nn.Module):
    """Parameters whose gradients are the inputs, twice those for a tied one. Those whose input is None are unused."""

    def __init__(self, parameters, tied=()):
        super().__init__()
        self.weights = nn.ModuleList(map(Weight, parameters))
        self.tied, self.order = tied, list(range(len(parameters)))

    def forward(self, inputs):
        used = [i for i in self.order if inputs[i] is not None]
        return torch.stack([self.weights[i](inputs[i]) for i in used + [i for i in used if i in self.tied]]).sum()


def gradient_of(parameter, generator):
    """Elements of magnitudes from 1/2 to 2."""
    if parameter.dtype.is_complex:
        real = replace(parameter, dtype=torch.float32)
        return torch.complex(gradient_of(real, generator), gradient_of(real, generator))
    exponents, signs = (torch.rand(parameter.shape, generator=generator) * 2 - 1 for _ in range(2))
    return (exponents.exp2() * signs.sign()).to(parameter.dtype)
