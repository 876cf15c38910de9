"""`quantized_reduction`: the two-shot all-reduce of a bucket in one wire format, without error feedback."""

import weakref

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import Executor, Transport, Workspace, executor_for
from gradwire.compress import Gradients, Quantization, QuantizedBucket, quantized_all_reduce
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks._reduce_bucket import agree, bucket_device, bucket_dtype, is_sparse, reduce_bucket
from gradwire.hooks._types import GradBucket
from gradwire.hooks.telemetry import Observed
from gradwire.kernels import WIRE_FORMATS, as_real, gradient_layout, layout_in_dtype

# Layouts of buckets, kept from step to step.
_buckets_of: weakref.WeakKeyDictionary[Executor, dict[object, QuantizedBucket]] = weakref.WeakKeyDictionary()


def quantized_reduction(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    wire: str,
    block_size: int,
    settings: HookSettings,
    observed: Observed | None = None,
) -> Future[torch.Tensor]:
    """Average a bucket in a format of `WIRE_FORMATS`, with sums in fp32; the future has its result.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: of either DDP. A sparse gradient is averaged uncompressed.
        wire: name of the format.
        block_size: elements that share a scale.
        settings: of the hook, which must be equal on all ranks.
        observed: the hook's state, which may measure this step; None without a state.
    """
    group = agree(settings, process_group, bucket, observed)
    executor = executor_for(group, bucket_device(bucket))
    quantized = _quantized_bucket(executor, bucket, wire, block_size) if not is_sparse(bucket) else None

    async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        assert quantized is not None  # `reduce_bucket` averages sparse gradients itself
        gradients, results = source.each(quantized.layout), target.each(quantized.layout)
        await quantized_all_reduce(quantized, gradients, results, 0, transport, workspace)

    return reduce_bucket(group, bucket, algorithm, settings.hook_name, observed=observed)


def _quantized_bucket(executor: Executor, bucket: GradBucket, wire: str, block_size: int) -> QuantizedBucket:
    buckets = _buckets_of.setdefault(executor, {})
    dtype, parameters = bucket_dtype(bucket), bucket.parameters()
    key = (wire, block_size, dtype, *((parameter.shape, parameter.stride()) for parameter in parameters))
    if key not in buckets:
        layouts = [layout_in_dtype(as_real(gradient_layout(parameter)), dtype) for parameter in parameters]
        options = Quantization(block_size=block_size, error_dtype=None)
        formats = [WIRE_FORMATS[wire]] * len(layouts)
        buckets[key] = QuantizedBucket(layouts, formats, executor.transport, options)
    return buckets[key]
