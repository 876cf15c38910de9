"""DDP communication hooks with the modules, names and signatures of ``torch.distributed.algorithms.ddp_comm_hooks``.

Register a hook with ``model.register_comm_hook(state, hook)``, on PyTorch's DDP or gradwire's.
"""

from gradwire.hooks import (
    debugging_hooks,
    default_hooks,
    hook_state,
    powerSGD_hook,
    quantization_hooks,
    scaled_cast_hooks,
    telemetry,
)

__all__ = [
    "debugging_hooks",
    "default_hooks",
    "hook_state",
    "powerSGD_hook",
    "quantization_hooks",
    "scaled_cast_hooks",
    "telemetry",
]

for _name in __all__:  # tab completion shows the public names
    _module = globals()[_name]
    vars(_module)["__dir__"] = _module.__all__.copy
