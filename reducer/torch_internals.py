"""Every private name of PyTorch that the reducer needs, so that a new PyTorch can break one file only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        _DEFAULT_FIRST_BUCKET_BYTES,
        BuiltinCommHookType,
        DebugLevel,
        _compute_bucket_assignment_by_size,
        get_debug_level,
    )
else:
    from torch.distributed import (
        _DEFAULT_FIRST_BUCKET_BYTES,
        BuiltinCommHookType,
        DebugLevel,
        _compute_bucket_assignment_by_size,
        get_debug_level,
    )

__all__ = [
    "DEFAULT_FIRST_BUCKET_BYTES",
    "GLOO_THREADS",
    "BuiltinCommHookType",
    "assign_buckets",
    "gradient_node",
    "is_debugging",
    "is_future",
    "optimizer_hooks",
    "queue_callback",
    "tensors_in",
    "uses_python_reducer",
]

DEFAULT_FIRST_BUCKET_BYTES: int = _DEFAULT_FIRST_BUCKET_BYTES
GLOO_THREADS = 2  # of a process group, as PyTorch makes it


def gradient_node(tensor: Tensor) -> Node:
    """The autograd node that takes the tensor's gradient: for a parameter the one that adds to its ``.grad``.

    That one lives only as long as somebody holds it.
    """
    return get_gradient_edge(tensor).node


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs now has come to its end."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def assign_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], sparse: Sequence[bool], indices: Sequence[int] = ()
) -> list[list[int]]:
    """PyTorch's own assignment by dtype, device and size; a sparse gradient has a bucket of its own.

    ``indices`` names the tensors, by position without it; ``sparse`` is looked up under these names.
    """
    buckets, _ = _compute_bucket_assignment_by_size(list(tensors), list(limits), list(sparse), list(indices))
    return buckets


def optimizer_hooks() -> Mapping[Tensor, Sequence[RemovableHandle]]:
    """The hooks by which ``apply_optimizer_in_backward`` steps the optimizers of each parameter."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    handles: Mapping[Tensor, Sequence[RemovableHandle]] = param_to_optim_hook_handle_map
    return handles


def tensors_in(output: object) -> list[Tensor]:
    """The tensors in what a forward returned: in lists, tuples, dictionaries and dataclasses."""
    return list(_find_tensors(output))


def uses_python_reducer() -> bool:
    """Whether torch.compile was told to replace DDP's reducer by its own."""
    return torch._dynamo.config.optimize_ddp == "python_reducer"


def is_future(value: object) -> bool:
    """Whether ``value`` is a future of PyTorch's; ``Future.then`` returns one of the class under the public one."""
    return isinstance(value, torch._C.Future)


def is_debugging() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for details."""
    return get_debug_level() != DebugLevel.OFF
