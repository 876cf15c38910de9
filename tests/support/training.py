"""A few training steps in either DDP, and the list of hooks that every law is tested with."""

import logging
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

import gradwire
from gradwire.comm import connections_of
from gradwire.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks, scaled_cast_hooks
from gradwire.planner import hook_registry
from gradwire.testing._cases import plainly_named
from tests.support.zoo import MODELS

# The compressor of the guide, by the name under which it is pickled.
_spec = spec_from_file_location("topk_hook", Path(__file__).parents[2] / "examples" / "topk_hook.py")
topk = sys.modules["topk_hook"] = module_from_spec(_spec)
_spec.loader.exec_module(topk)

WRAPPERS = {"pytorch": torch.nn.parallel.DistributedDataParallel, "gradwire": gradwire.DistributedDataParallel}

SMALL = 0.0005  # MiB: several buckets for the models of the zoo
SMALLEST = 0.00001  # MiB: a bucket for every parameter


def _scaled(dtype):
    return lambda group: (scaled_cast_hooks.ScaledCastState(group, dtype=dtype), scaled_cast_hooks.scaled_cast_hook)


def _power_sgd(hook, **options):
    """Compressing from the third step on, the first that a state with error feedback may."""
    options |= {"start_powerSGD_iter": 2, "min_compression_rate": 1}
    return lambda group: (powerSGD_hook.PowerSGDState(group, **options), hook())


def _quantized(wire, on_nodes=False, **options):
    """Quantizing from the third step on; ``on_nodes``: on nodes of two ranks if there are several, else on one node."""
    options = {"block_size": 32} | options

    def make(group):
        if on_nodes and dist.is_initialized():
            size = dist.get_world_size(group)
            options["local_size"] = size if size < 4 or size % 2 else 2
        return quantization_hooks.QuantizationState(group, wire, **options), quantization_hooks.quantization_hook

    return make


# Each makes (state, hook) anew: states remember, and wrappers keep buffers.
HOOKS = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group: (group, default_hooks.bf16_compress_hook),
    "bf16_in_fp32": lambda group: (default_hooks.CastState(group, accumulate="fp32"), default_hooks.bf16_compress_hook),
    "fp16_of_allreduce": lambda group: (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16_of_allreduce": lambda group: (group, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "fp16_of_pytorch": lambda group: (group, default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)),
    "scaled_fp16": _scaled(torch.float16),
    "scaled_bf16": _scaled(torch.bfloat16),
    "int4": _quantized("int4"),
    "int4_on_nodes": _quantized("int4", on_nodes=True),
    "powersgd": _power_sgd(lambda: powerSGD_hook.powerSGD_hook),
    "powersgd_int8": _power_sgd(lambda: powerSGD_hook.powerSGD_hook, factor_wire="int8"),
    "powersgd_alternating": _power_sgd(lambda: powerSGD_hook.powerSGD_hook, alternating=True),
    "fp16_of_powersgd": _power_sgd(lambda: default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
}
HOOKS["topk"] = lambda group: (topk.TopKState(group, density=0.25), topk.topk_hook)


def _of_registry():
    """The hooks of the registry that are not in `HOOKS` with options for small models."""
    # The results of batched_powerSGD_hook depend on the buckets.
    known = {powerSGD_hook.batched_powerSGD_hook, *(make(None)[1] for make in HOOKS.values())}
    averaging = {name: entry for name, entry in hook_registry.HOOKS.items() if name not in ("none", "noop")}
    makers = {name: lambda group, make=entry.make: make(group, 2) for name, entry in averaging.items()}
    return {name: make for name, make in makers.items() if make(None)[1] not in known}


HOOKS |= _of_registry()
NOOP = {"noop": lambda group: (None, debugging_hooks.noop_hook)}


def _gloo_of_one_thread(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


@cache
def one_thread_group():
    """A gloo group of all ranks that works on one collective at a time.

    Two sparse all-reduces at once, as in PyTorch's DDP, corrupt the heap of gloo (docs/log/communication.md).
    """
    dist.Backend.register_backend("gloo_of_one_thread", _gloo_of_one_thread, devices=["cpu"])
    return dist.new_group(backend="gloo_of_one_thread")


def register(model, hook, group=None):
    """Register the hook of that name in `HOOKS`, or a pair of state and hook; returns the state."""
    state, function = (HOOKS | NOOP)[hook](group) if isinstance(hook, str) else hook
    if isinstance(model, gradwire.DistributedDataParallel):
        model.register_comm_hook(state, function)
    else:
        model.register_comm_hook(state, plainly_named(function))
    return state


def sent_bytes():
    """Bytes that this rank has sent on the default group: in tasks of the executor, and in the backward itself."""
    connections, cpu = connections_of(None), torch.device("cpu")
    return connections.executor(cpu).transport.payload_bytes + connections.transport("backward", cpu).payload_bytes


class Fault(Exception):
    """The exception that tests inject."""


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises `Fault`."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Fault("from autograd")


@contextmanager
def failing_hook(ddp, index):
    """Let the hook of one bucket raise `Fault` on this rank, once the results of the buckets before it are there."""
    hook, earlier = ddp.reducer.hook, []

    def failing(state, bucket):
        if bucket.index() == index:
            for future in earlier:
                future.wait()
            raise Fault
        earlier.append(hook.function(state, bucket))
        return earlier[-1]

    with mock.patch.object(ddp.reducer, "hook", hook._replace(function=failing, can_replay=False)):
        yield


class Scaler:
    """A gradient scaler whose scale a test sets."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def get_scale(self):
        return self.scale


@contextmanager
def logged(name="gradwire"):
    """The records that the logger of that name gets from level INFO on, in a list that grows."""
    records, logger, handler = [], logging.getLogger(name), logging.Handler()
    handler.emit = records.append
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def error_of(action, *arguments, **options):
    """(type name, text) of the exception that ``action(*arguments, **options)`` raises; None if it raises none."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def message_of(action, *arguments, **options):
    """The text of the exception that ``action(*arguments, **options)`` raises; None if it raises none."""
    error = error_of(action, *arguments, **options)
    return error and error[1]


def build(model, seed=0):
    """An instance of the zoo's model, equal on all ranks."""
    torch.manual_seed(seed)
    return MODELS[model]()


def gradients(model):
    """Copies of all gradients by parameter name, in their strides; None where there is none."""
    module = getattr(model, "module", model)
    named = module.named_parameters()
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}


def wrapped(wrapper="gradwire", model="mlp", *, hook=None, group=None, seed=0, bucket_cap_mb=SMALL, **options):
    """A DDP around a model (a name of the zoo, or a module), with small buckets and a hook as for `register`."""
    module = build(model, seed) if isinstance(model, str) else model
    ddp = WRAPPERS[wrapper](module, process_group=group, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        register(ddp, hook, group)
    return ddp


def own_batches(seed=0):
    """The generator of this rank's batches."""
    return torch.Generator().manual_seed(1000 * seed + dist.get_rank())


def train_steps(ddp, number=1, generator=None, optimizer=None):
    """The gradients of each of some steps, on this rank's own batches unless a generator is given."""
    generator, seen = generator or own_batches(), []
    for _ in range(number):
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
        seen.append(gradients(ddp))
        if optimizer is not None:
            optimizer.step()
    return seen


@dataclass
class Record:
    """The outcome of a training run: the gradients of every step, and the parameters and buffers at its end."""

    gradients: list
    state: dict


def train(
    wrapper, model, *, hook=None, steps=3, set_to_none=True, accumulate=1, group=None, prepare=None, seed=0, **options
):
    """Train a model (a name of the zoo, or a module) on this rank's own batches; returns a `Record`.

    Without a wrapper, train the bare module. All but the last of ``accumulate`` micro-batches are under ``no_sync``.
    ``prepare`` is called with the module before it is wrapped.
    """
    module = build(model) if isinstance(model, str) else model
    if prepare is not None:
        prepare(module)
    if wrapper == "pytorch" and torch.__version__ < "2.13" and "forward_sync_buffers" in options:
        options["broadcast_buffers"] = options.pop("forward_sync_buffers")  # the name before PyTorch 2.13
    ddp = module if wrapper is None else WRAPPERS[wrapper](module, process_group=group, **options)
    if hook is not None:
        register(ddp, hook, group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    steps_taken = []
    for _ in range(steps):
        if steps_taken or prepare is None:
            optimizer.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(accumulate):
            is_local = wrapper is not None and micro_batch < accumulate - 1
            with ddp.no_sync() if is_local else nullcontext():
                ddp(*module.batch(generator)).backward()
        steps_taken.append(gradients(module))
        optimizer.step()
    return Record(steps_taken, {name: value.clone() for name, value in module.state_dict().items()})
