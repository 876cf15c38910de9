"""The assignment of parameters to buckets: in model order first, then in the order of ready gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm import GroupTransport
from gradwire.reducer import torch_internals
from gradwire.reducer.arguments import check_bucket_size
from gradwire.reducer.bucket import BucketSpec, DenseBucket, ReducerBucket, SparseBucket, Upcast

Assignment = Sequence[Sequence[int]]  # the parameters of each bucket, by index in the model


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """Options that determine the buckets of a model. Of sizes in bytes, the last one repeats."""

    parameters: Sequence[Tensor]  # to reduce; each requires a gradient and is listed once
    names: Sequence[str]  # parameter names, as in ``module.named_parameters()``
    sparse: Sequence[bool]  # whether each parameter's gradient is sparse
    first_limits: Sequence[int]  # bytes of the first buckets, from the last parameter to the first
    rebuilt_limits: Sequence[int]  # bytes of the rebuilt buckets
    hook_may_choose: bool  # whether the state of a hook may choose other sizes of the rebuilt buckets
    gradient_as_bucket_view: bool  # whether every ``.grad`` becomes a view of a flat buffer
    frees_buffers: bool  # whether other flat buffers are freed after every backward


def assign_first_buckets(options: BucketOptions) -> Assignment:
    """PyTorch's assignment for the first backward: in reverse model order."""
    return torch_internals.assign_buckets(options.parameters, options.first_limits, options.sparse)[::-1]


def rebuilt_limits(options: BucketOptions, hook_state: object) -> Sequence[int]:
    """Bytes of the rebuilt buckets: the hook state's ``preferred_bucket_cap_mb``, unless the user passed a size."""
    preferred = getattr(hook_state, "preferred_bucket_cap_mb", None)
    if preferred is None or not options.hook_may_choose:
        return options.rebuilt_limits
    check_bucket_size(f"preferred_bucket_cap_mb of the hook's state, a {type(hook_state).__name__},", preferred)
    return [int(preferred * 2**20)]


def rebuild_buckets(
    options: BucketOptions, limits: Sequence[int], order: Sequence[int], transport: GroupTransport
) -> Assignment:
    """Rank 0's assignment of the parameters, in its order of ready gradients. A collective call."""
    tensors = [options.parameters[i] for i in order]
    assignment = torch_internals.assign_buckets(tensors, limits, options.sparse, order)
    numbers = [b for b, bucket in enumerate(assignment) for _ in bucket]
    # One message: parameter indices in order, and the bucket index of each.
    message = torch.tensor([[i for bucket in assignment for i in bucket], numbers], device=options.parameters[0].device)
    transport.wait(transport.broadcast(message, 0))
    received: list[list[int]] = [[] for _ in range(int(message[1, -1]) + 1)]
    for i, b in zip(*message.tolist(), strict=True):
        received[b].append(i)
    return received


def make_buckets(
    options: BucketOptions, assignment: Assignment, upcast_stream: torch.Stream | None
) -> list[ReducerBucket]:
    """The buckets of an assignment; with mixed precision, PyTorch's hook casts gradients on ``upcast_stream``."""
    buckets: list[ReducerBucket] = []
    for index, members in enumerate(assignment):
        spec = BucketSpec(
            index=index,
            is_last=index == len(assignment) - 1,
            members=members,
            parameters=[options.parameters[i] for i in members],
            names=[options.names[i] for i in members],
            model_parameters=options.parameters,
        )
        if options.sparse[members[0]]:
            buckets.append(SparseBucket(spec, sets_gradient=upcast_stream is not None))
        else:
            as_view, frees_buffer = options.gradient_as_bucket_view, options.frees_buffers
            upcast = None if upcast_stream is None else Upcast(spec.parameters, upcast_stream)
            buckets.append(DenseBucket(spec, as_view, frees_buffer, upcast))
    return buckets
