"""The hooks that `gradwire advise`, the demo and the benchmarks compare. To add a hook to all of them, add an entry."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks

from gradwire.exchange.decorators import CommHook
from gradwire.hooks.by_name import QUANTIZED, hook_named
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import bf16_compress_hook
from gradwire.hooks.powerSGD_hook import batched_powerSGD_hook
from gradwire.kernels import WIRE_FORMATS

RANKS = (1, 4, 16, 32)  # of PowerSGD with factors in fp32
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


def _code(name: str, options: str = "", comment: str = "") -> str:
    """The lines that compress the gradients of ``model`` with a hook."""
    comment += _BF16_ON_CPUS if hook_named(name).hook is bf16_compress_hook else ""
    return f'{comment}import gradwire\n\ngradwire.attach(model, "{name}"{options})'


def _plain(hook: CommHook | None) -> Make:
    """Makes the registration of a hook without options, whose state is the process group; of none for None."""
    return lambda group, start: None if hook is None else (group, hook)


def _cast(name: str, description: str, theirs: CommHook, wire: torch.dtype, *, is_same: bool = True) -> HookEntry:
    """A hook that only casts."""
    return HookEntry(
        description=description,
        make=hook_named(name).registration,
        code=_code(name),
        wire=wire,
        pytorch=PyTorchHook(make=_plain(theirs), is_same=is_same),
    )


def _low_rank(name: str, description: str, *, is_same: bool = False) -> HookEntry:
    """A hook of the PowerSGD family, compared with PyTorch's `powerSGD_hook` of the same rank."""
    named = hook_named(name)

    def make_pytorchs(group: dist.ProcessGroup | None, start: int) -> Registration:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

        rank = named.options["matrix_approximation_rank"]
        return torch_powersgd.PowerSGDState(group, rank, start), torch_powersgd.powerSGD_hook

    return HookEntry(
        description=description,
        make=named.registration,
        code=_code(
            name,
            ", start_powerSGD_iter=2",
            "# Compresses from the third step on. Raise start_powerSGD_iter to the warm-up of your learning rate.\n",
        ),
        below_16_bits=True,
        by_bucket=named.hook is batched_powerSGD_hook,
        pytorch=PyTorchHook(make=make_pytorchs, is_same=is_same, one_bucket=True, requires="numpy"),
    )


def _quantized(name: str) -> HookEntry:
    """`quantization_hook`, and PyTorch's fp16 hook: its quantization hooks raise an IndexError on gloo."""
    named = hook_named(name)
    bits = 8 * WIRE_FORMATS[named.options["wire"]].block_bytes(64) / 64
    return HookEntry(
        description=f"gradients in {bits} bits per element, with a scale per 64 elements",
        make=named.registration,
        code=_code(name),
        below_16_bits=True,
        pytorch=PyTorchHook(make=_plain(torch_default_hooks.fp16_compress_hook), is_same=False, wire=torch.float16),
    )


def _uncompressed(description: str, ours: CommHook | None, theirs: CommHook | None) -> HookEntry:
    wire = torch.float32 if ours is None else None
    return HookEntry(description=description, make=_plain(ours), wire=wire, pytorch=PyTorchHook(make=_plain(theirs)))


_FP16, _BF16 = torch_default_hooks.fp16_compress_hook, torch_default_hooks.bf16_compress_hook
HOOKS: dict[str, HookEntry] = {
    "none": _uncompressed("no hook, gradients in fp32", None, None),
    "noop": _uncompressed("nothing", noop_hook, torch_debugging_hooks.noop_hook),
    "allreduce": _cast("allreduce", "gradients in fp32", torch_default_hooks.allreduce_hook, torch.float32),
    "fp16": _cast("fp16", "gradients in fp16", _FP16, torch.float16),
    "bf16": _cast("bf16", "gradients in bf16", _BF16, torch.bfloat16),
    "scaled-fp16": _cast(
        "scaled-fp16", "gradients in fp16, times a power of two per bucket", _FP16, torch.float16, is_same=False
    ),
    "bf16-fp32-sum": _cast("bf16-fp32-sum", "gradients in bf16, summed in fp32", _BF16, torch.bfloat16, is_same=False),
    **{name: _quantized(name) for name in QUANTIZED},
    **{f"powersgd-r{rank}": _low_rank(f"powersgd-r{rank}", f"factors of rank {rank}", is_same=True) for rank in RANKS},
    **{
        f"powersgd-r{rank}-int8": _low_rank(f"powersgd-r{rank}-int8", f"factors of rank {rank} in 8 bit")
        for rank in (8, 16, 32)
    },
    "powersgd-r4-bf16": _low_rank("powersgd-r4-bf16", "factors of rank 4 in bf16"),
    "powersgd-r4-alternating": _low_rank("powersgd-r4-alternating", "one factor of rank 4 per step"),
    # Not compared with PyTorch's batched_powerSGD_hook: in torch 2.13 it raises an AssertionError at its
    # first compressed step, because it passes a 2-D factor to a function for 3-D ones.
    "powersgd-r4-batched": _low_rank("powersgd-r4-batched", "factors of rank 4 of the flat bucket"),
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
