"""PowerSGD, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

Differences from PyTorch's hook: batched kernels process all matrices of a bucket at once. A bucket takes two
all-reduces instead of three, and does not synchronize with the host. Error memory and factors are stored by parameter
name instead of bucket index, so a checkpoint resumes on any world size.
"""

import logging
import warnings
from functools import partial
from operator import is_

import torch
from torch.futures import Future

from gradwire.comm import Steps, Transport, Workspace
from gradwire.compress import (
    Gradients,
    LowRankBucket,
    alternating_all_reduce,
    cast_all_reduce,
    flat_low_rank_bucket,
    powersgd_all_reduce,
)
from gradwire.hooks import _powersgd_checkpoint as checkpoint
from gradwire.hooks._arguments import ddp_hook, needs_state
from gradwire.hooks._error_feedback_state import check_loaded_names
from gradwire.hooks._powersgd_state import PowerSGDState
from gradwire.hooks._reduce_bucket import agree, bucket_dtype, is_sparse, reduce_bucket, zero_copy
from gradwire.hooks._state_validation import check_model, check_powersgd_shapes
from gradwire.hooks._types import GradBucket
from gradwire.kernels import MAX_RANK, as_real, gradient_layout, layout_in_dtype

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)


@zero_copy
@ddp_hook(needs_state(PowerSGDState))
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
    return _reduce(state, bucket, batched=False)


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
    return _reduce(state, bucket, batched=True)


def _reduce(state: PowerSGDState, bucket: GradBucket, batched: bool) -> Future[torch.Tensor]:
    """Average a bucket: with PowerSGD, or plainly before the start and if none of its matrices would shrink enough."""
    state._is_batched = batched
    state._prepared = None
    state.begins_step(bucket)
    group = agree(state, state.process_group, bucket, state)
    state.announce_start(logger)
    state.apply_options()
    names, iteration, options = state.parameter_names(bucket), state.iter, state.options
    state._names.note(names, bucket)
    state._check_patterns()
    has_started = options.policy.has_started(iteration)
    compresses = has_started and not is_sparse(bucket)
    low_rank = _low_rank_bucket(state, names, bucket) if compresses else None

    async def algorithm(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> None:
        if low_rank is None:
            await cast_all_reduce(source, target, source.table.dtype, transport, workspace)
            return
        gradients, results = source.each(low_rank.layout), target.each(low_rank.layout)

        def steps() -> Steps[None]:
            arguments = (low_rank, gradients, results, iteration, transport, workspace)
            if options.alternating:
                return alternating_all_reduce(*arguments)
            return powersgd_all_reduce(*arguments, warm_start=options.warm_start)

        if options.cuda_graphs and workspace.graphs is not None and low_rank.can_capture:
            is_in_place = all(map(is_, gradients, results))
            variant = (is_in_place, options.alternating and iteration % 2)
            refresh = partial(low_rank.refresh, gradients, results, iteration)
            await workspace.graphs.run(low_rank, variant, steps, refresh)
        else:
            await steps()

    state.maybe_increase_iter(bucket)
    if compresses:
        numel = sum(as_real(parameter).numel() for parameter in bucket.parameters())
        state._count(numel, low_rank.sent_numel(iteration) if low_rank is not None else numel, bucket.is_last())
    if has_started and bucket.is_last():
        _warn_if_idle(state)
    name = "batched_powerSGD_hook" if batched else "powerSGD_hook"
    return reduce_bucket(group, bucket, algorithm, name, observed=state)


def _low_rank_bucket(state: PowerSGDState, names: tuple[str, ...], bucket: GradBucket) -> LowRankBucket | None:
    """The `LowRankBucket` of a bucket, kept from step to step; None if none of its matrices would shrink enough."""
    dtype, kept = bucket_dtype(bucket), state._buckets.get(names)
    if names in state._buckets and (kept is None or kept.layout.dtype == dtype):
        return kept
    _check_loaded(state, names)
    parameter_layouts = [gradient_layout(parameter) for parameter in bucket.parameters()]
    layouts = [layout_in_dtype(as_real(layout), dtype) for layout in parameter_layouts]
    options = state.options.of_buckets(state.iter)
    made: LowRankBucket | None = None
    if state._is_batched:
        rank = state.options.matrix_approximation_rank
        made = flat_low_rank_bucket(layouts, rank, names=names, memory=state._memory, **options)
    elif any(shapes := state.options.policy.matrix_shapes(parameter_layouts, names)):
        made = LowRankBucket(layouts, shapes, names=names, memory=state._memory, **options)
    if made is not None:
        state._memory.update(made.memory)
        if state.options.cuda_graphs and not made.can_capture:
            warnings.warn(
                f"cuda_graphs=True has no effect for {dtype} gradients on {made.table.device} at rank "
                f"{made.table.largest_rank}. It needs Triton's kernels: a GPU, fp32 or 16-bit gradients, ranks up to "
                f"{MAX_RANK}. Results are the same without it; pass cuda_graphs=False.",
                stacklevel=2,
            )
    members = set(names)  # a bucket that shared a parameter with this one no longer exists
    state._buckets = {key: each for key, each in state._buckets.items() if members.isdisjoint(key)}
    state._buckets[names] = made
    return made


def _check_loaded(state: PowerSGDState, names: tuple[str, ...]) -> None:
    """Raise ValueError, before anything is sent, if the loaded memory does not fit the parameters known so far."""
    if state._is_loaded:
        check_loaded_names(state._memory, names)
    if not state._fits_parameters:
        expected = checkpoint.expected_of(state._names, state.policy)
        entries = checkpoint.entries_of(state._memory)
        check_powersgd_shapes(**entries, parameters=expected)
        if state._names.is_complete:
            check_model(entries["errors"], state._names.known())
            state._fits_parameters = True


def _warn_if_idle(state: PowerSGDState) -> None:
    """Warn at the end of the first compressed step if it has compressed nothing, and tell why."""
    if not state._has_compressed and not any(state._buckets.values()):
        known = state._names.known()
        numel = sum(as_real(known[name]).numel() for names in state._buckets for name in names if name in known)
        if state._is_batched:
            why = "No bucket is large enough: lower matrix_approximation_rank or raise bucket_cap_mb."
        else:
            layouts = {name: gradient_layout(each) for name, each in known.items() if each.requires_grad}
            why = state.options.why_nothing_is_compressed(layouts)
        warnings.warn(
            f"PowerSGD compresses nothing here: it sends all {numel:,} elements. {why} Otherwise use another hook: "
            "fp16_compress_hook halves the bytes of any model.",
            stacklevel=2,
        )
    state._has_compressed = True
