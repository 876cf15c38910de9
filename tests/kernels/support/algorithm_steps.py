"""Steps of the algorithms of hooks on the buckets of a model, on one rank without a process group.

Each function returns one of the step's number, whose result are the coroutines of the buckets.
"""

import torch

from gradwire.comm import Workspace
from gradwire.compress import (
    BucketScale,
    DelayedScaling,
    LowRankBucket,
    LowRankPolicy,
    QuantizedBucket,
    Step,
    WirePolicy,
    cast_all_reduce,
    powersgd_all_reduce,
    quantized_all_reduce,
    scaled_cast_all_reduce,
)

STEPS = range(14, 19)  # a multiple of 16 among them
CPU = torch.device("cpu")


class OneRank:
    """A transport whose collectives do nothing, and suspend nothing."""

    world_size, rank, ranks = 1, 0, range(1)

    def pieces(self, nbytes):
        return 1

    async def all_reduce(self, *tensors):
        pass

    all_to_all = all_gather = all_reduce


TRANSPORT = OneRank()


def cast(model, dtype):
    workspace = Workspace(CPU)
    each = [Step.of(None, tensors, tensors, 0, TRANSPORT, workspace) for tensors in model]
    return lambda _: [cast_all_reduce(step, dtype) for step in each]


def scaled_cast(model, dtype):
    workspace, counters, scales = Workspace(CPU), torch.zeros(4, dtype=torch.int64), []
    each = [Step.of(None, tensors, tensors, 0, TRANSPORT, workspace) for tensors in model]
    scaling = DelayedScaling(dtype=dtype)

    def step(_):
        scales.extend(BucketScale(torch.zeros(2, dtype=torch.int32)) for _ in each[len(scales) :])
        for scale in scales:
            scale.transport = TRANSPORT
        return [
            scaled_cast_all_reduce(one, scaling, scale, counters, one is each[-1])
            for one, scale in zip(each, scales, strict=True)
        ]

    return step


def powersgd(model, rank, factor_dtype):
    workspace, policy, low_rank = Workspace(CPU), LowRankPolicy(rank=rank), []

    def bucket(tensors):
        shapes = policy.matrix_shapes(tensors)
        return LowRankBucket(tensors, shapes, factor_dtype=factor_dtype, iteration=STEPS[0])

    def step(iteration):
        low_rank.extend(bucket(tensors) for tensors in model[len(low_rank) :])  # in the first step: it launches, too
        return [
            powersgd_all_reduce(Step.of(b, tensors, tensors, iteration, TRANSPORT, workspace))
            for b, tensors in zip(low_rank, model, strict=True)
        ]

    return step


def quantized(model, wire, options):
    workspace, policy, made = Workspace(CPU), WirePolicy(wire=wire), []

    def step(iteration):
        new = model[len(made) :]
        made.extend(QuantizedBucket(tensors, policy.wire_formats(tensors), TRANSPORT, options) for tensors in new)
        return [
            quantized_all_reduce(Step.of(b, tensors, tensors, iteration, TRANSPORT, workspace))
            for b, tensors in zip(made, model, strict=True)
        ]

    return step
