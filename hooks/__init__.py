"""Communication hooks in PyTorch's shape: the same modules, names and signatures as PyTorch's own.

Each is a plain function for ``model.register_comm_hook(state, hook)``, on PyTorch's DDP and on gradwire's.
"""

from gradwire.hooks import debugging_hooks, default_hooks, powerSGD_hook, scaled_cast_hooks

__all__ = ["debugging_hooks", "default_hooks", "powerSGD_hook", "scaled_cast_hooks"]
