"""Warm start: the factors that the next step projects onto, from those of this step.

    next_c = q_c / |q_c|              so that the next P has columns of the size of the gradient, whatever q's is
    next_c = a random unit vector     where q_c is zero: such a column would stay zero for ever

Random columns come from a counter-based generator, with the matrix's key, the step and the place in the factor as its
counters: equal on all ranks. A factor that is not finite leaves the next one as it was, and clears the matrix's flag.

Traffic: read and write r (n + m) elements a matrix, which is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.counter_random import uniform
from gradwire.kernels.matrices import Factor


def renew_reference(
    wire: Tensor, factor: Factor, keys: Sequence[int], step: int, following: Tensor, finite: Tensor
) -> None:
    """What `renew` computes, written for reading."""
    for i, (q, after) in enumerate(zip(factor.views(wire), factor.views(following), strict=True)):
        finite[i] *= q.isfinite().all()
        drawn = uniform(keys[i], step, q.numel(), q.device).view_as(q)
        columns = torch.where((q == 0).all(1, keepdim=True), drawn.to(after.dtype), q.to(after.dtype))
        scaled = columns / columns.abs().amax(1, keepdim=True)
        unit = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        after.copy_(torch.where(finite[i] > 0, unit, after))


def _renew_cpu(wire: Tensor, factor: Factor, keys: Sequence[int], step: int, following: Tensor, finite: Tensor) -> None:
    if not wire.isfinite().all():
        for i, q in enumerate(factor.views(wire)):
            finite[i] *= q.isfinite().all()
    is_finite = finite.tolist()
    for i, (q, after) in enumerate(zip(factor.views(wire), factor.views(following), strict=True)):
        if not is_finite[i]:
            continue
        largest = q.abs().amax(1, keepdim=True).to(after.dtype)
        torch.div(q, torch.where(largest > 0, largest, 1), out=after)
        if not largest.all():
            drawn = uniform(keys[i], step, q.numel(), q.device).view_as(q).to(after.dtype)
            torch.where(largest > 0, after, drawn, out=after)
        after.div_(torch.linalg.vector_norm(after, dim=1, keepdim=True))


def renew(wire: Tensor, factor: Factor, keys: Sequence[int], step: int, following: Tensor, finite: Tensor) -> None:
    """Write the unit columns of every finite factor into ``following``, random ones where they are zero.

    Args:
        wire: the packed factors, as averaged on the wire: fp32, bf16 or fp64.
        factor: their layout.
        keys: of the matrices' random columns.
        step: counts the steps, equal on all ranks.
        following: the packed factors of the next step, fp32 or fp64. Overwritten where the flag is not 0.
        finite: int32, one element a matrix. Set to 0 where the factor is not finite.

    Raises:
        ValueError: a buffer does not fit the layout.
    """
    factor.check(wire, "wire")
    factor.check(following, "following")
    if following.device.type == "cpu":
        _renew_cpu(wire, factor, keys, step, following, finite)
    else:
        renew_reference(wire, factor, keys, step, following, finite)


def draw(factor: Factor, keys: Sequence[int], step: int, following: Tensor) -> None:
    """Fill ``following`` with random unit columns, those of `renew` for zero factors."""
    zeros = torch.zeros_like(following)
    finite = torch.ones(len(keys), dtype=torch.int32, device=following.device)
    renew(zeros, factor, keys, step, following, finite)
