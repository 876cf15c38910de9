"""The reduction of a bucket without a communication hook: bitwise equal to PyTorch's DDP."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.futures import Future

from gradwire.comm import Transport, Workspace
from gradwire.compress import Gradients, cast_all_reduce
from gradwire.hooks._bucket import reduce_bucket
from gradwire.reducer.bucket import DenseBucket
from gradwire.reducer.bucketing import Bucket
from gradwire.reducer.exchange import Exchange

__all__ = ["default_reduction"]


def default_reduction(bucket: Bucket, exchange: Exchange) -> Future[Tensor]:
    """Start to average a bucket's gradients over the ranks; the future holds the result.

    Dense gradients on a CPU are flattened into the bucket's buffer and summed by gloo's
    threads, which work on several buckets at once. All other gradients are reduced in the executor
    of the process group.

    Args:
        bucket: the bucket; its gradients are collected and its ``divisor`` is set.
        exchange: its transport carries the sums of dense gradients on a CPU, which alone create it.
    """
    if isinstance(bucket, DenseBucket) and not exchange.connections.has_streams(bucket.device):
        return exchange.transport.start_all_reduce(bucket.scale_into_buffer())

    async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        assert isinstance(bucket, DenseBucket)
        if bucket.as_view:
            await transport.all_reduce(bucket.scale_into_buffer())
        else:
            await cast_all_reduce(source, target, source.table.dtype, transport, workspace, bucket.divisor)

    return reduce_bucket(exchange.process_group, cast("Any", bucket), algorithm, "all-reduce", divisor=bucket.divisor)
