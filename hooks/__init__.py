"""Communication hooks in PyTorch's shape: the same modules, names and signatures as PyTorch's own.

Each is a plain function for ``model.register_comm_hook(state, hook)``, on PyTorch's DDP and on gradwire's.
"""
