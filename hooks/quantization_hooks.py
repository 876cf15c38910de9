"""Quantized all-reduce, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``, and more.

`quantization_hook` is gradwire's own: 1 to 16 bits per element, with error feedback. The two hooks with PyTorch's names
send 8 bits per element, without error feedback. PyTorch's hooks send every rank's whole bucket to every other rank.
gradwire's send as many bytes as a ring all-reduce of the quantized bucket, and have a scale per block of elements.
"""

import torch
import torch.distributed as dist

from gradwire.compress import quantized_all_reduce
from gradwire.hooks._arguments import ddp_hook, needs_process_group
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks._quantization_state import QuantizationState, check_block_size
from gradwire.hooks._reduce_bucket import zero_copy
from gradwire.hooks._stateless_quantization import quantized_reduction
from gradwire.hooks._types import GradBucket
from gradwire.hooks.hook_state import Step, hook_for

__all__ = ["QuantizationState", "quantization_hook", "quantization_perchannel_hook", "quantization_pertensor_hook"]

PER_TENSOR_BLOCK_SIZE = 1024  # the largest: PyTorch's hook has one scale for the whole bucket
_PER_TENSOR = HookSettings("quantization_pertensor_hook")
_PER_CHANNEL: dict[int, HookSettings] = {}  # by block size


@hook_for(QuantizationState)
def quantization_hook(state: QuantizationState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 1 to 16 bits per element, with error feedback.

    Blocks of ``block_size`` elements share a scale. Every rank quantizes its gradients and sends each
    rank one shard. It sums the shards that it receives in fp32, quantizes the sum, and sends it to all
    ranks. Sums do not overflow, and the rounding error does not grow with the world size.

    Steps before ``start_iter`` are bitwise equal to the plain all-reduce. If a gradient is inf or
    NaN on any rank, its block becomes NaN on all ranks, so that a gradient scaler skips the step,
    and the errors of its bucket do not change. Sparse gradients are sent uncompressed. Gradients
    may be fp32, fp16, bf16, fp64 or complex (as real pairs); arithmetic is in fp32.

    Args:
        state: options and errors. Modified.
        bucket: the gradients. Overwritten with their mean.

    Raises:
        ValueError: the state belongs to another model, or a pattern in ``wires`` matches no parameter.
    """
    return state.run(bucket, _quantized)


async def _quantized(step: Step) -> None:
    await quantized_all_reduce(
        step.memory, step.gradients, step.results, step.iteration, step.transport, step.workspace
    )


@zero_copy
@ddp_hook(needs_process_group)
def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 8 bits, with one scale per 1024 elements, without error feedback.

    A replacement for PyTorch's hook of this name, which has one scale and one zero point per bucket.
    New code should use `quantization_hook`: it is more accurate, in as many bytes or fewer.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: the gradients. Overwritten with their mean.

    Examples:
        >>> model.register_comm_hook(process_group, quantization_pertensor_hook)
    """
    return quantized_reduction(process_group, bucket, "int8", PER_TENSOR_BLOCK_SIZE, _PER_TENSOR)


@zero_copy
@ddp_hook(needs_process_group)
def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 8 bits, with one scale per block, without error feedback.

    A replacement for PyTorch's hook of this name, which raises an IndexError on gloo before PyTorch 2.15. New
    code should use `quantization_hook`: it is more accurate, in as many bytes or fewer.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: the gradients. Overwritten with their mean.
        bucket_size: elements that share a scale, a power of two from 32 to 1024; equal on all ranks.

    Raises:
        ValueError: ``bucket_size`` is not such a power of two.

    Examples:
        >>> model.register_comm_hook(process_group, quantization_perchannel_hook)
    """
    check_block_size("bucket_size", bucket_size)
    settings = _PER_CHANNEL.setdefault(bucket_size, HookSettings(f"quantization_perchannel_hook, {bucket_size}"))
    return quantized_reduction(process_group, bucket, "int8", bucket_size, settings)
