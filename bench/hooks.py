"""The hooks that the demo compares. A new one needs an entry here and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradwire.hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.hooks.types import CommHook

Registration = tuple[Any, CommHook]


@dataclass(frozen=True)
class HookEntry:
    """A hook as the demo offers it.

    Attributes:
        description: what it sends, in a few words.
        make: takes the process group of the model and returns the arguments of its ``register_comm_hook``, or None
            to register no hook.
    """

    description: str
    make: Callable[[dist.ProcessGroup], Registration | None]


HOOKS: dict[str, HookEntry] = {
    "none": HookEntry("no hook: gradients in fp32", lambda group: None),
    "fp16": HookEntry("gradients in fp16", lambda group: (group, fp16_compress_hook)),
    "bf16": HookEntry("gradients in bf16", lambda group: (group, bf16_compress_hook)),
    "scaled-fp16": HookEntry(
        "gradients in fp16, scaled by a power of two per bucket",
        lambda group: (ScaledCastState(group), scaled_cast_hook),
    ),
}
