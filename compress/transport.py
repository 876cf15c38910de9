"""Transport: the collectives that an algorithm may use, over one process group."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Transport:
    """Collectives that block in the calling thread (CPU) or in the current stream (GPU), counting their payload.

    One, `start_all_reduce`, does not block.

    Attributes:
        world_size: number of ranks.
        payload_bytes: bytes of the tensors handed to collectives so far. What a link carries is this times a factor
            that depends on the collective's algorithm, 2 (n - 1) / n for a ring all-reduce over n ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = group.size()
        self.payload_bytes = 0

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks. Several travel together: one wait on the wire, not several."""
        self.payload_bytes += sum(_nbytes(tensor) for tensor in tensors)
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], group=self.group)
        elif tensors[0].device.type == "cpu":
            for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]:
                work.wait()
        else:
            with dist.distributed_c10d._coalescing_manager(self.group, tensors[0].device):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=self.group)

    def start_all_reduce(self, tensor: Tensor) -> Future[Any]:
        """Begin to replace ``tensor`` by its sum over all ranks; the future's value is a list of it alone."""
        self.payload_bytes += _nbytes(tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return cast("Future[Any]", work.get_future())

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace every element of ``tensor`` by its largest value over all ranks."""
        self.payload_bytes += tensor.nbytes
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)


def _nbytes(tensor: Tensor) -> int:
    return tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes
