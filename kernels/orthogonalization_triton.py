"""Gram-Schmidt in Triton: orthogonalise small factors, one program each."""

from __future__ import annotations

from torch import Tensor

from gradwire.kernels.language import jit, kernel, next_power_of_2, tl
from gradwire.kernels.matrix_table import FactorLayout, load_factor, reload_factor_size


@jit
def load_rows(
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
def store_rows(
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
def or_one(x):
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
    p = load_rows(wire_ptr + offset, offs_r, offs_n, rank, length)  # [RANK, LENGTH]
    n_bad = tl.sum(tl.sum(tl.where(tl.abs(p) < float("inf"), 0, 1), axis=1), axis=0)
    tl.store(finite_ptr + factor, tl.where(n_bad > 0, 0, 1))
    p = p / or_one(tl.max(tl.abs(p), axis=1))[:, None]  # else squares would overflow or underflow
    for c in range(0, RANK):
        is_c = offs_r == c
        column = tl.sum(tl.where(is_c[:, None], p, 0.0), axis=0)  # [LENGTH]
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2):
            products = tl.where(offs_r < c, tl.sum(p * column[None, :], axis=1), 0.0)  # [RANK]
            column -= tl.sum(p * products[:, None], axis=0)
        remainder = tl.sqrt(tl.sum(column * column, axis=0))
        column = tl.where(remainder > TOLERANCE * norm, column / or_one(remainder), 0.0)
        p = tl.where(is_c[:, None], column[None, :], p)
    p = tl.where(n_bad > 0, float("nan"), p)
    rank, length = reload_factor_size(layout_ptr, n_factors, factor)
    store_rows(out_ptr + offset, p, offs_r, offs_n, rank, length)


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
