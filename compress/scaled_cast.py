"""All-reduce in 16 bit with delayed scaling: each bucket is multiplied by a power of two chosen one step earlier.

    w_k = cast(clamp(g_k s / n, -limit, limit)),   w = sum over the n ranks of w_k,   g = w / s
    s'  = the power of two that places max |g| a margin below the limit             (kernels/scale.py)

The reduced gradient has the same bits on every rank, so all ranks choose the same scale without one more message. Only
a bucket's first step needs one, of 12 bytes: the ranks agree on what they remember, and on the largest |g| now.
limit is the wire type's largest value / 2^(ceil(log2 n) + 1): the sum of n contributions cannot overflow, whatever the
order and rounding of the partial sums, so a non-finite result means a non-finite gradient. The idea is the delayed
scaling of NVIDIA Transformer Engine's fp8 recipe, applied to a sum over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress._options import check_whole_number
from gradwire.compress.gradients import Gradients
from gradwire.compress.transport import Transport
from gradwire.compress.workspace import Workspace
from gradwire.kernels import MAX_EXPONENT, flatten, unflatten, update_scale


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """How a bucket's scale follows its gradient. All in binades: powers of two.

    Attributes:
        dtype: of the wire, torch.float16 or torch.bfloat16.
        margin: headroom between the largest reduced magnitude and half the saturation limit. A larger one tolerates
            larger jumps between steps and between ranks; a smaller one keeps more bits of small values.
        growth: how far the scale may rise in one step. A larger one follows a shrinking gradient faster.
        backoff: how far it falls beyond its target after a step in which a rank may have saturated. A larger one
            ends a series of saturations sooner.
    """

    dtype: torch.dtype = torch.float16
    margin: int = 4
    growth: int = 1
    backoff: int = 4

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; expected torch.float16 or torch.bfloat16.")
        for name, lowest, highest in (("margin", 1, 12), ("growth", 1, 2 * MAX_EXPONENT), ("backoff", 0, 12)):
            expected = f"a whole number of binades, {lowest} to {highest}"
            check_whole_number(name, getattr(self, name), expected, lowest, highest)

    def limit(self, world_size: int) -> float:
        """The magnitude at which one rank's contribution saturates on the wire, so that no sum overflows."""
        return math.ldexp(torch.finfo(self.dtype).max, -(world_size - 1).bit_length() - 1)


class BucketScale:
    """The scale of one bucket, on its device.

    Attributes:
        exponent: int32[2]: the scale's exponent, and 1 once it was derived from a gradient.
        scales: fp32[2]: 2^exponent / world for sending, 2^-exponent for receiving.
        absmax: fp32[1]: scratch of one step.
        is_agreed: whether the ranks have agreed on it.
    """

    def __init__(self, exponent: Tensor) -> None:
        self.exponent = exponent
        self.scales = torch.empty(2, device=exponent.device)
        self.absmax = torch.zeros(1, device=exponent.device)
        self.is_agreed = False


async def scaled_cast_all_reduce(
    source: Gradients,
    target: Gradients,
    scaling: DelayedScaling,
    scale: BucketScale,
    counters: Tensor,
    is_last: bool,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """Write the mean over all ranks of ``source`` into ``target`` and choose the bucket's next scale.

    Args:
        source: the gradients. Unchanged, unless ``target`` is the same memory.
        target: where the result goes; may be ``source``, or one flat tensor of the same elements.
        scaling: the options.
        scale: the bucket's scale. Modified.
        counters: int64[4]: elements that were not finite and that saturated on this rank, steps with a non-finite
            result, and scratch. Modified.
        is_last: whether this is the last bucket of the step.
        transport: sums over the ranks.
        workspace: wire memory.
    """
    if not scale.is_agreed:
        await _agree(source, scale, transport)
        _update(scaling, scale, counters, False, transport)
    wire = workspace.wire(source.table.numel, scaling.dtype)
    limit = scaling.limit(transport.world_size)
    flatten(source.tensors, wire, table=source.table, scale=scale.scales[0], limit=limit, counters=counters)
    await transport.all_reduce(wire)
    unflatten(wire, target.tensors, table=target.table, scale=scale.scales[1], absmax=scale.absmax)
    _update(scaling, scale, counters, is_last, transport)


async def _agree(source: Gradients, scale: BucketScale, transport: Transport) -> None:
    """Give all ranks one exponent and the largest |g| of all.

    The exponent is the smallest that any of them derived from a gradient, and if none did, the smallest of all: without
    a gradient exponents rise by themselves, and not on a rank that has lost its state.
    """
    tensors = source.table.real(source.tensors)
    norms = torch._foreach_norm([g for g in tensors if g.numel() > 0] or [scale.absmax], math.inf)
    scale.absmax.copy_(torch.stack([norm.float() for norm in norms]).max())
    exponent, calibrated = scale.exponent.unbind()
    lowered = 4 * MAX_EXPONENT * (1 - calibrated)  # below all that are derived from a gradient
    bits = scale.absmax.view(torch.int32)[0]  # the bits of non-negative numbers order as the numbers do, NaN on top
    message = torch.stack([bits, -exponent - lowered, calibrated])
    await transport.all_reduce_max(message)
    scale.absmax.view(torch.int32).copy_(message[0])
    lowered = 4 * MAX_EXPONENT * (1 - message[2])
    scale.exponent.copy_(torch.stack([-message[1] - lowered, message[2]]))
    scale.is_agreed = True


def _update(scaling: DelayedScaling, scale: BucketScale, counters: Tensor, is_last: bool, transport: Transport) -> None:
    limit = scaling.limit(transport.world_size)
    update_scale(
        scale.exponent,
        scale.scales,
        scale.absmax,
        counters,
        top=math.frexp(limit)[1] - 1,
        margin=scaling.margin,
        growth=scaling.growth,
        backoff=scaling.backoff,
        inverse_world=1 / transport.world_size,
        is_last=is_last,
    )
