"""Orthogonalise on CPUs: Cholesky QR in fp64, and Gram-Schmidt for factors on which it fails.

    G = P^T P = L L^T,   P <- P L^-T          again if the first result is too inaccurate: G is ill-conditioned

Factors are stored transposed, r x n, so the code reads G = P P^T and P <- L^-1 P. A round leaves errors of
eps |L^-1|^2. One round where they are small, else two, else Gram-Schmidt.

Source: Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding algorithm for
computing a tall-skinny QR factorization on a large-scale parallel system", ScalA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch
from torch import Tensor

from gradwire.kernels.matrix_table import FactorLayout


def orthogonalize_cpu(
    wire: Tensor,
    layout: FactorLayout,
    out: Tensor,
    finite: Tensor,
    *,
    tolerance: float,
    one_round_error: float,
    two_rounds_error: float,
) -> None:
    """`orthogonalize` on a CPU.

    Args:
        wire: the packed factors.
        layout: of the factors.
        out: the packed result. Overwritten.
        finite: int32, one element per factor. Overwritten.
        tolerance: the relative norm at or below which the remainder of a row is dropped.
        one_round_error: the largest error bound that needs no second round.
        two_rounds_error: the error bound from which on Gram-Schmidt takes over.
    """
    sources, targets = layout.views(wire), layout.views(out)
    finite.fill_(1)
    for rank in sorted(set(layout.ranks)):
        members = [i for i, of_factor in enumerate(layout.ranks) if of_factor == rank]
        gram, scale = _unit_gram([sources[i] for i in members])
        inverse, errors = _inverse_cholesky(gram)
        hard = [k for k, error in enumerate(errors) if error > one_round_error]
        if hard:
            inverse[hard] = _inverse_without_dependent(gram[hard], tolerance)
            errors = _errors(inverse)
        for i, transform in zip(members, (inverse * scale[:, None, :]).unbind(), strict=True):
            targets[i].copy_(transform @ sources[i].double())
        for k in hard:
            i = members[k]
            rows = sources[i].double()
            if not rows.isfinite().all():
                targets[i].fill_(torch.nan)
                finite[i] = 0
            elif errors[k] < two_rounds_error:
                basis = (inverse[k] * scale[k]) @ rows
                again, scales = _unit_gram([basis])
                targets[i].copy_((_inverse_cholesky(again)[0] * scales[:, None, :])[0] @ basis)
            else:
                targets[i].copy_(gram_schmidt(rows[None], tolerance)[0])


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

    Every row is orthogonalised twice, because the remainder of the first time can be mostly rounding error.
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
