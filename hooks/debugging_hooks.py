"""Hooks for measuring: the names of ``torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks``."""

from typing import Any

import torch
import torch.distributed as dist

from gradwire.hooks.reduce import InPlaceBucket, in_place

__all__ = ["noop_hook"]


@in_place
def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communicate nothing and leave each rank its own gradients: what remains of a step is the headroom of any hook.

    Ranks drift apart; use it to measure, not to train.

    Example::
        >>> model.register_comm_hook(None, noop_hook)
    """
    lends = isinstance(bucket, InPlaceBucket) and bucket.in_place
    result = bucket.target().tensors[0] if lends else bucket.buffer()
    devices = [result.device] if result.device.type == "cuda" else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(result)
    return future
