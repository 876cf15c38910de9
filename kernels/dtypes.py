"""Dtypes: which one carries the arithmetic, and how its results are rounded to another."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.language import jit, tl

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic between these dtypes: fp64 if one of them is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def triton_dtype(dtype: torch.dtype) -> object:
    """The Triton type of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def narrow_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast from the dtype of the arithmetic. fp64 is rounded to fp32 on its way to 16 bits, as in PyTorch."""
    return x if dtype == torch.float64 else x.to(torch.float32).to(dtype)


@jit
def narrow(x, DTYPE: tl.constexpr):
    """`narrow_reference` in Triton."""
    # One return: Triton type-checks all of a function's, also one that the constexpr rules out.
    return x if DTYPE == tl.float64 else x.to(tl.float32).to(DTYPE)


def saturating_cast(x: Tensor, out: Tensor, scale: float | Tensor, limit: float, counters: Tensor | None) -> None:
    """``out = cast(clamp(x * scale, -limit, limit))``, where inf and NaN pass through.

    Args:
        x: in the dtype of the arithmetic.
        out: of the shape of ``x``, in a wire dtype. Overwritten.
        scale: a number, or a one-element tensor.
        limit: the magnitude at which a finite element saturates.
        counters: int64, [2]: the numbers of non-finite and of saturated elements are added.
    """
    scaled = x * torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    is_finite = x.isfinite()
    clamped = torch.where(is_finite, scaled.clamp(-limit, limit), scaled)
    out.copy_(narrow_reference(clamped, out.dtype))
    if counters is not None:
        counters[0] += (~is_finite).sum()
        counters[1] += (is_finite & (scaled.abs() > limit)).sum()
