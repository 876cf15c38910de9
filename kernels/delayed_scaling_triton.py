"""The next step's scale in Triton: one program, without a synchronization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel
from gradwire.kernels.delayed_scaling import BLIND_EXPONENT, MAX_EXPONENT


@triton.jit
def _power_of_two(exponent):
    """2^exponent in fp32, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@kernel
def _update_scale_kernel(
    exponent_ptr,  # [2] int32: the exponent, and 1 once it was derived from a gradient
    scales_ptr,  # [2] fp32: the multipliers of sending and of receiving
    absmax_ptr,  # [1] fp32
    counters_ptr,  # [4] int64; [2]: non-finite steps, [3]: whether this step is non-finite
    top,
    margin,
    growth,
    backoff,
    inverse_world,
    IS_LAST: tl.constexpr,
    BLIND_EXPONENT: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    """`update_scale` in one program."""
    current = tl.load(exponent_ptr)
    calibrated = tl.load(exponent_ptr + 1)
    absmax = tl.load(absmax_ptr)
    finite = absmax < float("inf")
    e = tl.maximum(((absmax.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, -126)
    target = top - 1 - margin - e
    grown = tl.where(calibrated > 0, tl.minimum(target, current + growth), target)
    reached = e + current >= top - 1
    lowered = tl.minimum(grown, current) - backoff
    update = finite & (absmax > 0)
    unseen = tl.where(absmax == 0, tl.maximum(current, tl.minimum(current + growth, BLIND_EXPONENT)), current)
    following = tl.where(update, tl.where(reached, lowered, grown), unseen)
    following = tl.minimum(tl.maximum(following, -MAX_EXPONENT), MAX_EXPONENT)
    tl.store(exponent_ptr, following)
    tl.store(exponent_ptr + 1, calibrated | update.to(tl.int32))
    tl.store(scales_ptr, _power_of_two(following) * inverse_world)
    tl.store(scales_ptr + 1, _power_of_two(-following))
    tl.store(absmax_ptr, 0.0)
    skip = tl.load(counters_ptr + 3) | (finite == 0).to(tl.int64)
    if IS_LAST:
        tl.store(counters_ptr + 2, tl.load(counters_ptr + 2) + skip)
        tl.store(counters_ptr + 3, tl.zeros_like(skip))
    else:
        tl.store(counters_ptr + 3, skip)


def update_scale_triton(
    exponent: Tensor, scales: Tensor, absmax: Tensor, counters: Tensor, *, is_last: bool, **numbers: float
) -> None:
    """`update_scale` in one launch."""
    with torch.cuda.device_of(exponent):
        _update_scale_kernel[(1,)](
            exponent_ptr=exponent,
            scales_ptr=scales,
            absmax_ptr=absmax,
            counters_ptr=counters,
            **numbers,
            IS_LAST=is_last,
            BLIND_EXPONENT=BLIND_EXPONENT,
            MAX_EXPONENT=MAX_EXPONENT,
            num_warps=1,
        )
