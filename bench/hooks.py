"""The hooks that the demo and the benches compare. A new one needs an entry here and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradwire.hooks._types import CommHook
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook

Registration = tuple[Any, CommHook]
Make = Callable[[dist.ProcessGroup, int], Registration | None]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """PyTorch's hook for the same purpose.

    Attributes:
        name: how a table calls it.
        make: as in `HookEntry`.
        is_same: whether it has the same name and options, or is the nearest that PyTorch has.
        one_bucket: whether it runs on gloo only if the model is one bucket: its collectives are chained by callbacks,
            whose order over several buckets differs from rank to rank.
    """

    name: str
    make: Make
    is_same: bool = True
    one_bucket: bool = False


@dataclass(frozen=True, kw_only=True)
class HookEntry:
    """A hook of gradwire.

    Attributes:
        description: what it sends, in a few words.
        make: takes the process group of the model and the first step that is compressed, for hooks that begin later,
            and returns the arguments of ``register_comm_hook``, or None to register no hook.
        wire: the dtype that gradients are rounded to, if that is all that happens to them.
        rank: of the factors, for hooks with low rank and error feedback.
        peer: PyTorch's.
    """

    description: str
    make: Make
    wire: torch.dtype | None = None
    rank: int | None = None
    peer: Peer | None = None


def _plain(description: str, ours: CommHook | None, theirs: CommHook | None, wire: torch.dtype | None) -> HookEntry:
    """A hook without options, whose state is the process group."""

    def maker(hook: CommHook | None) -> Make:
        return lambda group, start: None if hook is None else (group, hook)

    name = theirs.__name__ if theirs is not None else "no hook"
    return HookEntry(description=description, make=maker(ours), wire=wire, peer=Peer(name=name, make=maker(theirs)))


def _low_rank(
    rank: int, description: str, hook: CommHook = powerSGD_hook, *, is_same: bool = True, **options: Any
) -> HookEntry:
    """A hook of the PowerSGD family, beside PyTorch's `powerSGD_hook` of that rank."""
    return HookEntry(
        description=description,
        make=lambda group, start: (PowerSGDState(group, rank, start, **options), hook),
        rank=rank,
        peer=Peer(
            name="powerSGD_hook",
            make=lambda group, start: (torch_powersgd.PowerSGDState(group, rank, start), torch_powersgd.powerSGD_hook),
            is_same=is_same,
            one_bucket=True,
        ),
    )


HOOKS: dict[str, HookEntry] = {
    "none": _plain("no hook: gradients in fp32", None, None, torch.float32),
    "noop": _plain("nothing", noop_hook, torch_debugging_hooks.noop_hook, None),
    "allreduce": _plain("gradients in fp32", allreduce_hook, torch_default_hooks.allreduce_hook, torch.float32),
    "fp16": _plain("gradients in fp16", fp16_compress_hook, torch_default_hooks.fp16_compress_hook, torch.float16),
    "bf16": _plain("gradients in bf16", bf16_compress_hook, torch_default_hooks.bf16_compress_hook, torch.bfloat16),
    "scaled-fp16": HookEntry(
        description="gradients in fp16, scaled by a power of two per bucket",
        make=lambda group, start: (ScaledCastState(group), scaled_cast_hook),
        wire=torch.float16,
        peer=Peer(
            name="fp16_compress_hook",
            make=lambda group, start: (group, torch_default_hooks.fp16_compress_hook),
            is_same=False,
        ),
    ),
    "powersgd-r1": _low_rank(1, "factors of rank 1"),
    "powersgd-r4": _low_rank(4, "factors of rank 4"),
    "powersgd-r16": _low_rank(16, "factors of rank 16"),
    "powersgd-r32": _low_rank(32, "factors of rank 32"),
    "powersgd-r4-bf16": _low_rank(4, "factors of rank 4 in bf16", is_same=False, factor_dtype=torch.bfloat16),
    "powersgd-r4-alternating": _low_rank(4, "one factor of rank 4 a step", is_same=False, alternating=True),
    # PyTorch's batched_powerSGD_hook is no peer: in torch 2.13 it ends with an AssertionError at its first compressed
    # step, because it hands a 2-D factor to an orthogonaliser of 3-D ones.
    "powersgd-r4-batched": _low_rank(4, "factors of rank 4 of the flat bucket", batched_powerSGD_hook, is_same=False),
}

DEMO_HOOKS = ("none", "fp16", "bf16", "scaled-fp16", "powersgd-r4", "powersgd-r4-bf16")


def star(hook: str) -> str:
    """What marks a hook's name where PyTorch's is only the nearest that it has."""
    peer = HOOKS[hook].peer
    return "" if peer is None or peer.is_same else " *"
