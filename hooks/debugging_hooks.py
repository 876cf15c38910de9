"""Hooks for measurements, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks``."""

from typing import Any

import torch

from gradwire.exchange.bucket import Bucket, GradBucket
from gradwire.exchange.decorators import ddp_hook, zero_copy

__all__ = ["noop_hook"]


@zero_copy
@ddp_hook()
def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communicate nothing: each rank keeps its own gradients.

    The step time with this hook is a lower bound for every other hook. Ranks drift apart, so do not train with it.

    Examples:
        >>> model.register_comm_hook(None, noop_hook)
    """
    adapted = Bucket.of(bucket)
    if adapted.is_sparse:
        result = bucket.buffer()
    else:
        source, target, result = adapted.work()
        if source.table is not target.table:  # gradients that become views of the result
            source.flatten(result)
    is_cuda = result.device.type == "cuda"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[result.device] if is_cuda else None)
    future.set_result(result)
    return future
