"""`GradBucket` and `CommHook`, as both PyTorch's signature check and type checkers accept them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

__all__ = ["CommHook", "GradBucket", "StepBoundary"]


class StepBoundary:
    """Tells where a step begins: its buckets come in the order of their indices, but any may be skipped."""

    def __init__(self) -> None:
        self._latest: int | None = None

    def is_before(self, bucket: GradBucket) -> bool:
        """Whether ``bucket`` is the first of its step. Call it once for every bucket."""
        index, latest = bucket.index(), self._latest
        self._latest = index
        return latest is None or index <= latest
