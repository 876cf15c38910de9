"""Orthogonalise in Triton: Gram-Schmidt for small factors, in one program; Cholesky QR for large ones, in tiles.

    G = P^T P = L L^T,   P <- P L^-T          twice, because the first result is as inaccurate as G is ill-conditioned

Factors are stored transposed, r x n, so the code reads G = P P^T and P <- L^-1 P. L^-1 comes from Gaussian elimination
of G, its rows scaled to a unit diagonal, where a row of which too little remains is dropped. Only products with r x n
and matrices of r x r are needed, so n can be cut into tiles. A round leaves errors of eps |L^-1|^2; rows that would
make them too large for the second round to mend are dropped.

Source: Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding algorithm for
computing a tall-skinny QR factorization on a large-scale parallel system", ScalA 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.matrix_table import FactorLayout, load_factor, reload_factor_size


@jit
def _load_rows(
    ptr,  # [r, n]
    offs_r,  # [RANK]
    offs_n,  # [BLOCK]
    rank,
    length,
):
    """A block of a factor in fp32, [RANK, BLOCK], with zeros beyond its ends."""
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    return tl.load(ptr + offs_r[:, None] * length + offs_n[None, :], mask=mask, other=0).to(tl.float32)


@jit
def _store_rows(
    ptr,  # [r, n]
    x,  # [RANK, BLOCK]
    offs_r,  # [RANK]
    offs_n,  # [BLOCK]
    rank,
    length,
):
    """Store a block of a factor, without the elements beyond the factor's ends."""
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    tl.store(ptr + offs_r[:, None] * length + offs_n[None, :], x, mask=mask)


@jit
def _or_one(x):
    """``x`` where it is positive, else 1: a divisor."""
    return tl.where(x > 0, x, 1.0)


@kernel
def _gram_schmidt_kernel(
    wire_ptr,  # packed factors, of any dtype
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    members_ptr,  # [programs] int64: the factor of each program
    out_ptr,  # packed factors, fp32
    finite_ptr,  # [factors] int32
    n_factors,
    TOLERANCE: tl.constexpr,
    RANK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """A small factor in one program: Gram-Schmidt in registers, twice for each row."""
    factor = tl.load(members_ptr + tl.program_id(0).to(tl.int64))
    rank, length, offset = load_factor(layout_ptr, n_factors, factor)
    offs_r = tl.arange(0, RANK)
    offs_n = tl.arange(0, LENGTH)
    p = _load_rows(wire_ptr + offset, offs_r, offs_n, rank, length)  # [RANK, LENGTH]
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(p) < float("inf"), 0, 1), axis=1), axis=0)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))
    p = p / _or_one(tl.max(tl.abs(p), axis=1))[:, None]  # else squares would overflow or underflow
    for c in range(0, RANK):
        is_c = offs_r == c
        column = tl.sum(tl.where(is_c[:, None], p, 0.0), axis=0)  # [LENGTH]
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2):
            products = tl.where(offs_r < c, tl.sum(p * column[None, :], axis=1), 0.0)  # [RANK]
            column -= tl.sum(p * products[:, None], axis=0)
        remainder = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(remainder > TOLERANCE * norm, column / _or_one(remainder), 0.0)
        p = tl.where(is_c[:, None], column[None, :], p)
    p = tl.where(n_bad > 0, float("nan"), p)
    rank, length = reload_factor_size(layout_ptr, n_factors, factor)
    _store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)


def gram_schmidt_triton(
    wire: Tensor,
    layout: FactorLayout,
    small: list[int],
    out: Tensor,
    finite: Tensor,
    *,
    padded_length: int,
    tolerance: float,
    num_warps: int,
) -> None:
    """Orthogonalise the factors ``small`` of ``wire`` into ``out``: one launch. Operands as in `orthogonalize`.

    Args:
        wire: the packed factors.
        layout: of the factors.
        small: the indices of the factors to orthogonalise.
        out: the packed result, fp32. Overwritten.
        finite: the flags of all factors. Those of ``small`` are overwritten.
        padded_length: a power of two, at least as large as the length of each factor.
        tolerance: the relative norm at or below which the remainder of a row is dropped.
        num_warps: of a program.
    """
    _gram_schmidt_kernel[(len(small),)](
        wire_ptr=wire,
        layout_ptr=layout.packed(out.device),
        members_ptr=layout.on_device.get("small", out.device, lambda: [small]),
        out_ptr=out,
        finite_ptr=finite,
        n_factors=len(layout),
        TOLERANCE=tolerance,
        RANK=next_power_of_2(max(layout.ranks)),
        LENGTH=padded_length,
        num_warps=num_warps,
    )


def _tiles(layout: FactorLayout, large: list[int], tile_length: int) -> list[list[int]]:
    """The programs of Cholesky QR, [4, programs]: factor, tile, first program of the factor, number of its tiles."""
    programs: list[tuple[int, int, int, int]] = []
    for i in large:
        first, n_tiles = len(programs), -(-layout.lengths[i] // tile_length)
        programs += [(i, tile, first, n_tiles) for tile in range(n_tiles)]
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def _load_tile(tiles_ptr, n_programs, program):
    """Decode one program of `_tiles`."""
    factor = tl.load(tiles_ptr + program)
    tile = tl.load(tiles_ptr + n_programs + program)
    first_program = tl.load(tiles_ptr + 2 * n_programs + program)
    n_tiles = tl.load(tiles_ptr + 3 * n_programs + program)
    return factor, tile, first_program, n_tiles


@jit
def _gram_of_tile(
    p_ptr,  # [r, n]
    first,  # column of the tile
    rank,
    length,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The Gram matrix of a tile, [RANK, RANK], of rows divided by their largest magnitudes, [RANK]."""
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = _load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)
        largest = tl.maximum(largest, tl.max(tl.abs(p), axis=1))
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = _load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)  # [RANK, BLOCK]
        # inf / inf and NaN make the Gram matrix NaN, by which the next kernel recognises a factor that is not finite.
        p = p / _or_one(largest)[:, None]
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
):
    """The Gram matrix of a factor, [RANK, RANK], of rows divided by their largest magnitudes, [RANK]."""
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    i = 0
    while i < n_tiles:
        largest = tl.maximum(largest, tl.load(grams_ptr + i * SIZE + RANK * RANK + offs_r))
        i += 1
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    i = 0
    while i < n_tiles:
        ratio = tl.load(grams_ptr + i * SIZE + RANK * RANK + offs_r) / _or_one(largest)
        part = tl.load(grams_ptr + i * SIZE + offs_r[:, None] * RANK + offs_r[None, :])
        gram += part * ratio[:, None] * ratio[None, :]
        i += 1
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
    TILE: tl.constexpr,
):
    """The Gram matrix of one tile of a large factor."""
    program = tl.program_id(0).to(tl.int64)
    factor, tile, _, _ = _load_tile(tiles_ptr, n_programs, program)
    rank, length, offset = load_factor(layout_ptr, n_factors, factor)
    gram, largest = _gram_of_tile(wire_ptr + offset, tile * TILE, rank, length, RANK, BLOCK, TILE)
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
    for k in range(0, RANK):
        is_k = offs == k
        column = tl.sum(tl.where(is_k[None, :], gram, 0.0), axis=1)  # [RANK]
        pivot = tl.sum(tl.where(is_k, column, 0.0), axis=0)
        inverse_row = tl.sum(tl.where(is_k[:, None], inverse, 0.0), axis=0)  # [RANK]
        added = tl.sum(inverse_row * inverse_row, axis=0) / _or_one(pivot)
        is_kept = (pivot > rank * PIVOT_PER_RANK) & (square + added < GROWTH)
        square += tl.where(is_kept, added, 0.0)
        root = tl.where(is_kept, 1 / tl.sqrt(_or_one(pivot)), 0.0)
        inverse_row *= root
        gram_row = tl.sum(tl.where(is_k[:, None], gram, 0.0), axis=0) * root
        below = tl.where(offs > k, column * root, 0.0)
        gram -= below[:, None] * gram_row[None, :]
        inverse -= below[:, None] * inverse_row[None, :]
        inverse = tl.where(is_k[:, None], inverse_row[None, :], inverse)
    return inverse


@kernel
def _apply_kernel(
    in_ptr,  # packed factors, of any dtype
    grams_ptr,  # [programs, RANK * RANK + RANK] fp32, of `in_ptr`
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    tiles_ptr,  # [4, programs] int64: `_tiles`
    out_ptr,  # packed factors, fp32; may be `in_ptr`
    next_grams_ptr,  # [programs, RANK * RANK + RANK] fp32, of `out_ptr`; None in the second round
    finite_ptr,  # [factors] int32; written in the second round
    n_factors,
    n_programs,
    PIVOT_PER_RANK: tl.constexpr,
    GROWTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of a large factor, orthogonalised by its Gram matrix, which every program factorises for itself."""
    program = tl.program_id(0).to(tl.int64)
    factor, tile, first_program, n_tiles = _load_tile(tiles_ptr, n_programs, program)
    rank, length, offset = load_factor(layout_ptr, n_factors, factor)
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    gram, largest = _sum_grams(grams_ptr + first_program * SIZE, n_tiles, RANK)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(gram) < float("inf"), 0, 1), axis=1), axis=0)
    diagonal = tl.sum(tl.where(offs_r[:, None] == offs_r[None, :], gram, 0.0), axis=1)
    scale = 1 / tl.sqrt(_or_one(diagonal))  # [RANK]
    unit_gram = gram * scale[:, None] * scale[None, :]
    transform = _inverse_cholesky(unit_gram, rank, PIVOT_PER_RANK, GROWTH, RANK)
    # The rows of the factor are divided by their largest magnitude before: the two scales together may overflow.
    transform = tl.where(n_bad > 0, float("nan"), transform * scale[None, :])
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for block in range(0, TILE, BLOCK):
        offs_n = tile * TILE + block + tl.arange(0, BLOCK)
        p = _load_rows(in_ptr + offset, offs_r, offs_n, rank, length) / _or_one(largest)[:, None]  # [RANK, BLOCK]
        p = tl.dot(transform, p, input_precision="ieee")
        _store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)
        if next_grams_ptr is not None:
            gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    if next_grams_ptr is not None:
        _store_gram(next_grams_ptr + program * SIZE, gram, tl.full((RANK,), 1.0, tl.float32), RANK)
    else:
        tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))


def cholesky_qr_triton(
    wire: Tensor,
    layout: FactorLayout,
    large: list[int],
    out: Tensor,
    finite: Tensor,
    *,
    tile_length: int,
    block_numel: int,
    pivot_per_rank: float,
    growth: float,
) -> None:
    """Orthogonalise the factors ``large`` of ``wire`` into ``out``: three launches. Operands as in `orthogonalize`.

    Args:
        wire: the packed factors.
        layout: of the factors.
        large: the indices of the factors to orthogonalise.
        out: the packed result, fp32. Overwritten.
        finite: the flags of all factors. Those of ``large`` are overwritten.
        tile_length: columns of the r x n block that one program handles.
        block_numel: elements that it handles at a time.
        pivot_per_rank: times the rank, the pivot at or below which a row is dropped.
        growth: the largest |L^-1|^2, which bounds the rows that are kept.
    """
    tiles = layout.on_device.get("tiles", out.device, lambda: _tiles(layout, large, tile_length))
    n_programs = tiles.shape[1]
    rank = max(16, next_power_of_2(max(layout.ranks)))  # `tl.dot` accepts no side shorter than 16
    grams = torch.empty(2, n_programs, rank * rank + rank, dtype=torch.float32, device=out.device)
    common = {
        "layout_ptr": layout.packed(out.device),
        "tiles_ptr": tiles,
        "n_factors": len(layout),
        "n_programs": n_programs,
        "RANK": rank,
        "BLOCK": block_numel // rank,
        "TILE": tile_length,
        "num_warps": 4 if rank == 16 else 8,
    }
    _gram_kernel[(n_programs,)](wire_ptr=wire, grams_ptr=grams[0], **common)
    for source, first, second in ((wire, grams[0], grams[1]), (out, grams[1], None)):
        _apply_kernel[(n_programs,)](
            in_ptr=source,
            grams_ptr=first,
            out_ptr=out,
            next_grams_ptr=second,
            finite_ptr=finite,
            PIVOT_PER_RANK=pivot_per_rank,
            GROWTH=growth,
            **common,
        )
