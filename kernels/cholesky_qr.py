"""Cholesky QR: orthogonalise factors by their Gram matrices, for large factors on a GPU and for all on a CPU.

    G = P P' = L L',   P <- L^-1 P          once more, because the first result is as inaccurate as G is ill-conditioned

in rank-first form, r x n; L^-1 by Gaussian elimination of G with its rows scaled to a unit diagonal, where a row of
which too little remains is dropped. Products of r x n and matrices of r x r: that is all, so n can be cut into tiles.
The rounding errors of a round are eps |L^-1|^2. On a GPU in fp32, always twice, and rows that would make them too large
for the second round are dropped. On a CPU in fp64: once where they are small, else twice, else by Gram-Schmidt.

Source: Fukaya, Nakatsukasa, Yanagisawa, Yamamoto, "CholeskyQR2: a simple and communication-avoiding algorithm for
computing a tall-skinny QR factorization on a large-scale parallel system", ScalA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch
from torch import Tensor

from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.matrices import Factor

# A program works through a tile of 512 columns of a large factor, 1024 elements at a time: beside two matrices of
# r x r, more would not fit into registers at rank 64.
TILE = 512
BLOCK = 1024
# Errors, as `_errors` bounds them, that need no second round, and that a second round mends.
DONE = 1e-10
ROUGH = 1e-6


@jit
def load_rows(ptr, offs_r, offs_n, rank, length):
    """A block of a rank-first factor in fp32, with zeros beyond its ends."""
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    return tl.load(ptr + offs_r[:, None] * length + offs_n[None, :], mask=mask, other=0).to(tl.float32)


@jit
def store_rows(ptr, x, offs_r, offs_n, rank, length):
    """The way back."""
    mask = (offs_r < rank)[:, None] & (offs_n < length)[None, :]
    tl.store(ptr + offs_r[:, None] * length + offs_n[None, :], x, mask=mask)


@jit
def or_one(x):
    """What is positive, and 1 for the rest: a divisor."""
    return tl.where(x > 0, x, 1.0)


@jit
def _gram_of_tile(p_ptr, first, rank, length, RANK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Gram matrix of a tile of columns, and the largest magnitude of each row, by which its rows were divided."""
    offs_r = tl.arange(0, RANK)
    largest = tl.zeros((RANK,), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)
        largest = tl.maximum(largest, tl.max(tl.abs(p), axis=1))
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for start in range(0, TILE, BLOCK):
        p = load_rows(p_ptr, offs_r, first + start + tl.arange(0, BLOCK), rank, length)
        # inf / inf and NaN make the Gram matrix NaN, which is how the next kernel learns of them.
        p = p / or_one(largest)[:, None]
        gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    return gram, largest


@jit
def _store_gram(gram_ptr, gram, largest, RANK: tl.constexpr):
    offs_r = tl.arange(0, RANK)
    tl.store(gram_ptr + offs_r[:, None] * RANK + offs_r[None, :], gram)
    tl.store(gram_ptr + RANK * RANK + offs_r, largest)


@kernel
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
def _inverse_cholesky(gram, rank, EPSILON: tl.constexpr, RANK: tl.constexpr):
    """T, lower triangular, with T gram T' = 1, for a Gram matrix of unit diagonal.

    Zeros in the rows whose pivot is rounding error, and in those by which the rounding errors of the product with T,
    eps |T|^2, would become more than the second round can mend.
    """
    offs = tl.arange(0, RANK)
    inverse = tl.where(offs[:, None] == offs[None, :], 1.0, 0.0)
    square = 0.0
    for k in range(0, RANK):
        is_k = offs == k
        column = tl.sum(tl.where(is_k[None, :], gram, 0.0), axis=1)
        pivot = tl.sum(tl.where(is_k, column, 0.0), axis=0)
        inverse_row = tl.sum(tl.where(is_k[:, None], inverse, 0.0), axis=0)
        added = tl.sum(inverse_row * inverse_row, axis=0) / or_one(pivot)
        is_kept = (pivot > 4 * rank * EPSILON) & (square + added < 0.1 / EPSILON)
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
        ratio = tl.load(grams_ptr + i * SIZE + RANK * RANK + offs_r) / or_one(largest)
        part = tl.load(grams_ptr + i * SIZE + offs_r[:, None] * RANK + offs_r[None, :])
        gram += part * ratio[:, None] * ratio[None, :]
        i += 1
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(gram) < float("inf"), 0, 1), axis=1), axis=0)
    diagonal = tl.sum(tl.where(offs_r[:, None] == offs_r[None, :], gram, 0.0), axis=1)
    scale = 1 / tl.sqrt(or_one(diagonal))
    transform = _inverse_cholesky(gram * scale[:, None] * scale[None, :], rank, EPSILON, RANK)
    # The factor's rows are divided by their largest magnitude first: the product of both may not be representable.
    transform = tl.where(n_bad > 0, float("nan"), transform * scale[None, :])
    gram = tl.zeros((RANK, RANK), dtype=tl.float32)
    for block in range(0, TILE, BLOCK):
        offs_n = tile * TILE + block + tl.arange(0, BLOCK)
        p = load_rows(in_ptr + start, offs_r, offs_n, rank, length) / or_one(largest)[:, None]
        p = tl.dot(transform, p, input_precision="ieee")
        store_rows(out_ptr + start, p, offs_r, offs_n, rank, length)
        if next_grams_ptr is not None:
            gram = tl.dot(p, tl.trans(p), gram, input_precision="ieee")
    if next_grams_ptr is not None:
        _store_gram(next_grams_ptr + program * SIZE, gram, tl.full((RANK,), 1.0, tl.float32), RANK)
    else:
        tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))


def _tiles(factor: Factor, large: list[int]) -> list[list[int]]:
    """The programs of the large factors: factor, tile, first program of the factor, number of its tiles."""
    programs: list[tuple[int, int, int, int]] = []
    for i in large:
        first, n_tiles = len(programs), -(-factor.lengths[i] // TILE)
        programs += [(i, tile, first, n_tiles) for tile in range(n_tiles)]
    return [list(column) for column in zip(*programs, strict=True)]


def cholesky_qr_triton(
    wire: Tensor, factor: Factor, large: list[int], layout: Tensor, out: Tensor, finite: Tensor
) -> None:
    """Orthogonalise the factors ``large`` of ``wire`` into ``out``: three launches. Operands as of `orthogonalize`.

    Args:
        wire: the packed factors.
        factor: their layout.
        large: which.
        layout: ranks, lengths and offsets of all, on the device.
        out: the packed result, fp32.
        finite: flags of all factors.
    """
    work = factor.on_device.get("tiles", out.device, lambda: _tiles(factor, large))
    n_programs = work.shape[1]
    rank = max(16, next_power_of_2(max(factor.ranks)))  # `tl.dot` takes no side shorter than 16
    grams = torch.empty(2, n_programs, rank * rank + rank, dtype=torch.float32, device=out.device)
    common = {"layout_ptr": layout, "work_ptr": work, "n_factors": len(factor.ranks), "n_programs": n_programs}
    sizes = {"RANK": rank, "BLOCK": BLOCK // rank, "TILE": TILE, "num_warps": 4 if rank == 16 else 8}
    _gram_kernel[(n_programs,)](wire_ptr=wire, grams_ptr=grams[0], **common, **sizes)
    for source, first, second in ((wire, grams[0], grams[1]), (out, grams[1], None)):
        _apply_kernel[(n_programs,)](
            in_ptr=source,
            out_ptr=out,
            grams_ptr=first,
            next_grams_ptr=second,
            finite_ptr=finite,
            **common,
            EPSILON=torch.finfo(torch.float32).eps,
            **sizes,
        )


def cholesky_qr_cpu(wire: Tensor, factor: Factor, out: Tensor, finite: Tensor, limit: float) -> None:
    """Orthogonalise all factors; operands as of `orthogonalize`, ``out`` in fp32.

    Args:
        wire: the packed factors.
        factor: their layout.
        out: the packed result.
        finite: flags.
        limit: the relative norm at which what remains of a row is dropped.
    """
    sources, targets = factor.views(wire), factor.views(out)
    finite.fill_(1)
    for rank in sorted(set(factor.ranks)):
        members = [i for i, of_factor in enumerate(factor.ranks) if of_factor == rank]
        gram, scale = _unit_gram([sources[i] for i in members])
        inverse, errors = _inverse_cholesky_cpu(gram)
        hard = [k for k, error in enumerate(errors) if error > DONE]
        if hard:
            inverse[hard] = _inverse_without_dependent(gram[hard], limit)
            errors = _errors(inverse)
        for i, transform in zip(members, (inverse * scale[:, None, :]).unbind(), strict=True):
            targets[i].copy_(transform @ sources[i].double())
        for k in hard:
            i = members[k]
            rows = sources[i].double()
            if not rows.isfinite().all():
                targets[i].fill_(torch.nan)
                finite[i] = 0
            elif errors[k] < ROUGH:
                basis = (inverse[k] * scale[k]) @ rows
                again, scales = _unit_gram([basis])
                targets[i].copy_((_inverse_cholesky_cpu(again)[0] * scales[:, None, :])[0] @ basis)
            else:
                targets[i].copy_(gram_schmidt(rows[None], limit)[0])


def _unit_gram(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gram matrices of unit rows, k x r x r, and what made them such; a row of zeros counts as if it were alone.

    Products one by one: those of a batch may round by its size.
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


def _inverse_cholesky_cpu(gram: Tensor) -> tuple[Tensor, list[float]]:
    """L^-1 of Gram matrices, and the errors of its products with the rows; infinite where there is none."""
    lower, failed = torch.linalg.cholesky_ex(gram)
    inverse: Tensor = torch.linalg.solve_triangular(lower, torch.eye(gram.shape[1], dtype=gram.dtype), upper=False)
    errors = zip(failed.tolist(), _errors(inverse), strict=True)
    return inverse, [torch.inf if has_failed or isnan(error) else error for has_failed, error in errors]


def _inverse_without_dependent(gram: Tensor, limit: float) -> Tensor:
    """L^-1 by Gaussian elimination, with zeros in the rows of which no more remains than ``limit`` times their norm."""
    rank = gram.shape[1]
    system = torch.cat([gram, torch.eye(rank, dtype=gram.dtype).expand_as(gram)], 2)
    for c in range(rank):
        pivot = system[:, c : c + 1, c : c + 1]
        root = torch.where(pivot > limit * limit, pivot.rsqrt(), 0)
        row = system[:, c : c + 1].mul_(root)
        system[:, c + 1 :] -= system[:, c + 1 :, c : c + 1] * root * row
    return system[:, :, rank:]


def _errors(inverse: Tensor) -> list[float]:
    """How far from orthonormal each L^-1 P may be: errors of the Gram matrix, r eps, times |L^-1|^2."""
    error_of_gram = inverse.shape[1] * torch.finfo(inverse.dtype).eps
    return [error_of_gram * norm * norm for norm in torch.linalg.vector_norm(inverse, dim=(1, 2)).tolist()]


def gram_schmidt(rows: Tensor, limit: float) -> Tensor:
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
