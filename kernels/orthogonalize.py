"""Orthogonalize: an orthonormal basis of the column space of every factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm        Gram-Schmidt, in the order of the columns c

Factors are stored transposed (`matrix_table`): column c is row c of an r x n block of memory.

A column is numerically dependent on those before it if its remainder is at most `tolerance` times its own norm. Such a
column is dropped: set to zero. A dropped direction costs nothing, because error feedback sends it again. A wrong
direction, kept, would make the output grow: PyTorch's one-pass Gram-Schmidt doubles it at rank 2 when the gradient has
rank 1. So for every finite input:

    the largest eigenvalue of P^T P is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

Implementations: small factors on a GPU by Gram-Schmidt in one program; large ones by Cholesky QR in two rounds (Fukaya
et al., "CholeskyQR2", ScalA 2014), which also drops a column if the columns before it amplify its rounding errors too
much, beyond a condition number of about 1000. Elsewhere `orthogonalize_reference`: Gram-Schmidt in fp64.

A factor with an inf or NaN becomes NaN throughout, and its flag is cleared.

Traffic: at least r n elements per factor, read and written; a few times that for a factor that does not fit into the
registers of one program: little compared with the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import choose
from gradwire.kernels.matrix_table import ALIGN_NUMEL, MAX_RANK, FactorLayout

TOLERANCE_EPS = 64  # remainder / norm of a column to drop. Gram-Schmidt: above the rounding errors of 64 columns


def tolerance(dtype: torch.dtype) -> float:
    """The relative norm at or below which the remainder of a column counts as rounding error."""
    return TOLERANCE_EPS * torch.finfo(dtype).eps


def orthogonalize_reference(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """`orthogonalize` in plain PyTorch: Gram-Schmidt in fp64.

    Factors of one size are handled together. They are padded, because sums may round by alignment: no factor's bits
    depend on its neighbors.
    """
    sources, targets = layout.views(wire), layout.views(out)
    sizes = list(zip(layout.ranks, layout.lengths, strict=True))
    for size in dict.fromkeys(sizes):
        members, (_, length) = [i for i, each in enumerate(sizes) if each == size], size
        rows = torch.stack([pad(sources[i], (0, -length % ALIGN_NUMEL)) for i in members]).double()
        is_finite = rows.isfinite().all(2).all(1)
        basis = torch.where(is_finite[:, None, None], gram_schmidt(rows, tolerance(out.dtype)), torch.nan)
        torch._foreach_copy_([targets[i] for i in members], list(basis[:, :, :length].unbind()))
        finite[members] = is_finite.to(finite.dtype)


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


def orthogonalize(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """Write an orthonormal basis of every factor's column space into ``out``, with zeros for dependent columns.

    One launch for small factors, five for large ones.

    Args:
        wire: the packed factors, summed over the ranks: fp32, bf16 or fp64, of any finite magnitude.
        layout: layout of the factors, each r x n with r <= n.
        out: the packed result, fp32 or fp64. Overwritten; NaN throughout for a factor that is not finite.
        finite: int32, one element per factor. Overwritten: 1, or 0 for a factor that is not finite.

    Raises:
        ValueError: a buffer does not fit the layout.
    """
    layout.check(wire, "wire")
    layout.check(out, "out")
    run = choose(
        out.device,
        "orthogonalize_triton",
        orthogonalize_reference,
        orthogonalize_reference,
        takes_triton=max(layout.ranks) <= MAX_RANK and out.dtype == torch.float32,
    )
    run(wire, layout, out, finite)
