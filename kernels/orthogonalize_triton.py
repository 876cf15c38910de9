"""Orthogonalize in Triton: small factors by Gram-Schmidt, one program each; large ones by Cholesky QR, cut into tiles.

    G = P^T P = L L^T,   P <- P L^-T          twice, because the first result is as inaccurate as G is ill-conditioned

Factors are stored transposed, r x n, so the code reads G = P P^T and P <- L^-1 P. L^-1 comes from Gaussian elimination
of G, its rows scaled to a unit diagonal, where a row of which too little remains is dropped. Only products with r x n
and matrices of r x r are needed, so n can be cut into tiles. A round leaves errors of eps |L^-1|^2; rows that would
make them too large for the second round to mend are dropped.

Cholesky QR takes five launches: the Gram matrix of every tile; then, twice, L^-1 of every factor, and its product with
every tile.

Source: Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding algorithm for
computing a tall-skinny QR factorization on a large-scale parallel system", ScalA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.common_triton import kernel, load_fields
from gradwire.kernels.layouts import next_power_of_2
from gradwire.kernels.matrix_table import FactorLayout
from gradwire.kernels.orthogonalize import tolerance

# Thresholds, in eps of the result's dtype
PIVOT_EPS = 4  # pivot of a column to drop, in rank eps: a square of its remainder, rounded in fp32. Cholesky QR
GROWTH_EPS = 0.1  # largest |L^-1|^2, in 1 / eps: a second round can mend errors of eps |L^-1|^2 below 0.1. Cholesky QR
#
# Small factors: one program holds one in registers. Numbers of elements, padded to powers of two
SMALL_NUMEL = 1 << 14  # the largest size that spills on no target with 16 warps
SMALL_NUMEL_HIGH_RANK = 1 << 13  # above rank 16, where a thread also holds a product with each column
# A second kernel serves factors of up to 1/8 of the longest; more kernels cost more compilation than they save.
SHORTENING = 8
SMALL_NUM_WARPS = 16  # with 8, up to 255 registers, and 108 spills at rank 64
SHORT_NUM_WARPS = 4  # with 16, ptxas settles for 40 registers and spills
#
# Large factors: cut into tiles
TILE_LENGTH = 128  # rows of P that one program handles
MAX_TILES = 128  # at most this many tiles per factor; longer factors get longer tiles
GRAMS_NUMEL = 1024  # elements of Gram matrices that one program adds up at a time
BLOCK_NUMEL = 1024  # elements of a tile that a program handles at a time; with two r x r matrices, more would spill


def longest_small(rank: int) -> int:
    """The largest length, a power of two, of a factor of ``rank`` columns that one program orthogonalizes."""
    return (SMALL_NUMEL if rank <= 16 else SMALL_NUMEL_HIGH_RANK) // rank


@triton.jit
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


@triton.jit
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


@triton.jit
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
    rank, length, offset = load_fields(layout_ptr, n_factors, factor, 0, 3)
    offs_r = tl.arange(0, RANK)
    offs_n = tl.arange(0, LENGTH)
    p = _load_rows(wire_ptr + offset, offs_r, offs_n, rank, length)  # [RANK, LENGTH]
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(p) < float("inf"), 0, 1), axis=1), axis=0)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))
    p = p / _or_one(tl.max(tl.abs(p), axis=1))[:, None]  # without it, squares would overflow or underflow
    for c in range(0, RANK):
        is_c = offs_r == c
        column = tl.sum(tl.where(is_c[:, None], p, 0.0), axis=0)  # [LENGTH]
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2):  # the remainder of the first time can be mostly rounding error
            products = tl.where(offs_r < c, tl.sum(p * column[None, :], axis=1), 0.0)  # [RANK]
            column -= tl.sum(p * products[:, None], axis=0)
        remainder = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(remainder > TOLERANCE * norm, column / _or_one(remainder), 0.0)
        p = tl.where(is_c[:, None], column[None, :], p)
    p = tl.where(n_bad > 0, float("nan"), p)
    # Reloaded, so that rank, length and mask are not live across the loop.
    rank, length = load_fields(layout_ptr, n_factors, factor, 0, 2, VOLATILE=True)
    _store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)


@triton.jit
def _store_gram(
    gram_ptr,  # [RANK * RANK + RANK]
    gram,  # [RANK, RANK]
    largest,  # [RANK]
    RANK: tl.constexpr,
):
    """Store a Gram matrix, followed by the magnitudes by which its rows were divided."""
    offs_r = tl.arange(0, RANK)
    tl.store(gram_ptr + offs_r[:, None] * RANK + offs_r[None, :], gram)
    tl.store(gram_ptr + RANK * RANK + offs_r, largest)


@triton.jit
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
        ratio = tl.load(largest_ptrs + first * SIZE, mask=mask, other=0) / _or_one(largest)[None, :]  # [TILES, RANK]
        part = tl.load(gram_ptrs + first * SIZE, mask=mask[:, :, None], other=0)  # [TILES, RANK, RANK]
        gram += tl.sum(part * ratio[:, :, None] * ratio[:, None, :], axis=0)
    return gram, largest


@kernel
def _gram_kernel(
    wire_ptr,  # packed factors, of any dtype
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    tiles_ptr,  # [4, programs] int64: `tile_programs`
    grams_ptr,  # [programs, RANK * RANK + RANK] fp32
    n_factors,
    n_programs,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The Gram matrix of one tile of a large factor, of rows divided by their largest magnitudes."""
    program = tl.program_id(0).to(tl.int64)
    factor, begin, end, _ = load_fields(tiles_ptr, n_programs, program, 0, 4)
    rank, length, offset = load_fields(layout_ptr, n_factors, factor, 0, 3)
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        p = _load_rows(wire_ptr + offset, offs_r, start + tl.arange(0, BLOCK), rank, length)
        largest = tl.maximum(largest, tl.max(tl.abs(p), axis=1))
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        p = _load_rows(wire_ptr + offset, offs_r, start + tl.arange(0, BLOCK), rank, length)  # [RANK, BLOCK]
        # inf / inf and NaN make the Gram matrix NaN, by which the next kernel recognizes a factor that is not finite.
        p = p / _or_one(largest)[:, None]
        gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    _store_gram(grams_ptr + program * (RANK * RANK + RANK), gram, largest, RANK)


@triton.jit
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
        added = tl.sum(inverse_row * inverse_row, axis=0) / _or_one(pivot)  # to |T|^2, by row k
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
def _factorize_kernel(
    grams_ptr,  # [tiles, RANK * RANK + RANK] fp32: the Gram matrix of each tile
    layout_ptr,  # [3, factors] int64: `FactorLayout.packed`
    members_ptr,  # [3, members] int64: `factor_programs`
    transforms_ptr,  # [members, RANK * RANK + RANK] fp32, as `_store_gram`: L^-1, and the divisors of the rows before
    finite_ptr,  # [factors] int32
    n_factors,
    n_members,
    PIVOT_PER_RANK: tl.constexpr,
    GROWTH: tl.constexpr,
    RANK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The triangular matrix that orthogonalizes a large factor, from the Gram matrices of its tiles."""
    member = tl.program_id(0).to(tl.int64)
    factor, first_tile, n_tiles = load_fields(members_ptr, n_members, member, 0, 3)
    rank, _, _ = load_fields(layout_ptr, n_factors, factor, 0, 3)
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    gram, largest = _sum_grams(grams_ptr + first_tile * SIZE, n_tiles, RANK, TILES)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(gram) < float("inf"), 0, 1), axis=1), axis=0)
    diagonal = tl.sum(tl.where(offs_r[:, None] == offs_r[None, :], gram, 0.0), axis=1)
    scale = 1 / tl.sqrt(_or_one(diagonal))  # [RANK]
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
    tiles_ptr,  # [4, programs] int64: `tile_programs`
    out_ptr,  # packed factors, fp32; may be `in_ptr`
    next_grams_ptr,  # [programs, RANK * RANK + RANK] fp32, of `out_ptr`; None in the second round
    n_factors,
    n_programs,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of a large factor, multiplied by its triangular matrix."""
    program = tl.program_id(0).to(tl.int64)
    factor, begin, end, member = load_fields(tiles_ptr, n_programs, program, 0, 4)
    rank, length, offset = load_fields(layout_ptr, n_factors, factor, 0, 3)
    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    transform_ptr = transforms_ptr + member * SIZE
    transform = tl.load(transform_ptr + offs_r[:, None] * RANK + offs_r[None, :])  # [RANK, RANK]
    largest = tl.load(transform_ptr + RANK * RANK + offs_r)  # [RANK]
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        p = _load_rows(in_ptr + offset, offs_r, offs_n, rank, length) / _or_one(largest)[:, None]  # [RANK, BLOCK]
        p = tl.dot(transform, p, input_precision="ieee")  # TF32 would lose orthogonality: 2^-11 for each column
        _store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)
        if next_grams_ptr is not None:  # for the second round, while the tile is in registers
            gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    if next_grams_ptr is not None:
        _store_gram(next_grams_ptr + program * SIZE, gram, tl.full((RANK,), 1.0, tl.float32), RANK)


def tile_programs(layout: FactorLayout, large: Sequence[int], block: int) -> list[tuple[int, int, int, int]]:
    """The programs that handle a tile each. Fields: factor, first and last column, its number in ``large``."""
    programs = []
    for member, i in enumerate(large):
        length = max(TILE_LENGTH, -(-layout.lengths[i] // (MAX_TILES * block)) * block)
        for begin in range(0, layout.lengths[i], length):
            programs.append((i, begin, min(begin + length, layout.lengths[i]), member))
    return programs


def factor_programs(tiles: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int]]:
    """The programs that handle a large factor each. Fields: factor, its first tile, number of tiles."""
    factors, _, _, members = zip(*tiles, strict=True)
    firsts = [members.index(member) for member in range(members[-1] + 1)]
    return [(factors[first], first, members.count(member)) for member, first in enumerate(firsts)]


def orthogonalize_triton(wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor) -> None:
    """`orthogonalize` of factors of ranks up to `MAX_RANK`, into fp32: one launch for small ones, five for large."""
    rank = next_power_of_2(max(layout.ranks))
    longest = longest_small(rank)
    small = [i for i, length in enumerate(layout.lengths) if length <= longest]
    large = [i for i, length in enumerate(layout.lengths) if length > longest]
    with torch.cuda.device_of(out):
        if small:
            short = max(1, longest // SHORTENING)
            is_short = max(layout.lengths[i] for i in small) <= short
            _gram_schmidt_kernel[(len(small),)](
                wire_ptr=wire,
                layout_ptr=layout.packed(out.device),
                members_ptr=layout.on_device.get("small", out.device, lambda: [[i] for i in small]),
                out_ptr=out,
                finite_ptr=finite,
                n_factors=len(layout),
                TOLERANCE=tolerance(torch.float32),
                RANK=rank,
                LENGTH=short if is_short else longest,
                num_warps=SHORT_NUM_WARPS if is_short else SMALL_NUM_WARPS,
            )
        if large:
            _orthogonalize_large(wire, layout, out, finite, large, max(16, rank))  # `tl.dot` takes no side below 16


def _orthogonalize_large(
    wire: Tensor, layout: FactorLayout, out: Tensor, finite: Tensor, large: Sequence[int], rank: int
) -> None:
    """Cholesky QR of the factors ``large``, of ranks up to ``rank``."""
    eps, block, size, cache = torch.finfo(torch.float32).eps, BLOCK_NUMEL // rank, rank * (rank + 1), layout.on_device
    tiles_ptr = cache.get("tiles", out.device, lambda: tile_programs(layout, large, block))
    members_ptr = cache.get("members", out.device, lambda: factor_programs(tile_programs(layout, large, block)))
    n_programs = tiles_ptr.shape[1]
    grams = torch.empty(n_programs, size, dtype=torch.float32, device=out.device)
    transforms = torch.empty(len(large), size, dtype=torch.float32, device=out.device)
    shared = {"layout_ptr": layout.packed(out.device), "n_factors": len(layout), "RANK": rank}
    tiles = shared | {
        "tiles_ptr": tiles_ptr,
        "n_programs": n_programs,
        "BLOCK": block,
        "num_warps": 4 if rank == 16 else 8,
    }
    _gram_kernel[(n_programs,)](wire_ptr=wire, grams_ptr=grams, **tiles)
    for source, next_grams in ((wire, grams), (out, None)):
        _factorize_kernel[(len(large),)](
            grams_ptr=grams,
            members_ptr=members_ptr,
            transforms_ptr=transforms,
            finite_ptr=finite,
            n_members=len(large),
            PIVOT_PER_RANK=PIVOT_EPS * eps,
            GROWTH=GROWTH_EPS / eps,
            TILES=max(1, GRAMS_NUMEL // rank**2),
            num_warps=1 if rank <= 32 else 8,  # one warp eliminates fastest; not timed at rank 64
            **shared,
        )
        _apply_kernel[(n_programs,)](
            in_ptr=source, transforms_ptr=transforms, out_ptr=out, next_grams_ptr=next_grams, **tiles
        )
