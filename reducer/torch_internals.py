"""Every private name of PyTorch that the reducer needs, so that a new PyTorch can break one file only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        _DEFAULT_FIRST_BUCKET_BYTES,
        BuiltinCommHookType,
        _compute_bucket_assignment_by_size,
    )
else:
    from torch.distributed import (
        _DEFAULT_FIRST_BUCKET_BYTES,
        BuiltinCommHookType,
        _compute_bucket_assignment_by_size,
    )

__all__ = [
    "DEFAULT_FIRST_BUCKET_BYTES",
    "BuiltinCommHookType",
    "assign_buckets",
    "gradient_accumulator",
    "is_future",
    "queue_callback",
    "uses_python_reducer",
]

DEFAULT_FIRST_BUCKET_BYTES: int = _DEFAULT_FIRST_BUCKET_BYTES


def gradient_accumulator(parameter: Tensor) -> Node:
    """The autograd node that adds to ``parameter.grad``. It lives only as long as somebody holds it."""
    return get_gradient_edge(parameter).node


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs now has come to its end."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def assign_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], indices: Sequence[int] = ()
) -> tuple[list[list[int]], list[int]]:
    """PyTorch's own assignment by dtype, device and size; ``indices`` names the tensors, by position without it."""
    return _compute_bucket_assignment_by_size(list(tensors), list(limits), [False] * len(tensors), list(indices))


def uses_python_reducer() -> bool:
    """Whether torch.compile was told to replace DDP's reducer by its own."""
    return torch._dynamo.config.optimize_ddp == "python_reducer"


def is_future(value: object) -> bool:
    """Whether ``value`` is a future of PyTorch's; ``Future.then`` returns one of the class under the public one."""
    return isinstance(value, torch._C.Future)
