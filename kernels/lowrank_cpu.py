"""Low-rank passes on CPUs: BLAS on blocks of rows, so that each block of M is still in cache when it is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.kernels.matrix_table import FactorLayout, Operands


def project_cpu(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """`project` on a CPU."""
    table = operands.table
    adding = replace(operands, keep=False)
    products = _products(table.p, p, table.compute)
    for i, (q_i, p_i, product) in enumerate(zip(table.q.views(q), table.p.views(p), products, strict=True)):
        step = table.block_rows[i]
        blocks = zip(_blocks_of_m(adding, i), _parts(product, step, 1), _parts(operands.target[i], step), strict=True)
        for m, columns, target in blocks:
            torch.mm(q_i, m.t(), out=columns)
            if operands.keep:
                target.copy_(m)
        torch.mul(product, scale, out=p_i)


def backproject_cpu(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """`backproject` on a CPU."""
    table = operands.table
    products = _products(table.q, q, table.compute)
    for i, (p_i, q_i, product) in enumerate(zip(table.p.views(p), table.q.views(q), products, strict=True)):
        product.zero_()
        for m, columns in zip(_blocks_of_m(operands, i), _parts(p_i, table.block_rows[i], 1), strict=True):
            torch.addmm(product, columns, m, out=product)
        torch.mul(product, scale, out=q_i)


def reconstruct_cpu(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` on a CPU."""
    table = operands.table
    is_finite = finite.tolist()
    p, q = p.to(table.compute), q.to(table.compute)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        if not is_finite[i]:
            operands.target[i].fill_(torch.nan)
            continue
        step = table.block_rows[i]
        targets = _parts(operands.target[i], step)
        sources = targets if operands.keep else _parts(operands.source[i], step)
        errors = _parts(operands.error[i], step) if operands.error is not None else [None] * len(targets)
        for columns, source, error, target in zip(_parts(p_i, step, 1), sources, errors, targets, strict=True):
            product = torch.mm(columns.t(), q_i, out=table.scratch(i)[: len(target)])
            if table.dtype != table.compute:
                product.clamp_(-table.limit, table.limit)
            if error is None:
                target.copy_(product)
            elif operands.keep:
                torch.sub(source, product, out=error)
                target.copy_(product)
            else:
                error.add_(source)
                error.sub_(target.copy_(product))


def _blocks_of_m(operands: Operands, index: int) -> Iterator[Tensor]:
    """M, a block of rows at a time, in the scratch: BLAS may round by alignment, and gradients have any alignment."""
    table = operands.table
    step, scratch = table.block_rows[index], table.scratch(index)
    parts = _parts((operands.target if operands.keep else operands.source)[index], step)
    if operands.keep or operands.error is None:
        for part in parts:
            yield scratch[: len(part)].copy_(part)
    else:
        for part, error in zip(parts, _parts(operands.error[index], step), strict=True):
            yield torch.add(part, error, out=scratch[: len(part)])


def _parts(tensor: Tensor, step: int, dim: int = 0) -> Sequence[Tensor]:
    """``tensor.split(step, dim)``, unless there is one part only: a split costs as much as a small product."""
    return tensor.split(step, dim) if step < tensor.shape[dim] else (tensor,)


def _products(layout: FactorLayout, wire: Tensor, compute: torch.dtype) -> list[Tensor]:
    """Where factors are computed: in the wire itself if it has the dtype of the arithmetic, else in a buffer."""
    return layout.views(wire if wire.dtype == compute else torch.empty_like(wire, dtype=compute))
