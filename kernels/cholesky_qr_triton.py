"""Cholesky QR in Triton: orthogonalise large factors, cut into tiles.

    G = P^T P = L L^T,   P <- P L^-T          twice, because the first result is as inaccurate as G is ill-conditioned

Factors are stored transposed, r x n, so the code reads G = P P^T and P <- L^-1 P. L^-1 comes from Gaussian elimination
of G, its rows scaled to a unit diagonal, where a row of which too little remains is dropped. Only products with r x n
and matrices of r x r are needed, so n can be cut into tiles. A round leaves errors of eps |L^-1|^2; rows that would
make them too large for the second round to mend are dropped.

Five launches: the Gram matrix of every tile; then, twice, L^-1 of every factor, and its product with every tile.

Source: Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding algorithm for
computing a tall-skinny QR factorization on a large-scale parallel system", ScalA 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.matrix_table import FactorLayout, load_factor
from gradwire.kernels.orthogonalization_triton import load_rows, or_one, store_rows


def _tiles(layout: FactorLayout, large: list[int], block: int, tile_length: int, max_tiles: int) -> list[list[int]]:
    """The programs of Cholesky QR that handle a tile each, [4, programs]: factor, first and last column, its member."""
    programs = []
    for member, i in enumerate(large):
        length = max(tile_length, -(-layout.lengths[i] // (max_tiles * block)) * block)
        for begin in range(0, layout.lengths[i], length):
            programs.append((i, begin, min(begin + length, layout.lengths[i]), member))
    return [list(column) for column in zip(*programs, strict=True)]


def _members(tiles: list[list[int]]) -> list[list[int]]:
    """The programs of Cholesky QR that handle a factor each, [3, members]: factor, its first tile, number of tiles."""
    factors, _, _, members = tiles
    firsts = [members.index(member) for member in range(members[-1] + 1)]
    return [[factors[first] for first in firsts], firsts, [members.count(member) for member in range(len(firsts))]]


@jit
def _load_tile(tiles_ptr, n_programs, program):
    """Decode one program of `_tiles`."""
    factor = tl.load(tiles_ptr + program)
    begin = tl.load(tiles_ptr + n_programs + program)
    end = tl.load(tiles_ptr + 2 * n_programs + program)
    member = tl.load(tiles_ptr + 3 * n_programs + program)
    return factor, begin, end, member


@jit
def _load_member(members_ptr, n_members, member):
    """Decode one program of `_members`."""
    factor = tl.load(members_ptr + member)
    first_tile = tl.load(members_ptr + n_members + member)
    n_tiles = tl.load(members_ptr + 2 * n_members + member)
    return factor, first_tile, n_tiles


@jit
def _gram_of_tile(
    p_ptr,  # [r, n]
    begin,  # first column of the tile
    end,
    rank,
    length,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The Gram matrix of a tile, [RANK, RANK], of rows divided by their largest magnitudes, [RANK]."""
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        p = load_rows(p_ptr, offs_r, start + tl.arange(0, BLOCK), rank, length)
        largest = tl.maximum(largest, tl.max(tl.abs(p), axis=1))
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        p = load_rows(p_ptr, offs_r, start + tl.arange(0, BLOCK), rank, length)  # [RANK, BLOCK]
        # inf / inf and NaN make the Gram matrix NaN, by which the next kernel recognises a factor that is not finite.
        p = p / or_one(largest)[:, None]
        gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    return gram, largest


@jit
def _store_gram(
    gram_ptr,  # [RANK * RANK + RANK]
    gram,  # [RANK, RANK]
    largest,  # [RANK]
    RANK: tl.constexpr,
):
    """Store a Gram matrix, and behind it the magnitudes by which its rows were divided."""
    offs_r = tl.arange(0, RANK)
    tl.store(gram_ptr + offs_r[:, None] * RANK + offs_r[None, :], gram)
    tl.store(gram_ptr + RANK * RANK + offs_r, largest)


@jit
def _sum_grams(
    grams_ptr,  # [tiles, RANK * RANK + RANK]: `_store_gram` of each tile
    n_tiles,
    RANK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The Gram matrix of a factor, [RANK, RANK], of rows divided by their largest magnitudes, [RANK].

    ``TILES`` Grams are loaded at a time, because each round of loads takes the latency of memory.
    """
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_t = tl.arange(0, TILES)
    offs_r = tl.arange(0, RANK)
    largest_ptrs = grams_ptr + RANK * RANK + offs_t[:, None] * SIZE + offs_r[None, :]
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for first in range(0, n_tiles, TILES):
        mask = (offs_t < n_tiles - first)[:, None]
        largest = tl.maximum(largest, tl.max(tl.load(largest_ptrs + first * SIZE, mask=mask, other=0), axis=0))
    gram_ptrs = (
        grams_ptr + offs_t[:, None, None] * SIZE + offs_r[None, :, None] * RANK + tl.arange(0, RANK)[None, None, :]
    )
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for first in range(0, n_tiles, TILES):
        mask = (offs_t < n_tiles - first)[:, None]
        ratio = tl.load(largest_ptrs + first * SIZE, mask=mask, other=0) / or_one(largest)[None, :]  # [TILES, RANK]
        part = tl.load(gram_ptrs + first * SIZE, mask=mask[:, :, None], other=0)  # [TILES, RANK, RANK]
        gram += tl.sum(part * ratio[:, :, None] * ratio[:, None, :], axis=0)
    return gram, largest


@kernel
def _gram_kernel(
    wire_ptr,  # packed factors, of any dtype
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    tiles_ptr,  # [4, programs] int64: `_tiles`
    grams_ptr,  # [programs, RANK * RANK + RANK] fp32
    n_factors,
    n_programs,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The Gram matrix of one tile of a large factor."""
    program = tl.program_id(0).to(tl.int64)
    factor, begin, end, _ = _load_tile(tiles_ptr, n_programs, program)
    rank, length, offset = load_factor(layout_ptr, n_factors, factor)
    gram, largest = _gram_of_tile(wire_ptr + offset, begin, end, rank, length, RANK, BLOCK)
    _store_gram(grams_ptr + program * (RANK * RANK + RANK), gram, largest, RANK)


@jit
def _inverse_cholesky(
    gram,  # [RANK, RANK]
    rank,
    PIVOT_PER_RANK: tl.constexpr,
    GROWTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """T, lower triangular, [RANK, RANK], with T gram T^T = 1, for a Gram matrix of unit diagonal.

    A row of T is zero if its pivot is rounding error, or if it would raise |T|^2 above GROWTH: the rounding errors of
    the product with T, eps |T|^2, would then be more than the second round can mend.
    """
    offs = tl.arange(0, RANK)
    inverse = tl.where(offs[:, None] == offs[None, :], 1.0, 0.0)
    square = 0.0
    for k in range(0, rank):
        is_k = offs == k
        column = tl.sum(tl.where(is_k[None, :], gram, 0.0), axis=1)  # [RANK]
        pivot = tl.sum(tl.where(is_k, column, 0.0), axis=0)
        inverse_row = tl.sum(tl.where(is_k[:, None], inverse, 0.0), axis=0)  # [RANK]
        added = tl.sum(inverse_row * inverse_row, axis=0) / or_one(pivot)
        is_kept = (pivot > rank * PIVOT_PER_RANK) & (square + added < GROWTH)
        square += tl.where(is_kept, added, 0.0)
        root = tl.where(is_kept, 1 / tl.sqrt(or_one(pivot)), 0.0)
        inverse_row *= root
        gram_row = tl.sum(tl.where(is_k[:, None], gram, 0.0), axis=0) * root
        below = tl.where(offs > k, column * root, 0.0)
        gram -= below[:, None] * gram_row[None, :]
        inverse -= below[:, None] * inverse_row[None, :]
        inverse = tl.where(is_k[:, None], inverse_row[None, :], inverse)
    return inverse


@kernel
def _factorize_kernel(
    grams_ptr,  # [tiles, RANK * RANK + RANK] fp32: the Gram matrix of each tile
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    members_ptr,  # [3, members] int64: `_members`
    transforms_ptr,  # [members, RANK * RANK + RANK] fp32, as `_store_gram`: L^-1, and the divisors of the rows before
    finite_ptr,  # [factors] int32
    n_factors,
    n_members,
    PIVOT_PER_RANK: tl.constexpr,
    GROWTH: tl.constexpr,
    RANK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The triangular matrix that orthogonalises a large factor, from the Gram matrices of its tiles."""
    member = tl.program_id(0).to(tl.int64)
    factor, first_tile, n_tiles = _load_member(members_ptr, n_members, member)
    rank, _, _ = load_factor(layout_ptr, n_factors, factor)
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    gram, largest = _sum_grams(grams_ptr + first_tile * SIZE, n_tiles, RANK, TILES)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(gram) < float("inf"), 0, 1), axis=1), axis=0)
    diagonal = tl.sum(tl.where(offs_r[:, None] == offs_r[None, :], gram, 0.0), axis=1)
    scale = 1 / tl.sqrt(or_one(diagonal))  # [RANK]
    unit_gram = gram * scale[:, None] * scale[None, :]
    transform = _inverse_cholesky(unit_gram, rank, PIVOT_PER_RANK, GROWTH, RANK)
    # Its columns are not divided by the magnitudes, too: the two scales together may overflow.
    transform = tl.where(n_bad > 0, float("nan"), transform * scale[None, :])
    _store_gram(transforms_ptr + member * SIZE, transform, largest, RANK)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))


@kernel
def _apply_kernel(
    in_ptr,  # packed factors, of any dtype
    transforms_ptr,  # [members, RANK * RANK + RANK] fp32: of `_factorize_kernel`
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    tiles_ptr,  # [4, programs] int64: `_tiles`
    out_ptr,  # packed factors, fp32; may be `in_ptr`
    next_grams_ptr,  # [programs, RANK * RANK + RANK] fp32, of `out_ptr`; None in the second round
    n_factors,
    n_programs,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of a large factor, multiplied by its triangular matrix."""
    program = tl.program_id(0).to(tl.int64)
    factor, begin, end, member = _load_tile(tiles_ptr, n_programs, program)
    rank, length, offset = load_factor(layout_ptr, n_factors, factor)
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    transform_ptr = transforms_ptr + member * SIZE
    transform = tl.load(transform_ptr + offs_r[:, None] * RANK + offs_r[None, :])
    largest = tl.load(transform_ptr + RANK * RANK + offs_r)
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        p = load_rows(in_ptr + offset, offs_r, offs_n, rank, length) / or_one(largest)[:, None]  # [RANK, BLOCK]
        p = tl.dot(transform, p, input_precision="ieee")
        store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)
        if next_grams_ptr is not None:
            gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    if next_grams_ptr is not None:
        _store_gram(next_grams_ptr + program * SIZE, gram, tl.full((RANK,), 1.0, tl.float32), RANK)


def cholesky_qr_triton(
    wire: Tensor,
    layout: FactorLayout,
    large: list[int],
    out: Tensor,
    finite: Tensor,
    *,
    tile_length: int,
    max_tiles: int,
    block_numel: int,
    grams_numel: int,
    grams_num_warps: int,
    pivot_per_rank: float,
    growth: float,
) -> None:
    """Orthogonalise the factors ``large`` of ``wire`` into ``out``: five launches. Operands as in `orthogonalize`.

    Args:
        wire: the packed factors.
        layout: of the factors.
        large: the indices of the factors to orthogonalise.
        out: the packed result, fp32. Overwritten.
        finite: the flags of all factors. Those of ``large`` are overwritten.
        tile_length: columns of the r x n block that one program handles.
        max_tiles: the most tiles of a factor; those of longer factors are longer.
        block_numel: elements of a tile that are handled at a time.
        grams_numel: elements of Gram matrices that are added up at a time.
        grams_num_warps: of a program that adds them up.
        pivot_per_rank: times the rank, the pivot at or below which a row is dropped.
        growth: the largest |L^-1|^2, which bounds the rows that are kept.
    """
    device, cache = out.device, layout.on_device
    rank = max(16, next_power_of_2(max(layout.ranks)))  # `tl.dot` accepts no side shorter than 16
    block, size = block_numel // rank, rank * rank + rank
    tiles = cache.get("tiles", device, lambda: _tiles(layout, large, block, tile_length, max_tiles))
    members = cache.get("members", device, lambda: _members(_tiles(layout, large, block, tile_length, max_tiles)))
    n_programs, n_members = tiles.shape[1], members.shape[1]
    grams = torch.empty(n_programs, size, dtype=torch.float32, device=device)
    transforms = torch.empty(n_members, size, dtype=torch.float32, device=device)
    of_tiles = {
        "layout_ptr": layout.packed(device),
        "tiles_ptr": tiles,
        "n_factors": len(layout),
        "n_programs": n_programs,
        "RANK": rank,
        "BLOCK": block,
        "num_warps": 4 if rank == 16 else 8,
    }
    _gram_kernel[(n_programs,)](wire_ptr=wire, grams_ptr=grams, **of_tiles)
    for source, next_grams in ((wire, grams), (out, None)):
        _factorize_kernel[(n_members,)](
            grams_ptr=grams,
            layout_ptr=layout.packed(device),
            members_ptr=members,
            transforms_ptr=transforms,
            finite_ptr=finite,
            n_factors=len(layout),
            n_members=n_members,
            PIVOT_PER_RANK=pivot_per_rank,
            GROWTH=growth,
            RANK=rank,
            TILES=max(1, grams_numel // rank**2),
            num_warps=grams_num_warps,
        )
        _apply_kernel[(n_programs,)](
            in_ptr=source, transforms_ptr=transforms, out_ptr=out, next_grams_ptr=next_grams, **of_tiles
        )
