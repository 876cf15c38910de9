"""PowerSGD, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Differences from PyTorch's hook: batched kernels process all matrices of a bucket at once. A bucket takes two
all-reduces instead of three, and does not synchronize with the host. Error memory and factors are stored by parameter
name instead of bucket index, so a checkpoint resumes on any world size.
"""

from functools import partial
from operator import is_

import torch

from gradwire.comm import Steps
from gradwire.compress import alternating_all_reduce, powersgd_all_reduce
from gradwire.hooks._arguments import ddp_hook, needs_state
from gradwire.hooks._powersgd_options import PowerSGDOptions
from gradwire.hooks._powersgd_state import PowerSGDState
from gradwire.hooks._types import GradBucket
from gradwire.hooks.hook_state import Step, hook_for

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


@hook_for(PowerSGDState)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients, approximating each matrix at rank r, with error feedback.

    For an n x m matrix, a rank sends r (n + m) elements. Gradients that are not worth compressing are sent as they are.
    Each bucket takes two all-reduces, or one with ``alternating``. Steps before ``start_powerSGD_iter`` are bitwise
    equal to the plain all-reduce. If a matrix contains inf or NaN on any rank, it becomes NaN on all ranks, so that a
    gradient scaler skips the step; its error and factors do not change. Gradients may be fp32, fp16, bf16, fp64 or
    complex (as real pairs).

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximate mean.

    Raises:
        ValueError: the state belongs to another model, or an entry of ``stacks`` does not fit its parameter.
    """
    state.hook_name = "powerSGD_hook"
    return state.run(bucket, partial(_powersgd, state.options))


@ddp_hook(needs_state(PowerSGDState))
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Apply PowerSGD to the flat bucket as one nearly square matrix.

    Of N elements, it sends O(r sqrt(N)). The rows and columns of the matrix are arbitrary, so expect
    lower accuracy than with `powerSGD_hook`. "Batched" is PyTorch's name; `powerSGD_hook` batches its
    matrices too. ``ranks``, ``stacks`` and ``min_compression_rate`` have no effect. When buckets
    change, the warm start begins again; errors are kept.

    Args:
        state: options, errors and factors. Modified.
        bucket: the gradients. Overwritten with their approximate mean.
    """
    state.hook_name = "batched_powerSGD_hook"
    return state.run(bucket, partial(_powersgd, state.options))


async def _powersgd(options: PowerSGDOptions, step: Step) -> None:
    bucket, gradients, results, workspace = step.memory, step.gradients, step.results, step.workspace

    def steps() -> Steps[None]:
        arguments = (bucket, gradients, results, step.iteration, step.transport, workspace)
        if options.alternating:
            return alternating_all_reduce(*arguments)
        return powersgd_all_reduce(*arguments, warm_start=options.warm_start)

    if options.cuda_graphs and workspace.graphs is not None and bucket.can_capture:
        is_in_place = all(map(is_, gradients, results))
        variant = (is_in_place, options.alternating and step.iteration % 2)
        refresh = partial(bucket.refresh, gradients, results, step.iteration)
        await workspace.graphs.run(bucket, variant, steps, refresh)
    else:
        await steps()
