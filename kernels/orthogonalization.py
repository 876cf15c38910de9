"""Orthogonalise: an orthonormal basis of the row space of every rank-first factor of a bucket.

    p_c = (w_c - sum over d < c of <p_d, w_c> p_d) / norm       Gram-Schmidt, in the order of the columns c of P

Column c of P is row c of the rank-first factor. A column whose remainder is no more than ``tolerance`` times its own
norm is numerically dependent on those before it: it is dropped, which means set to zero. A dropped direction costs
nothing, because error feedback sends it again; a wrong one, kept, would make the output grow (PyTorch's one-pass
Gram-Schmidt doubles it at rank 2 when the gradient has rank 1). So for every finite input:

    the largest eigenvalue of P P' is at most 1 + 1e-5, the kept columns are orthonormal to 1e-5, the others are zero.

A factor with an inf or NaN becomes NaN throughout, and its flag says so.

Traffic: at least r n elements a factor read and written; a few times that for a factor that does not fit into the
registers of one program. It is small beside the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.language import jit, next_power_of_2, tl
from gradwire.kernels.matrices import ALIGNMENT, MAX_RANK, Factor
from gradwire.kernels.platform import use_triton

# Elements of a factor in the registers of one program: 64 for each of 256 threads, and as many again at work.
SMALL = 1 << 14
# A program works through a tile of 512 columns of a large factor, 1024 elements at a time: beside two matrices of
# r x r, more would not fit into registers at rank 64.
TILE = 512
BLOCK = 1024
# What remains of a row in units of its norm, from which on one round of Cholesky QR in fp64 is accurate to 1e-10.
ACCURATE = 1e-3


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
        basis = torch.where(is_finite[:, None, None], _gram_schmidt(rows, tolerance(out.dtype)), torch.nan)
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


def _gram_schmidt(rows: Tensor, limit: float) -> Tensor:
    """Of a batch of factors, k x r x n: every row twice, for what is left of it can be mostly rounding errors."""
    largest = rows.abs().amax(2, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)
    norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    basis = torch.zeros_like(rows)
    for c in range(rows.shape[1]):
        column, known = rows[:, c : c + 1], basis[:, :c]
        for _ in range(2 if c > 0 else 0):
            column = torch.baddbmm(column, torch.bmm(column, known.mT), known, alpha=-1)
        norm = torch.linalg.vector_norm(column, dim=2, keepdim=True)
        basis[:, c : c + 1] = torch.where(norm > limit * norms[:, c : c + 1], column / norm, 0)
    return basis


def _orthogonalize_cpu(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    """Cholesky QR in fp64, because Gram matrices square the condition: P P' = L L', and L^-1 P has Gram-Schmidt's rows.

    A factor with a row that is nearly or wholly dependent takes a second round.
    """
    sources, targets = factor.views(wire), factor.views(out)
    finite.fill_(1)
    for members in _of_one_size(factor):
        rows = _stacked(sources, members)
        gram = _products(rows, rows.mT)
        inverse, is_accurate = _inverse_cholesky_cpu(gram)
        hard = (~is_accurate).nonzero()[:, 0]
        if len(hard) == 0:
            basis = _products(inverse, rows)
        else:
            inverse[hard] = _inverse_without_dependent(gram[hard], tolerance(out.dtype))
            basis = _products(inverse, rows)
            again = basis[hard]
            basis[hard] = _products(_inverse_cholesky_cpu(_products(again, again.mT))[0], again)
            for k in hard.tolist():
                if not rows[k].isfinite().all():
                    basis[k], finite[members[k]] = torch.nan, 0
        torch._foreach_copy_([targets[i] for i in members], _unstacked(basis, factor, members))


def _inverse_cholesky_cpu(gram: Tensor) -> tuple[Tensor, Tensor]:
    """L^-1 for Gram matrices k x r x r, and whether it makes rows orthonormal to 1e-10. Rows of zeros stay zeros."""
    squares = gram.diagonal(dim1=1, dim2=2)
    lower, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed((squares == 0).to(gram.dtype)))
    identity = torch.eye(gram.shape[1], dtype=gram.dtype)
    is_accurate = (lower.diagonal(dim1=1, dim2=2) > ACCURATE * squares.sqrt()).all(1) & (failed == 0)
    return torch.linalg.solve_triangular(lower, identity, upper=False), is_accurate


def _inverse_without_dependent(gram: Tensor, limit: float) -> Tensor:
    """L^-1 by Gaussian elimination, with zeros in the rows of which no more remains than ``limit`` times their norm."""
    rank = gram.shape[1]
    squares = gram.diagonal(dim1=1, dim2=2)
    scale = torch.diag_embed(torch.where(squares > 0, squares, 1).rsqrt())
    system = torch.cat([scale @ gram @ scale, scale], 2)
    for c in range(rank):
        pivot = system[:, c : c + 1, c : c + 1]
        root = torch.where(pivot > limit * limit, pivot.rsqrt(), 0)
        row = system[:, c : c + 1].mul_(root)
        system[:, c + 1 :] -= system[:, c + 1 :, c : c + 1] * root * row
    return system[:, :, rank:]


def _products(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, one by one: a batch's products may round by its size."""
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for a, b, product in zip(left.unbind(), right.unbind(), out.unbind(), strict=True):
        torch.mm(a, b, out=product)
    return out


@jit
def _load_rows(ptr, offs_r, offs_n, rank, length):
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    return tl.load(ptr + offs_r[:, None] * length + offs_n[None, :], mask=mask, other=0).to(tl.float32)


@jit
def _store_rows(ptr, x, offs_r, offs_n, rank, length):
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    tl.store(ptr + offs_r[:, None] * length + offs_n[None, :], x, mask=mask)


@jit
def _or_one(x):
    return tl.where(x > 0, x, 1.0)


@jit
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
    p = _load_rows(wire_ptr + start, offs_r, offs_n, rank, length)
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(p) < float("inf"), 0, 1), axis=1), axis=0)
    p = p / _or_one(tl.max(tl.abs(p), axis=1))[:, None]
    for c in range(0, RANK):
        is_c = offs_r == c
        column = tl.sum(tl.where(is_c[:, None], p, 0.0), axis=0)
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2):
            products = tl.where(offs_r < c, tl.sum(p * column[None, :], axis=1), 0.0)
            column -= tl.sum(p * products[:, None], axis=0)
        remainder = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(remainder > TOLERANCE * norm, column / _or_one(remainder), 0.0)
        p = tl.where(is_c[:, None], column[None, :], p)
    p = tl.where(n_bad > 0, float("nan"), p)
    _store_rows(out_ptr + start, p, offs_r, offs_n, rank, length)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))


@jit
def _gram_of_tile(p_ptr, first, rank, length, RANK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Gram matrix of a tile of columns, and the largest magnitude of each row, by which its rows were divided."""
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = _load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)
        largest = tl.maximum(largest, tl.max(tl.abs(p), axis=1))
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = _load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)
        # inf / inf and NaN make the Gram matrix NaN, which is how the next kernel learns of them.
        p = p / _or_one(largest)[:, None]
        gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    return gram, largest


@jit
def _store_gram(gram_ptr, gram, largest, RANK: tl.constexpr):
    offs_r = tl.arange(0, RANK)
    tl.store(gram_ptr + offs_r[:, None] * RANK + offs_r[None, :], gram)
    tl.store(gram_ptr + RANK * RANK + offs_r, largest)


@jit
def _gram_kernel(
    wire_ptr,
    grams_ptr,
    layout_ptr,
    work_ptr,
    n_factors,
    n_programs,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The Gram matrix of one tile of a large factor."""
    program = tl.program_id(0).to(tl.int64)
    factor = tl.load(work_ptr + program)
    first = tl.load(work_ptr + n_programs + program) * TILE
    rank = tl.load(layout_ptr + factor)
    length = tl.load(layout_ptr + n_factors + factor)
    p_ptr = wire_ptr + tl.load(layout_ptr + 2 * n_factors + factor)
    gram, largest = _gram_of_tile(p_ptr, first, rank, length, RANK, BLOCK, TILE)
    _store_gram(grams_ptr + program * (RANK * RANK + RANK), gram, largest, RANK)


@jit
def _inverse_cholesky(gram, limit, RANK: tl.constexpr):
    """T, lower triangular, with T gram T' = 1, for a Gram matrix of unit diagonal; zero rows where a pivot is small."""
    offs = tl.arange(0, RANK)
    inverse = tl.where(offs[:, None] == offs[None, :], 1.0, 0.0)
    for k in range(0, RANK):
        is_k = offs == k
        column = tl.sum(tl.where(is_k[None, :], gram, 0.0), axis=1)
        pivot = tl.sum(tl.where(is_k, column, 0.0), axis=0)
        root = tl.where(pivot > limit, 1 / tl.sqrt(_or_one(pivot)), 0.0)
        gram_row = tl.sum(tl.where(is_k[:, None], gram, 0.0), axis=0) * root
        inverse_row = tl.sum(tl.where(is_k[:, None], inverse, 0.0), axis=0) * root
        below = tl.where(offs > k, column * root, 0.0)
        gram -= below[:, None] * gram_row[None, :]
        inverse -= below[:, None] * inverse_row[None, :]
        inverse = tl.where(is_k[:, None], inverse_row[None, :], inverse)
    return inverse


@jit
def _apply_kernel(
    in_ptr,
    out_ptr,
    grams_ptr,
    next_grams_ptr,  # None in the second round
    finite_ptr,
    layout_ptr,
    work_ptr,
    n_factors,
    n_programs,
    EPSILON: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of a large factor, orthogonalised by its Gram matrix, which every program factorises for itself."""
    program = tl.program_id(0).to(tl.int64)
    factor = tl.load(work_ptr + program)
    tile = tl.load(work_ptr + n_programs + program)
    first_program = tl.load(work_ptr + 2 * n_programs + program)
    n_tiles = tl.load(work_ptr + 3 * n_programs + program)
    rank = tl.load(layout_ptr + factor)
    length = tl.load(layout_ptr + n_factors + factor)
    start = tl.load(layout_ptr + 2 * n_factors + factor)

    SIZE: tl.constexpr = RANK * RANK + RANK
    offs_r = tl.arange(0, RANK)
    grams_ptr += first_program * SIZE
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
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(gram) < float("inf"), 0, 1), axis=1), axis=0)
    diagonal = tl.sum(tl.where(offs_r[:, None] == offs_r[None, :], gram, 0.0), axis=1)
    scale = 1 / tl.sqrt(_or_one(diagonal))
    transform = _inverse_cholesky(gram * scale[:, None] * scale[None, :], 4 * rank * EPSILON, RANK)
    # The factor's rows are divided by their largest magnitude first: the product of both may not be representable.
    transform = tl.where(n_bad > 0, float("nan"), transform * scale[None, :])
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for block in range(0, TILE, BLOCK):
        offs_n = tile * TILE + block + tl.arange(0, BLOCK)
        p = _load_rows(in_ptr + start, offs_r, offs_n, rank, length) / _or_one(largest)[:, None]
        p = tl.dot(transform, p, input_precision="ieee")
        _store_rows(out_ptr + start, p, offs_r, offs_n, rank, length)
        if next_grams_ptr is not None:
            gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    if next_grams_ptr is not None:
        _store_gram(next_grams_ptr + program * SIZE, gram, tl.full((RANK,), 1.0, tl.float32), RANK)
    else:
        tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))


def can_use_triton(factor: Factor, out: Tensor) -> bool:
    """Whether the kernels take these factors: up to rank 64, into fp32."""
    return use_triton(out.device) and max(factor.ranks) <= MAX_RANK and out.dtype == torch.float32


def _tiles(factor: Factor, large: list[int]) -> list[list[int]]:
    """The programs of the large factors: factor, tile, first program of the factor, number of its tiles."""
    programs: list[tuple[int, int, int, int]] = []
    for i in large:
        first, n_tiles = len(programs), -(-factor.lengths[i] // TILE)
        programs += [(i, tile, first, n_tiles) for tile in range(n_tiles)]
    return [list(column) for column in zip(*programs, strict=True)]


def _orthogonalize_triton(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor) -> None:
    # Small is what fits into the registers of one program, padded to powers of two.
    rank = next_power_of_2(max(factor.ranks))
    small = [i for i, length in enumerate(factor.lengths) if rank * next_power_of_2(length) <= SMALL]
    large = [i for i, length in enumerate(factor.lengths) if rank * next_power_of_2(length) > SMALL]
    layout = factor.on_device.get("layout", out.device, lambda: (factor.ranks, factor.lengths, factor.offsets))
    common = {"finite_ptr": finite, "layout_ptr": layout, "n_factors": len(factor.ranks)}
    with torch.cuda.device_of(out):
        if small:
            _gram_schmidt_kernel[(len(small),)](
                wire_ptr=wire,
                out_ptr=out,
                members_ptr=factor.on_device.get("small", out.device, lambda: [small]),
                **common,
                TOLERANCE=tolerance(torch.float32),
                RANK=rank,
                LENGTH=next_power_of_2(max(factor.lengths[i] for i in small)),
                num_warps=8,
            )
        if large:
            work = factor.on_device.get("tiles", out.device, lambda: _tiles(factor, large))
            rank = max(16, rank)  # `tl.dot` takes no side shorter than 16
            grams = torch.empty(2, work.shape[1], rank * rank + rank, dtype=torch.float32, device=out.device)
            sizes = {"RANK": rank, "BLOCK": BLOCK // rank, "TILE": TILE, "num_warps": 4 if rank == 16 else 8}
            programs = {"work_ptr": work, "n_programs": work.shape[1]}
            _gram_kernel[(work.shape[1],)](
                wire_ptr=wire, grams_ptr=grams[0], layout_ptr=layout, n_factors=len(factor.ranks), **programs, **sizes
            )
            for source, first, second in ((wire, grams[0], grams[1]), (out, grams[1], None)):
                _apply_kernel[(work.shape[1],)](
                    in_ptr=source,
                    out_ptr=out,
                    grams_ptr=first,
                    next_grams_ptr=second,
                    **common,
                    **programs,
                    EPSILON=torch.finfo(torch.float32).eps,
                    **sizes,
                )


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
    elif out.device.type == "cpu" and out.dtype == torch.float32:
        _orthogonalize_cpu(wire, factor, out, finite)
    else:
        orthogonalize_reference(wire, factor, out, finite)
