"""Delayed scaling: the next step's scale of a 16-bit wire, from the largest magnitude of this step's reduced gradient.

The scale is 2^exponent. With e = floor(log2(absmax)) and top = floor(log2(limit)), where limit is the magnitude at
which the contribution of one rank saturates:

    target    = top - 1 - margin - e                    the largest reduced value lies `margin` binades below limit / 2
    exponent <- target                                  in the first step
             <- min(target, exponent + growth)          in later steps
             <- min(target, exponent) - backoff         if absmax 2^exponent >= limit / 2: a rank may have saturated
             <- exponent                                if absmax is inf or NaN
             <- min(exponent + growth, 32) or exponent  if absmax is 0: the gradient may be too small to see

All ranks pass equal inputs and get bitwise equal results. One program; it reads and writes a few dozen bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.kernels.dispatch import use_triton

# How far the scale rises while absmax is 0. At 2^32, fp16's smallest number, 2^-24, stands for a gradient of 2^-56.
BLIND_EXPONENT = 32
# Keeps 2^exponent, its inverse and 2^exponent / world size normal fp32 numbers.
MAX_EXPONENT = 100


def update_scale_reference(
    exponent: Tensor,
    scales: Tensor,
    absmax: Tensor,
    counters: Tensor,
    *,
    top: int,
    margin: int,
    growth: int,
    backoff: int,
    inverse_world: float,
    is_last: bool,
) -> None:
    """Replace a bucket's scale by the next step's.

    Args:
        exponent: int32, [2]: the exponent, and 1 once it was derived from a gradient. Modified.
        scales: fp32, [2]: 2^exponent * inverse_world to send with, 2^-exponent to receive with. Overwritten.
        absmax: fp32, [1]: the largest reduced magnitude of this step. Set to 0.
        counters: int64, [4]: [3] marks a non-finite bucket in this step, [2] counts such steps. Modified.
        top: floor(log2) of the magnitude at which the contribution of one rank saturates on the wire.
        margin: binades of headroom. A larger margin tolerates larger jumps and leaves fewer bits for small values.
        growth: binades by which the scale may rise in one step.
        backoff: binades by which it falls below the target when a rank may have saturated.
        inverse_world: 1 / world size.
        is_last: whether this is the last bucket of the step.
    """
    current, calibrated = exponent.unbind()
    finite = absmax.isfinite().squeeze()
    e = (torch.frexp(absmax).exponent.squeeze() - 1).clamp(min=-126)  # as the kernel reads it from the bits
    target = top - 1 - margin - e
    grown = torch.where(calibrated > 0, torch.minimum(target, current + growth), target)
    reached = e + current >= top - 1  # absmax 2^exponent is in the binade of limit / 2, or above
    lowered = torch.minimum(grown, current) - backoff
    is_zero = absmax.squeeze() == 0
    update = finite & ~is_zero
    unseen = torch.where(is_zero, torch.maximum(current, (current + growth).clamp(max=BLIND_EXPONENT)), current)
    following = torch.where(update, torch.where(reached, lowered, grown), unseen).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    exponent.copy_(torch.stack([following, calibrated | update.to(torch.int32)]))
    one = torch.ones((), device=scales.device)
    scales.copy_(torch.stack([torch.ldexp(one, following) * inverse_world, torch.ldexp(one, -following)]))
    absmax.zero_()
    counters[3] |= (~finite).to(torch.int64)
    if is_last:
        counters[2] += counters[3]
        counters[3] = 0


def bound_update_scale(device: torch.device) -> Callable[..., None]:
    """`update_scale_reference` for ``device``, or the Triton kernel: one launch without a synchronization."""
    if use_triton(device):
        launchers: Any = import_module("gradwire.kernels.delayed_scaling_triton")
        return cast("Callable[..., None]", launchers.update_scale_triton)
    return update_scale_reference
