"""All-reduce in 16 bits with delayed scaling: each bucket is multiplied by a power of two chosen one step earlier.

    w_k = cast(clamp(g_k s / n, -limit, limit)),   w = sum over the n ranks of w_k,   g = w / s
    s  <- the power of two that places max |g| a margin below the limit             (kernels/delayed_scaling.py)

The reduced gradient is bitwise equal on all ranks, so all choose the same scale without a message. Only the first step
of a bucket in a process group sends one, of 12 bytes: the ranks agree on their remembered exponents and on the largest
|g|.

limit is the largest value of the wire dtype / 2^(ceil(log2 n) + 1). The sum of n contributions cannot overflow in any
order and with any rounding of partial sums, so a non-finite result means a non-finite gradient.

Source: delayed scaling is the fp8 recipe of NVIDIA's Transformer Engine; here it applies to a sum over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.transport import Transport
from gradwire.compress.step import Gradients, Step
from gradwire.kernels import MAX_EXPONENT, bound_update_scale
from gradwire.validation import check_choice, check_whole_number

MAX_MARGIN = 12


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Options of delayed scaling. Distances are in binades, that is, powers of two.

    Attributes:
        dtype: wire dtype, torch.float16 or torch.bfloat16.
        margin: headroom between the largest reduced magnitude and half the saturation limit, 1 to 12. Elements also
            saturate where large gradients of different ranks cancel.
        growth: how far the scale may rise per step.
        backoff: how far the scale falls below its target after a step in which a rank may have saturated.

    Raises:
        ValueError: an attribute is of another type or out of range.
    """

    dtype: torch.dtype = torch.float16
    margin: int = 4
    growth: int = 1
    backoff: int = 4

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, (torch.float16, torch.bfloat16))
        for name, lowest, highest in (("margin", 1, MAX_MARGIN), ("growth", 1, 2 * MAX_EXPONENT), ("backoff", 0, 12)):
            expected = f"a whole number of binades, {lowest} to {highest}"
            check_whole_number(name, getattr(self, name), expected, lowest, highest)

    def limit(self, world_size: int) -> float:
        """The magnitude at which one rank's contribution saturates, so that no sum overflows."""
        return math.ldexp(torch.finfo(self.dtype).max, -(world_size - 1).bit_length() - 1)


class BucketScale:
    """The scale of one bucket, on its device."""

    def __init__(self, exponent: Tensor) -> None:
        self.exponent = exponent  # int32 [2]: exponent of the scale, and 1 once a gradient has determined it
        self.scales = torch.empty(2, device=exponent.device)  # 2^exponent / world size to send, 2^-exponent to receive
        self.absmax = torch.zeros(1, device=exponent.device)  # largest magnitude of the current step
        self.update = bound_update_scale(exponent.device)  # the kernel that replaces the scale
        self.transport: Transport | None = None  # whose ranks have agreed on this scale; None before the first step


async def scaled_cast_all_reduce(
    step: Step, scaling: DelayedScaling, scale: BucketScale, counters: Tensor, is_last: bool
) -> None:
    """Write the mean of the gradients over all ranks into the results, and choose the next scale of the bucket.

    Args:
        step: source and target; its target may be one flat tensor.
        scaling: options.
        scale: the bucket's scale. Modified.
        counters: int64 [4]: non-finite elements of this rank, saturated elements of this rank,
            steps with a non-finite result, and whether the current step has had one so far.
            Modified.
        is_last: whether this is the last bucket of the step.
    """
    source, transport = step.source, step.transport
    if scale.transport is not transport:  # the first step: ranks may remember different exponents
        await _agree(source, scale, transport)
        _update(scaling, scale, counters, False, step)
    wire = step.workspace.wire(source.table.numel, scaling.dtype)
    # Dividing by n before the cast, and clamping each contribution, keeps every partial sum in range.
    limit = scaling.limit(transport.world_size)
    source.flatten(wire, scale=scale.scales[0], limit=limit, counters=counters)
    await transport.all_reduce(wire)
    # The next scale depends on the result only, which has the same bits on all ranks: so no message is needed.
    step.target.unflatten(wire, scale=scale.scales[1], absmax=scale.absmax)
    _update(scaling, scale, counters, is_last, step)


async def _agree(source: Gradients, scale: BucketScale, transport: Transport) -> None:
    """Give all ranks the same exponent, and the largest |g| of all.

    The exponent is the smallest that a rank has derived from a gradient; if none has, the smallest of all. Exponents
    rise by themselves in steps without a gradient, but not on a rank that has lost its state.
    """
    tensors = source.table.real(source.tensors)
    norms = torch._foreach_norm([g for g in tensors if g.numel() > 0] or [scale.absmax], math.inf)
    scale.absmax.copy_(torch.stack([norm.float() for norm in norms]).max())
    exponent, calibrated = scale.exponent.unbind()
    lowered = 4 * MAX_EXPONENT * (1 - calibrated)  # below every exponent derived from a gradient
    bits = scale.absmax.view(torch.int32)[0]  # bits of non-negative numbers sort like the numbers, with NaN on top
    message = torch.stack([bits, -exponent - lowered, calibrated])
    await transport.all_reduce_max(message)
    scale.absmax.view(torch.int32).copy_(message[0])
    lowered = 4 * MAX_EXPONENT * (1 - message[2])
    scale.exponent.copy_(torch.stack([-message[1] - lowered, message[2]]))
    scale.transport = transport


def _update(scaling: DelayedScaling, scale: BucketScale, counters: Tensor, is_last: bool, step: Step) -> None:
    """Choose the next scale from ``scale.absmax``."""
    limit = scaling.limit(step.transport.world_size)
    scale.update(
        scale.exponent,
        scale.scales,
        scale.absmax,
        counters,
        top=math.frexp(limit)[1] - 1,
        margin=scaling.margin,
        growth=scaling.growth,
        backoff=scaling.backoff,
        inverse_world=step.factor,
        is_last=is_last,
    )
