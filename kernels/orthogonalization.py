"""Orthogonalise: an orthonormal basis of the row space of every rank-first factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm       Gram-Schmidt, in the order of the columns c of P

Column c of P is row c of the rank-first factor. A column whose remainder is no more than ``tolerance`` times its own
norm is numerically dependent on those before it: it is dropped, which means set to zero. A dropped direction costs
nothing, because error feedback sends it again; a wrong one, kept, would make the output grow (PyTorch's one-pass
Gram-Schmidt doubles it at rank 2 when the gradient has rank 1). So for every finite input:

    the largest eigenvalue of P P' is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

On a GPU, a column of a factor that is large is also dropped if those before it make its rounding errors grow too much,
beyond a condition of about 1000 (`cholesky_qr`).

A factor with an inf or NaN becomes NaN throughout, and its flag says so.

Traffic: at least r n elements a factor read and written; a few times that for a factor that does not fit into the
registers of one program. It is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.cholesky_qr import (
    cholesky_qr_cpu,
    cholesky_qr_triton,
    gram_schmidt,
    load_rows,
    or_one,
    store_rows,
)
from gradwire.kernels.language import kernel, next_power_of_2, tl
from gradwire.kernels.matrices import ALIGNMENT, MAX_RANK, Factor
from gradwire.kernels.platform import use_triton

# A small factor is orthogonalised in the registers of one program. SMALL is the largest number of
# its elements, padded to powers of two, that no target spills: at high rank fewer, because a thread
# also holds a product with each row.
WARPS = 16
SMALL = 1 << 14
SMALL_HIGH_RANK = 1 << 13  # above rank 16
# The kernel is compiled for the longest small factors, and for buckets of factors at most an eighth
# as long. One variant for each power of two would cost a model more compilations than it saves time.
SHORTENING = 8


def orthogonalize_bytes(numel: int, wire: torch.dtype, out: torch.dtype) -> int:
    """Bytes that orthogonalising ``numel`` elements of factors reads and writes at least."""
    return numel * (wire.itemsize + out.itemsize)


def tolerance(dtype: torch.dtype) -> float:
    """The relative norm at which what remains of a column is taken for rounding error."""
    return 64 * torch.finfo(dtype).eps


def orthogonalize_reference(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    """What `orthogonalize` computes, written for reading: Gram-Schmidt in fp64.

    Factors of one size are handled at once; padded, because sums may round by alignment, so that no factor's bits
    depend on its neighbours.
    """
    sources, targets = factor.views(wire), factor.views(out)
    for members in _of_one_size(factor):
        rows = _stacked(sources, members)
        is_finite = rows.isfinite().all(2).all(1)
        basis = torch.where(is_finite[:, None, None], gram_schmidt(rows, tolerance(out.dtype)), torch.nan)
        torch._foreach_copy_([targets[i] for i in members], _unstacked(basis, factor, members))
        finite[members] = is_finite.to(finite.dtype)


def _of_one_size(factor: Factor) -> list[list[int]]:
    """The factors of each size."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(zip(factor.ranks, factor.lengths, strict=True)):
        groups.setdefault(size, []).append(i)
    return list(groups.values())


def _stacked(sources: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    """Factors of one size in fp64, k x r x n, with zeros in new columns up to the alignment."""
    gap = -sources[members[0]].shape[1] % ALIGNMENT
    return torch.stack([pad(sources[i], (0, gap)) if gap else sources[i] for i in members]).double()


def _unstacked(basis: Tensor, factor: Factor, members: Sequence[int]) -> list[Tensor]:
    """The results without the new columns."""
    return list(basis[:, :, : factor.lengths[members[0]]].unbind())


@kernel
def _gram_schmidt_kernel(
    wire_ptr,
    out_ptr,
    finite_ptr,
    layout_ptr,
    members_ptr,
    n_factors,
    TOLERANCE: tl.constexpr,
    RANK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """A small factor in one program: Gram-Schmidt in registers, twice for each row."""
    factor = tl.load(members_ptr + tl.program_id(0).to(tl.int64))
    rank = tl.load(layout_ptr + factor)
    length = tl.load(layout_ptr + n_factors + factor)
    start = tl.load(layout_ptr + 2 * n_factors + factor)
    offs_r = tl.arange(0, RANK)
    offs_n = tl.arange(0, LENGTH)
    p = load_rows(wire_ptr + start, offs_r, offs_n, rank, length)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(p) < float("inf"), 0, 1), axis=1), axis=0)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))
    p = p / or_one(tl.max(tl.abs(p), axis=1))[:, None]
    for c in range(0, RANK):
        is_c = offs_r == c
        column = tl.sum(tl.where(is_c[:, None], p, 0.0), axis=0)
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2):
            products = tl.where(offs_r < c, tl.sum(p * column[None, :], axis=1), 0.0)
            column -= tl.sum(p * products[:, None], axis=0)
        remainder = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(remainder > TOLERANCE * norm, column / or_one(remainder), 0.0)
        p = tl.where(is_c[:, None], column[None, :], p)
    p = tl.where(n_bad > 0, float("nan"), p)
    # Load the sizes again, or the first masks would occupy registers throughout the loop.
    rank = tl.load(layout_ptr + factor, volatile=True)
    length = tl.load(layout_ptr + n_factors + factor, volatile=True)
    store_rows(out_ptr + start, p, offs_r, offs_n, rank, length)


def can_use_triton(factor: Factor, out: Tensor) -> bool:
    """Whether the kernels take these factors: up to rank 64, into fp32."""
    return use_triton(out.device) and max(factor.ranks) <= MAX_RANK and out.dtype == torch.float32


def longest_small(rank: int) -> int:
    """The largest length of a factor of ``rank`` rows, a power of two, that one program orthogonalises."""
    return (SMALL if rank <= 16 else SMALL_HIGH_RANK) // rank


def _orthogonalize_triton(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    rank = next_power_of_2(max(factor.ranks))
    longest = longest_small(rank)
    small = [i for i, length in enumerate(factor.lengths) if length <= longest]
    large = [i for i, length in enumerate(factor.lengths) if length > longest]
    layout = factor.on_device.get("layout", out.device, lambda: (factor.ranks, factor.lengths, factor.offsets))
    common = {"finite_ptr": finite, "layout_ptr": layout, "n_factors": len(factor.ranks)}
    with torch.cuda.device_of(out):
        if small:
            short = max(1, longest // SHORTENING)
            is_short = max(factor.lengths[i] for i in small) <= short
            _gram_schmidt_kernel[(len(small),)](
                wire_ptr=wire,
                out_ptr=out,
                members_ptr=factor.on_device.get("small", out.device, lambda: [small]),
                **common,
                TOLERANCE=tolerance(torch.float32),
                RANK=rank,
                LENGTH=short if is_short else longest,
                num_warps=WARPS // 4 if is_short else WARPS,
            )
        if large:
            cholesky_qr_triton(wire, factor, large, layout, out, finite)


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
    if can_use_triton(factor, out):
        _orthogonalize_triton(wire, factor, out, finite)
    elif out.device.type == "cpu" and torch.float64 not in (wire.dtype, out.dtype):
        cholesky_qr_cpu(wire, factor, out, finite, tolerance(out.dtype))
    else:
        orthogonalize_reference(wire, factor, out, finite)
