"""Orthogonalise: an orthonormal basis of the column space of every factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm        Gram-Schmidt, in the order of the columns c

Factors are stored transposed (`matrix_table`): column c is row c of an r x n block of memory.

A column is numerically dependent on those before it if its remainder is at most `tolerance` times its own norm. Such a
column is dropped: set to zero. A dropped direction costs nothing, because error feedback sends it again. A wrong
direction, kept, would make the output grow: PyTorch's one-pass Gram-Schmidt doubles it at rank 2 when the gradient has
rank 1. So for every finite input:

    the largest eigenvalue of P^T P is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

Implementations: small factors on a GPU by Gram-Schmidt in one program; large ones by Cholesky QR, which also drops a
column if the columns before it amplify its rounding errors too much, beyond a condition number of about 1000. On CPUs
Cholesky QR in fp64; elsewhere `orthogonalize_reference`.

A factor with an inf or NaN becomes NaN throughout, and its flag is cleared.

Traffic: at least r n elements per factor, read and written; a few times that for a factor that does not fit into the
registers of one program. It is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.cholesky_qr_triton import cholesky_qr_triton
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.language import next_power_of_2
from gradwire.kernels.matrix_table import ALIGN_NUMEL, MAX_RANK, FactorLayout
from gradwire.kernels.orthogonalization_cpu import gram_schmidt, orthogonalize_cpu
from gradwire.kernels.orthogonalization_triton import gram_schmidt_triton

# All thresholds of all implementations, which take them as arguments. eps is that of the result's dtype.
#
# Columns to drop
TOLERANCE_EPS = 64  # remainder / norm, in eps. Gram-Schmidt and CPUs: above the rounding errors of 64 columns
PIVOT_EPS = 4  # pivot, in rank eps. Cholesky QR on GPUs: pivots are squares of remainders, rounded in fp32
GROWTH_EPS = 0.1  # |L^-1|^2, in 1 / eps. Cholesky QR on GPUs: a second round can mend errors of eps |L^-1|^2 below 0.1
#
# Small factors on GPUs: one program holds one in registers. Numbers of elements, padded to powers of two
SMALL_NUMEL = 1 << 14  # the most that spill on no target with 16 warps
SMALL_NUMEL_HIGH_RANK = 1 << 13  # above rank 16, where a thread also holds a product with each column
# A second kernel serves factors of up to 1/8 of the longest; more kernels cost more compilation than they save.
SHORTENING = 8
SMALL_NUM_WARPS = 16  # with 8, up to 255 registers, and 108 spills at rank 64
SHORT_NUM_WARPS = 4  # with 16, ptxas settles for 40 registers and spills
#
# Large factors on GPUs: cut into tiles
TILE_LENGTH = 512  # rows of P that one program handles
MAX_TILES = 128  # of a factor
GRAMS_NUMEL = 1 << 13  # elements of Gram matrices that one program adds up at a time; with twice as many it spills
GRAMS_NUM_WARPS = 16
BLOCK_NUMEL = 1024  # elements it handles at a time: beside two r x r matrices, more would spill at rank 64
#
# Rounds of Cholesky QR on CPUs, by the bound r eps |L^-1|^2 on the error of a round in fp64
ONE_ROUND_ERROR = 1e-10  # no second round up to here: below fp32's eps, and far below the promised 1e-5
TWO_ROUNDS_ERROR = 1e-6  # Gram-Schmidt from here on: below, a second round mends the error


def orthogonalize_bytes(numel: int, wire: torch.dtype, out: torch.dtype) -> int:
    """Bytes that orthogonalising ``numel`` elements of factors reads and writes at least."""
    return numel * (wire.itemsize + out.itemsize)


def tolerance(dtype: torch.dtype) -> float:
    """The relative norm at or below which the remainder of a column counts as rounding error."""
    return TOLERANCE_EPS * torch.finfo(dtype).eps


def orthogonalize_reference(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """`orthogonalize` in plain PyTorch: Gram-Schmidt in fp64.

    Factors of one size are handled together. They are padded, because sums may round by alignment: no factor's bits
    depend on its neighbours.
    """
    sources, targets = layout.views(wire), layout.views(out)
    for members in _of_one_size(layout):
        rows = _stacked(sources, members)
        is_finite = rows.isfinite().all(2).all(1)
        basis = torch.where(is_finite[:, None, None], gram_schmidt(rows, tolerance(out.dtype)), torch.nan)
        torch._foreach_copy_([targets[i] for i in members], _unstacked(basis, layout, members))
        finite[members] = is_finite.to(finite.dtype)


def _of_one_size(layout: FactorLayout) -> list[list[int]]:
    """The indices of the factors of each size."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(zip(layout.ranks, layout.lengths, strict=True)):
        groups.setdefault(size, []).append(i)
    return list(groups.values())


def _stacked(sources: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    """Factors of one size in fp64, k x r x n, with n padded by zeros to the alignment."""
    gap = -sources[members[0]].shape[1] % ALIGN_NUMEL
    return torch.stack([pad(sources[i], (0, gap)) if gap else sources[i] for i in members]).double()


def _unstacked(basis: Tensor, layout: FactorLayout, members: Sequence[int]) -> list[Tensor]:
    """The results without the padding."""
    return list(basis[:, :, : layout.lengths[members[0]]].unbind())


def can_use_triton(layout: FactorLayout, out: Tensor) -> bool:
    """Whether the Triton kernels accept these factors: ranks up to `MAX_RANK`, into fp32."""
    return use_triton(out.device) and max(layout.ranks) <= MAX_RANK and out.dtype == torch.float32


def longest_small(rank: int) -> int:
    """The largest length, a power of two, of a factor of ``rank`` columns that one program orthogonalises."""
    return (SMALL_NUMEL if rank <= 16 else SMALL_NUMEL_HIGH_RANK) // rank


def _orthogonalize_triton(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    longest = longest_small(next_power_of_2(max(layout.ranks)))
    small = [i for i, length in enumerate(layout.lengths) if length <= longest]
    large = [i for i, length in enumerate(layout.lengths) if length > longest]
    eps = torch.finfo(torch.float32).eps
    with torch.cuda.device_of(out):
        if small:
            short = max(1, longest // SHORTENING)
            is_short = max(layout.lengths[i] for i in small) <= short
            gram_schmidt_triton(
                wire,
                layout,
                small,
                out,
                finite,
                padded_length=short if is_short else longest,
                tolerance=tolerance(torch.float32),
                num_warps=SHORT_NUM_WARPS if is_short else SMALL_NUM_WARPS,
            )
        if large:
            cholesky_qr_triton(
                wire,
                layout,
                large,
                out,
                finite,
                tile_length=TILE_LENGTH,
                max_tiles=MAX_TILES,
                block_numel=BLOCK_NUMEL,
                grams_numel=GRAMS_NUMEL,
                grams_num_warps=GRAMS_NUM_WARPS,
                pivot_per_rank=PIVOT_EPS * eps,
                growth=GROWTH_EPS / eps,
            )


def orthogonalize(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """Write an orthonormal basis of every factor's column space into ``out``, with zeros for dependent columns.

    Args:
        wire: the packed factors, summed over the ranks: fp32, bf16 or fp64, of any finite magnitude.
        layout: of the factors, each r x n with r <= n.
        out: the packed result, fp32 or fp64. Overwritten; NaN throughout for a factor that is not finite.
        finite: int32, one element per factor. Overwritten: 1, or 0 for a factor that is not finite.

    Raises:
        ValueError: a buffer does not fit the layout.
    """
    layout.check(wire, "wire")
    layout.check(out, "out")
    if can_use_triton(layout, out):
        _orthogonalize_triton(wire, layout, out, finite)
    elif out.device.type == "cpu" and torch.float64 not in (wire.dtype, out.dtype):
        orthogonalize_cpu(
            wire,
            layout,
            out,
            finite,
            tolerance=tolerance(out.dtype),
            one_round_error=ONE_ROUND_ERROR,
            two_rounds_error=TWO_ROUNDS_ERROR,
        )
    else:
        orthogonalize_reference(wire, layout, out, finite)
