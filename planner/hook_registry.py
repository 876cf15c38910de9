"""The hooks that `gradwire advise`, the demo and the benchmarks compare. To add a hook to all of them, add an entry."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks

from gradwire.hooks._decorators import CommHook
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import CastState, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.kernels import WIRE_FORMATS

FIRST_COMPRESSED = 2  # of measurements: the step from which on the buckets are final
DEFAULT_CAP_MB = 25  # bucket size of DistributedDataParallel, in MiB

Registration = tuple[Any, CommHook]
Make = Callable[[dist.ProcessGroup | None, int], Registration | None]


@dataclass(frozen=True, kw_only=True)
class PyTorchHook:
    """PyTorch's hook for the same purpose."""

    make: Make  # see `HookEntry`
    is_same: bool = True  # whether PyTorch has the same hook with the same options; False for a similar hook
    wire: torch.dtype | None = None  # the wire dtype if the hook only casts and gradwire's does not
    # whether it needs the whole model in one bucket on gloo: callbacks chain its collectives, in an order that
    # differs between ranks if there are several buckets
    one_bucket: bool = False
    requires: str | None = None  # a package that it imports

    def is_available(self) -> bool:
        return self.requires is None or find_spec(self.requires) is not None


@dataclass(frozen=True, kw_only=True)
class HookEntry:
    """A hook of gradwire."""

    description: str  # the payload, in a few words
    # takes the process group of the model and the first step to compress; returns the arguments of
    # ``register_comm_hook``, or None to register no hook
    make: Make
    code: str = ""  # the lines of a program that register the hook on ``model``; empty to register no hook
    wire: torch.dtype | None = None  # the wire dtype of hooks that only cast
    below_16_bits: bool = False  # whether it sends fewer than 16 bits per element, and the first steps uncompressed
    by_bucket: bool = False  # whether the payload depends on the bucket as a whole, and not on its gradients
    pytorch: PyTorchHook  # PyTorch's hook, or the closest that it has, for comparison in the benchmarks


_BF16_ON_CPUS = (
    "# On CPUs, PyTorch's DistributedDataParallel refuses bf16 hooks; gradwire.DistributedDataParallel takes them.\n"
)


def _code(hook: CommHook, state: str = "None") -> str:
    """The lines that register a hook; ``state`` is an expression that calls a class of the hook's module, or None."""
    comment = _BF16_ON_CPUS if hook is bf16_compress_hook else ""
    if state == "None":
        return (
            f"{comment}from {hook.__module__} import {hook.__name__}\n\nmodel.register_comm_hook(None, {hook.__name__})"
        )
    return (
        f"{comment}from {hook.__module__} import {state.partition('(')[0]}, {hook.__name__}\n\n"
        f"state = {state}\nmodel.register_comm_hook(state, {hook.__name__})"
    )


def _plain(description: str, ours: CommHook | None, theirs: CommHook | None, wire: torch.dtype | None) -> HookEntry:
    """A hook without options, whose state is the process group."""

    def maker(hook: CommHook | None) -> Make:
        return lambda group, start: None if hook is None else (group, hook)

    return HookEntry(
        description=description,
        make=maker(ours),
        code=_code(ours) if ours is not None else "",
        wire=wire,
        pytorch=PyTorchHook(make=maker(theirs)),
    )


def _low_rank(
    rank: int, description: str, hook: CommHook = powerSGD_hook, *, is_same: bool = True, **options: Any
) -> HookEntry:
    """A hook of the PowerSGD family, compared with PyTorch's `powerSGD_hook` of the same rank."""
    arguments = "".join(f", {name}={value!r}" for name, value in options.items()).replace("'", '"')

    def make_pytorchs(group: dist.ProcessGroup | None, start: int) -> Registration:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

        return torch_powersgd.PowerSGDState(group, rank, start), torch_powersgd.powerSGD_hook

    return HookEntry(
        description=description,
        make=lambda group, start: (PowerSGDState(group, rank, start, **options), hook),
        code="# Compresses from the third step on. Raise start_powerSGD_iter to the warm-up of your learning rate.\n"
        + _code(hook, f"PowerSGDState(None, matrix_approximation_rank={rank}, start_powerSGD_iter=2{arguments})"),
        below_16_bits=True,
        by_bucket=hook is batched_powerSGD_hook,
        pytorch=PyTorchHook(make=make_pytorchs, is_same=is_same, one_bucket=True, requires="numpy"),
    )


def _quantized(wire: str) -> HookEntry:
    """`quantization_hook`, and PyTorch's fp16 hook: its quantization hooks raise an IndexError on gloo."""
    bits = 8 * WIRE_FORMATS[wire].block_bytes(64) / 64
    return HookEntry(
        description=f"gradients in {bits} bits per element, with a scale per 64 elements",
        make=lambda group, start: (QuantizationState(group, wire, start_iter=start), quantization_hook),
        code=_code(quantization_hook, f"QuantizationState(None, {wire!r})".replace("'", '"')),
        below_16_bits=True,
        pytorch=PyTorchHook(
            make=lambda group, start: (group, torch_default_hooks.fp16_compress_hook),
            is_same=False,
            wire=torch.float16,
        ),
    )


# Wire formats with scales by the hook that sends them.
QUANTIZED = {"fp8" if name == "fp8_e4m3" else name: name for name, wire in WIRE_FORMATS.items() if wire.is_scaled}

HOOKS: dict[str, HookEntry] = {
    "none": _plain("no hook, gradients in fp32", None, None, torch.float32),
    "noop": _plain("nothing", noop_hook, torch_debugging_hooks.noop_hook, None),
    "allreduce": _plain("gradients in fp32", allreduce_hook, torch_default_hooks.allreduce_hook, torch.float32),
    "fp16": _plain("gradients in fp16", fp16_compress_hook, torch_default_hooks.fp16_compress_hook, torch.float16),
    "bf16": _plain("gradients in bf16", bf16_compress_hook, torch_default_hooks.bf16_compress_hook, torch.bfloat16),
    "scaled-fp16": HookEntry(
        description="gradients in fp16, times a power of two per bucket",
        make=lambda group, start: (ScaledCastState(group), scaled_cast_hook),
        code=_code(scaled_cast_hook, "ScaledCastState()"),
        wire=torch.float16,
        pytorch=PyTorchHook(make=lambda group, _: (group, torch_default_hooks.fp16_compress_hook), is_same=False),
    ),
    "bf16-fp32-sum": HookEntry(
        description="gradients in bf16, summed in fp32",
        make=lambda group, start: (CastState(group, accumulate="fp32"), bf16_compress_hook),
        code=_code(bf16_compress_hook, 'CastState(accumulate="fp32")'),
        wire=torch.bfloat16,
        pytorch=PyTorchHook(make=lambda group, _: (group, torch_default_hooks.bf16_compress_hook), is_same=False),
    ),
    **{hook: _quantized(wire) for hook, wire in QUANTIZED.items()},
    "powersgd-r1": _low_rank(1, "factors of rank 1"),
    "powersgd-r4": _low_rank(4, "factors of rank 4"),
    "powersgd-r16": _low_rank(16, "factors of rank 16"),
    "powersgd-r32": _low_rank(32, "factors of rank 32"),
    "powersgd-r8-int8": _low_rank(8, "factors of rank 8 in 8 bit", is_same=False, factor_wire="int8"),
    "powersgd-r16-int8": _low_rank(16, "factors of rank 16 in 8 bit", is_same=False, factor_wire="int8"),
    "powersgd-r4-bf16": _low_rank(4, "factors of rank 4 in bf16", is_same=False, factor_dtype=torch.bfloat16),
    "powersgd-r4-alternating": _low_rank(4, "one factor of rank 4 per step", is_same=False, alternating=True),
    # Not compared with PyTorch's batched_powerSGD_hook: in torch 2.13 it raises an AssertionError at its
    # first compressed step, because it passes a 2-D factor to a function for 3-D ones.
    "powersgd-r4-batched": _low_rank(4, "factors of rank 4 of the flat bucket", batched_powerSGD_hook, is_same=False),
}

# The hooks that average gradients: with noop, ranks drift apart.
COMPARABLE = {name: entry for name, entry in HOOKS.items() if name != "noop"}

DEMO_HOOKS = ("none", "fp16", "int8", "int4", "powersgd-r4")
PLAIN, CAST = "none", "bf16"  # baselines of every hook

# Footnote of tables and plots that mark hooks by `label`.
STAR_NOTE = "*: PyTorch has no such hook, or one that fails; its closest hook runs instead"


def bucket_cap_mb(hook: str) -> int:
    """The bucket size of gradwire's DDP with a hook, in MiB: that which the hook's state prefers, or the default."""
    registration = HOOKS[hook].make(None, FIRST_COMPRESSED)
    state = None if registration is None else registration[0]
    preferred: int | None = getattr(state, "preferred_bucket_cap_mb", None)
    return preferred or DEFAULT_CAP_MB


def display_name(hook: str) -> str:
    """The name of a hook in tables and plots of gradwire's hooks."""
    return "no hook" if hook == "none" else hook


def label(hook: str) -> str:
    """The hook's name in comparisons, with a star if PyTorch only has a similar one."""
    is_same = hook not in HOOKS or HOOKS[hook].pytorch.is_same
    return f"{display_name(hook)}{'' if is_same else ' *'}"
