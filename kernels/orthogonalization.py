"""Orthogonalise: an orthonormal basis of the row space of every rank-first factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm       Gram-Schmidt, in the order of the columns c of P

Column c of P is row c of the rank-first factor. A column whose remainder is no more than ``tolerance`` times its own
norm is numerically dependent on those before it: it is dropped, which means set to zero. A dropped direction costs
nothing, because error feedback sends it again; a wrong one, kept, would make the output grow (PyTorch's one-pass
Gram-Schmidt doubles it at rank 2 when the gradient has rank 1). So for every finite input:

    the largest eigenvalue of P P' is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

A factor with an inf or NaN becomes NaN throughout, and its flag says so.

Traffic: a few times r n elements a factor, which is small beside the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.matrices import Factor


def tolerance(dtype: torch.dtype) -> float:
    """The relative norm at which what remains of a column is taken for rounding error."""
    return 64 * torch.finfo(dtype).eps


def orthogonalize_reference(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    """What `orthogonalize` computes, written for reading: Gram-Schmidt, twice, in fp64."""
    for i, (w, p) in enumerate(zip(factor.views(wire), factor.views(out), strict=True)):
        if not w.isfinite().all():
            p.fill_(torch.nan)
            finite[i] = 0
            continue
        finite[i] = 1
        basis = w.to(torch.float64, copy=True)
        for c in range(len(basis)):
            column = basis[c]
            largest = column.abs().max()
            if largest > 0:
                column /= largest
            norm = column.norm()
            for _ in range(2):
                column -= (basis[:c] @ column) @ basis[:c]
            remainder = column.norm()
            if remainder > tolerance(out.dtype) * norm:
                column /= remainder
            else:
                column.zero_()
        p.copy_(basis)


def _orthogonalize_cpu(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    all_finite = bool(wire.isfinite().all())
    limit = tolerance(out.dtype)
    finite.fill_(1)
    for i, (w, p) in enumerate(zip(factor.views(wire), factor.views(out), strict=True)):
        if not all_finite and not w.isfinite().all():
            p.fill_(torch.nan)
            finite[i] = 0
            continue
        # Scaled, because squares of a column must neither overflow nor vanish.
        largest = w.abs().amax(1, keepdim=True)
        scaled = w.to(out.dtype) / torch.where(largest > 0, largest, 1)
        # Householder's QR is orthonormal for any input, and |R_cc| is the norm of the remainder of column c.
        basis, triangle = torch.linalg.qr(scaled.t())
        diagonal = triangle.diagonal()
        kept = diagonal.abs() > limit * torch.linalg.vector_norm(triangle, dim=0)
        p.copy_((basis * torch.where(kept, diagonal.sign(), 0)).t())


def orthogonalize(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    """Write an orthonormal basis of every factor's row space into ``out``, with zeros for dependent rows.

    Args:
        wire: the packed factors, summed over the ranks: fp32, bf16 or fp64, of any finite magnitude.
        factor: their layout, each r x n with r <= n.
        out: the packed result, fp32 or fp64. Overwritten; NaN throughout for a factor that is not finite.
        finite: int32, one element a factor. Overwritten: 1, or 0 for a factor that is not finite.

    Raises:
        ValueError: a buffer does not fit the layout.
    """
    factor.check(wire, "wire")
    factor.check(out, "out")
    if out.device.type == "cpu":
        _orthogonalize_cpu(wire, factor, out, finite)
    else:
        orthogonalize_reference(wire, factor, out, finite)
