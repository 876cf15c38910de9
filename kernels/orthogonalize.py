"""Orthogonalize: an orthonormal basis of the column space of every factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm        Gram-Schmidt, in the order of the columns c

Factors are stored transposed (`matrix_table`): column c is row c of an r x n block of memory.

A column is numerically dependent on those before it if its remainder is at most `tolerance` times its own norm. Such a
column is dropped: set to zero. A dropped direction costs nothing, because error feedback sends it again. A wrong
direction, kept, would make the output grow: PyTorch's one-pass Gram-Schmidt doubles it at rank 2 when the gradient has
rank 1. So for every finite input:

    the largest eigenvalue of P^T P is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

Implementations: small factors on a GPU by Gram-Schmidt in one program; large ones by Cholesky QR, which also drops a
column if the columns before it amplify its rounding errors too much, beyond a condition number of about 1000. On CPUs
Cholesky QR in fp64 (Fukaya et al., "CholeskyQR2", ScalA 2014), in one round where its error is small, else in two, and
Gram-Schmidt where it fails; elsewhere `orthogonalize_reference`.

A factor with an inf or NaN becomes NaN throughout, and its flag is cleared.

Traffic: at least r n elements per factor, read and written; a few times that for a factor that does not fit into the
registers of one program: little compared with the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import isnan
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.matrix_table import ALIGN_NUMEL, MAX_RANK, FactorLayout

TOLERANCE_EPS = 64  # remainder / norm of a column to drop. Gram-Schmidt, CPUs: above the rounding errors of 64 columns
# Rounds of Cholesky QR on CPUs, by the bound r eps |L^-1|^2 on the error of a round in fp64
ONE_ROUND_ERROR = 1e-10  # no second round up to here: below fp32's eps, and far below the promised 1e-5
TWO_ROUNDS_ERROR = 1e-6  # Gram-Schmidt from here on: below, a second round corrects the error


def tolerance(dtype: torch.dtype) -> float:
    """The relative norm at or below which the remainder of a column counts as rounding error."""
    return TOLERANCE_EPS * torch.finfo(dtype).eps


def orthogonalize_reference(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """Write an orthonormal basis of every factor's column space into ``out``, with zeros for dependent columns.

    Args:
        wire: the packed factors, summed over the ranks: fp32, bf16 or fp64, of any finite magnitude.
        layout: layout of the factors, each r x n with r <= n.
        out: the packed result, fp32 or fp64. Overwritten; NaN throughout for a factor that is not finite.
        finite: int32, one element per factor. Overwritten: 1, or 0 for a factor that is not finite.
    """
    # Gram-Schmidt in fp64. Factors of one size are handled together. They are padded, because sums may round by
    # alignment: no factor's bits depend on its neighbors.
    sources, targets = layout.views(wire), layout.views(out)
    sizes = list(zip(layout.ranks, layout.lengths, strict=True))
    for size in dict.fromkeys(sizes):
        members, (_, length) = [i for i, each in enumerate(sizes) if each == size], size
        rows = torch.stack([pad(sources[i], (0, -length % ALIGN_NUMEL)) for i in members]).double()
        is_finite = rows.isfinite().all(2).all(1)
        basis = torch.where(is_finite[:, None, None], gram_schmidt(rows, tolerance(out.dtype)), torch.nan)
        torch._foreach_copy_([targets[i] for i in members], list(basis[:, :, :length].unbind()))
        finite[members] = is_finite.to(finite.dtype)


def orthogonalize_cpu(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """`orthogonalize` on a CPU: Cholesky QR in fp64. G = P P^T = L L^T, P <- L^-1 P, for factors stored transposed."""
    sources, targets, largest_loss = layout.cached_views(wire), layout.cached_views(out), tolerance(out.dtype)
    finite.fill_(1)
    # Only the r x r work is batched: the rounding of a batched r x n product depends on the number of factors.
    for members in layout.by_rank:
        gram, scale = _unit_gram(list(map(sources.__getitem__, members)))
        inverse, errors = _inverse_cholesky(gram)
        hard = [k for k, error in enumerate(errors) if error > ONE_ROUND_ERROR]
        if hard:
            inverse[hard] = _inverse_without_dependent(gram[hard], largest_loss)
            errors = _errors(inverse)
        for i, transform in zip(members, (inverse * scale[:, None, :]).unbind(), strict=True):
            targets[i].copy_(transform @ sources[i].double())
        for k in hard:
            i = members[k]
            rows = sources[i].double()
            if not rows.isfinite().all():  # found only here: its Gram matrix has no Cholesky factor
                targets[i].fill_(torch.nan)
                finite[i] = 0
            elif errors[k] < TWO_ROUNDS_ERROR:
                basis = (inverse[k] * scale[k]) @ rows
                again, scales = _unit_gram([basis])
                targets[i].copy_((_inverse_cholesky(again)[0] * scales[:, None, :])[0] @ basis)
            else:
                targets[i].copy_(gram_schmidt(rows[None], largest_loss)[0])


def _unit_gram(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gram matrices of the rows scaled to unit norm, k x r x r, and the scales, k x r. A zero row has scale 1.

    The products are computed one at a time: a batched product may round by the size of the batch.
    """
    rank = factors[0].shape[0]
    gram = torch.empty(len(factors), rank, rank, dtype=torch.float64)
    for factor, product in zip(factors, gram.unbind(), strict=True):
        rows = factor.double()
        torch.mm(rows, rows.mT, out=product)
    squares = gram.diagonal(dim1=1, dim2=2)
    squares += squares == 0
    scale = squares.rsqrt()
    return gram * scale[:, :, None] * scale[:, None, :], scale


def _inverse_cholesky(gram: Tensor) -> tuple[Tensor, list[float]]:
    """L^-1 of Gram matrices, and the error bounds of `_errors`: inf where there is no L^-1."""
    lower, failed = torch.linalg.cholesky_ex(gram)
    inverse: Tensor = torch.linalg.solve_triangular(lower, torch.eye(gram.shape[1], dtype=gram.dtype), upper=False)
    errors = zip(failed.tolist(), _errors(inverse), strict=True)
    return inverse, [torch.inf if has_failed or isnan(error) else error for has_failed, error in errors]


def _inverse_without_dependent(gram: Tensor, tolerance: float) -> Tensor:
    """L^-1 by Gaussian elimination. Rows of which at most ``tolerance`` times their norm remains become zero."""
    rank = gram.shape[1]
    system = torch.cat([gram, torch.eye(rank, dtype=gram.dtype).expand_as(gram)], 2)
    for c in range(rank):
        pivot = system[:, c : c + 1, c : c + 1]
        root = torch.where(pivot > tolerance * tolerance, pivot.rsqrt(), 0)
        row = system[:, c : c + 1].mul_(root)
        system[:, c + 1 :] -= system[:, c + 1 :, c : c + 1] * root * row
    return system[:, :, rank:]


def _errors(inverse: Tensor) -> list[float]:
    """A bound on how far each L^-1 P is from orthonormal: the error of the Gram matrix, r eps, times |L^-1|^2."""
    error_of_gram = inverse.shape[1] * torch.finfo(inverse.dtype).eps
    return [error_of_gram * norm * norm for norm in torch.linalg.vector_norm(inverse, dim=(1, 2)).tolist()]


def gram_schmidt(rows: Tensor, tolerance: float) -> Tensor:
    """Orthonormal bases of a batch of factors, k x r x n, with zeros for dependent rows.

    Every row is orthogonalized twice, because the remainder of the first time can be mostly rounding error.
    """
    largest = rows.abs().amax(2, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)
    norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    basis = torch.zeros_like(rows)
    for c in range(rows.shape[1]):
        column, known = rows[:, c : c + 1], basis[:, :c]
        for _ in range(2 if c > 0 else 0):
            column = torch.baddbmm(column, torch.bmm(column, known.mT), known, alpha=-1)
        norm = torch.linalg.vector_norm(column, dim=2, keepdim=True)
        basis[:, c : c + 1] = torch.where(norm > tolerance * norms[:, c : c + 1], column / norm, 0)
    return basis


def bound_orthogonalize(
    device: torch.device, wire: torch.dtype, out: torch.dtype, largest_rank: int
) -> Callable[..., None]:
    """`orthogonalize_reference` from one dtype into another, of ranks up to ``largest_rank``, or its Triton kernels or
    CPU path. In Triton, small factors take one launch, large ones five.
    """
    if largest_rank <= MAX_RANK and out == torch.float32 and use_triton(device):
        launchers: Any = import_module("gradwire.kernels.orthogonalize_triton")
        return cast("Callable[..., None]", launchers.orthogonalize_triton)
    return orthogonalize_cpu if device.type == "cpu" and torch.float64 not in (wire, out) else orthogonalize_reference
