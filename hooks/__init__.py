"""DDP communication hooks with the modules, names and signatures of ``torch.distributed.algorithms.ddp_comm_hooks``.

Register a hook with ``model.register_comm_hook(state, hook)``, on PyTorch's DDP or gradwire's. `HookState` and
`hook_for` make a hook of your own.
"""

from gradwire.exchange.hook_state import BucketMemory, HookSettings, HookState, Memory, Step, hook_for
from gradwire.exchange.telemetry import to_jsonl, to_tensorboard, to_wandb
from gradwire.hooks import (
    by_name,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
    scaled_cast_hooks,
)

__all__ = [
    "BucketMemory",
    "HookSettings",
    "HookState",
    "Memory",
    "Step",
    "by_name",
    "debugging_hooks",
    "default_hooks",
    "hook_for",
    "powerSGD_hook",
    "quantization_hooks",
    "scaled_cast_hooks",
    "to_jsonl",
    "to_tensorboard",
    "to_wandb",
]

for _module in (by_name, debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks, scaled_cast_hooks):
    vars(_module)["__dir__"] = _module.__all__.copy  # tab completion shows the public names
