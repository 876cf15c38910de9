"""DDP communication hooks: modules, names and signatures as in ``torch.distributed.algorithms.ddp_comm_hooks``.

Each hook is a function for ``model.register_comm_hook(state, hook)``, on PyTorch's DDP and on gradwire's.
"""

from gradwire.hooks import (
    auto_hook,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
    scaled_cast_hooks,
    telemetry,
)

__all__ = [
    "auto_hook",
    "debugging_hooks",
    "default_hooks",
    "powerSGD_hook",
    "quantization_hooks",
    "scaled_cast_hooks",
    "telemetry",
]
