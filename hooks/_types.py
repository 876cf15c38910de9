"""`GradBucket` and `CommHook`, as both PyTorch's signature check and type checkers accept them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

__all__ = ["CommHook", "GradBucket"]
