"""Low-rank passes: PowerSGD touches every element of a bucket's matrices three times, in one launch each.

    project       M = G + E,  P = scale M Q          G, E: n x m,  P: n x r,  Q: m x r
    backproject   Q = scale M^T P
    reconstruct   out = P Q^T,  E = M - out - (P_own Q_own^T - P Q^T)
                                                     if the factors are finite; otherwise out = NaN and E stays

    renew         next_c = q_c / |q_c|               for each column c of the factors to start the next step from
                  next_c = a random unit vector      where q_c is zero: otherwise that column would stay zero

``out`` saturates at the largest finite value of the gradients' dtype; the part that is cut off stays in E. Factors are
stored transposed (`matrix_table`).

E is the error memory. P_own Q_own^T is what this rank has added to the mean P Q^T: of the two factors, the one in the
last exchange differs between the ranks. With M - out alone, the ranks' E would drift apart as a random walk, by the
difference of their gradients in each step, although their mean stays small. As the differences from the mean add up to
zero over the ranks, G + E = out + E (new) holds for the ranks' means, to the rounding of the sums on the wire and of
two subtractions; the rounding of a 16-bit result is part of the new E. Only the last pass overwrites E, when every rank
knows whether all factors are finite. A step with an inf or NaN anywhere therefore leaves E bitwise as it was, without a
host synchronization.

Unit columns give the columns of the next P the magnitude of the gradient. Random columns come from a counter-based
generator. Its counters are the key of the matrix, the step and the place in the factor, so all ranks draw the same.

Traffic for N elements of s bytes, with e bytes per element of the error memory (the factors, r (n + m) elements, are
negligible):
M kept in the target between the passes (fp32):    (2s + e) + s + (2s + e)  N   = 28 N in fp32
M added up again (16 bit):                         (s + e) + (s + e) + (2s + 2e) N = 24 N with 16-bit gradients

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradwire.kernels.counter_random import uniform
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.flatten import flatten_kernels
from gradwire.kernels.matrix_table import FactorLayout, MatrixTable, Operands, OwnFactor
from gradwire.kernels.orthogonalize import bound_orthogonalize

# Row norms in this range can be squared in fp64; others take `_renew_carefully`.
SAFE_NORMS = (1e-140, 1e140)


def project_reference(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """M = G + E; P = scale M Q, for every matrix of a bucket (PowerSGD, algorithm 1).

    Args:
        operands: the matrices. With ``keep``, the target is overwritten with M. If ``uncompressed`` gradients are sent
            with P, they are written onto their wire, times ``scale``; if P is the ``own`` factor, it is copied there.
            Nothing else is modified.
        q: the packed factors Q, fp32 or fp64 as ``table.compute``.
        p: the packed factors P, in a wire dtype: fp32, bf16 or fp64. Overwritten, with zeros between the factors. A row
            of P is not finite if that row of M is not.
        scale: multiplier of the product, for example 1 / world size.
    """
    table = operands.table
    _prepare_wire(operands, table.p, p, scale)
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q), table.p.views(p), strict=True)):
        m = operands.source[i].to(table.compute)
        if operands.error is not None:
            m = m + operands.error[i]
        if operands.keep:
            operands.target[i].copy_(m)
        p_i.copy_(scale * (q_i @ m.t()))  # P = M Q, transposed
    _remember(operands.own, table.p, p)


def backproject_reference(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """Q = scale M^T P, for every matrix of a bucket (PowerSGD, algorithm 1).

    Args:
        operands: the matrices, after `project` if it keeps M. Not modified. If ``uncompressed`` gradients are sent with
            Q, they are written onto their wire, times ``scale``; if Q is the ``own`` factor, it is copied there.
        p: the packed factors P, fp32 or fp64 as ``table.compute``.
        q: the packed factors Q, in a wire dtype: fp32, bf16 or fp64. Overwritten, with zeros between the factors.
        scale: multiplier of the product, for example 1 / world size.
    """
    table = operands.table
    _prepare_wire(operands, table.q, q, scale)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        q_i.copy_(scale * (p_i @ _compensated(operands, i)))
    _remember(operands.own, table.q, q)


def _remember(own: OwnFactor | None, layout: FactorLayout, factors: Tensor) -> None:
    """Copy factors before the exchange, if they are in the last one."""
    if own is not None and own.layout is layout:
        own.sent.copy_(factors)


def reconstruct_reference(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """out = P Q^T into the target; E = M - out, for every matrix whose factors are finite (algorithm 2).

    With ``operands.own``, E = M - out - (P_own Q_own^T - P Q^T), where one factor is this rank's own. With
    ``operands.renewal``, P or Q is renewed first, as by `renew_reference`, and the number of the step advances. With
    ``operands.uncompressed``, these gradients are read from their wire.

    Args:
        operands: the matrices, after `project` if it keeps M. Target and error memory are overwritten.
        p: the packed factors P, of any dtype: as received or orthogonalized.
        q: the packed factors Q, of any dtype.
        finite: int32, one element per matrix: 0 leaves the matrix's error memory alone and makes its result NaN. Set
            to 0 where the factor to renew is not finite, before it is used.
    """
    table = operands.table
    renew = bound_renew(table.device, table.compute)  # may use Triton even where the matrices cannot
    _renew_and_unflatten(operands, p, q, finite, renew)
    p, q = p.to(table.compute), q.to(table.compute)
    own_p, own_q = (p, q) if operands.own is None else _own_factors(operands.own, table, p, q)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        product = p_i.t() @ q_i
        out = product.clamp(-table.limit, table.limit).to(table.dtype)
        out = torch.where(finite[i] > 0, out, torch.nan)
        if operands.error is not None:
            error = _compensated(operands, i) - out.to(table.compute)
            if operands.own is not None:
                error -= table.p.views(own_p)[i].t() @ table.q.views(own_q)[i] - product
            operands.error[i].copy_(torch.where(finite[i] > 0, error, operands.error[i]))
        operands.target[i].copy_(out)


def _own_factors(own: OwnFactor, table: MatrixTable, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """P and Q, packed, one of them replaced by this rank's own."""
    if own.residual is not None:
        own.sent.sub_(own.residual)
    mine = own.sent.to(p.dtype) * own.world_size
    return (mine, q) if own.layout is table.p else (p, mine)


def _prepare_wire(operands: Operands, layout: FactorLayout, factors: Tensor, scale: float) -> None:
    """Write all that is sent with factors: zeros between them, and the uncompressed gradients."""
    others = operands.uncompressed
    if layout.has_gaps:
        factors.zero_()
    if others is not None and others.sent_with is layout:
        flatten_kernels(others.table).flatten(others.source, others.table, others.wire, scale)


def _renew_and_unflatten(operands: Operands, p: Tensor, q: Tensor, finite: Tensor, renew: Callable[..., None]) -> None:
    """Renew factors and advance the step, and read the uncompressed gradients from their wire."""
    table, renewal, others = operands.table, operands.renewal, operands.uncompressed
    if renewal is not None:
        if renewal.advance_to is None:
            renewal.step.add_(1)
        else:
            renewal.step.fill_(renewal.advance_to)
        wire = p if renewal.layout is table.p else q
        renew(wire, renewal.layout, table.keys, renewal.step, renewal.following, finite)
    if others is not None:
        flatten_kernels(others.table).unflatten(others.wire, others.target, others.target_table, 1.0, None)


def _compensated(operands: Operands, index: int) -> Tensor:
    """M = G + E of one matrix, after `project`."""
    if operands.keep:
        return operands.target[index]
    m = operands.source[index].to(operands.table.compute)
    return m if operands.error is None else m + operands.error[index]


def renew_reference(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """next_c = q_c / |q_c| for each column of every finite factor, or a random unit column where q_c is zero.

    Args:
        wire: the packed factors, averaged over the ranks: fp32, bf16 or fp64.
        layout: layout of the factors.
        keys: keys of the matrices' random columns.
        step: int64, one element, on the device of the factors: the number of the step, equal on all ranks. Kernels
            read it on the device, where a CUDA graph must advance it.
        following: the packed factors of the next step, fp32 or fp64. Overwritten where the flag is not 0.
        finite: int32, one element per matrix. Set to 0 where the factor is not finite.
    """
    for i, (q, after) in enumerate(zip(layout.views(wire), layout.views(following), strict=True)):
        finite[i] *= q.isfinite().all()
        drawn = uniform(keys[i], step, torch.arange(q.numel(), device=q.device).view_as(q))
        columns = torch.where((q == 0).all(1, keepdim=True), drawn.to(after.dtype), q.to(after.dtype))
        scaled = columns / columns.abs().amax(1, keepdim=True)
        unit = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        after.copy_(torch.where(finite[i] > 0, unit, after))


def _blocks(table: MatrixTable, factors: Sequence[Tensor], *by_rows: Sequence[Tensor] | None) -> list[Any]:
    """The P of each matrix, r x n, and its matrices, one of each list, cut into blocks of `MatrixTable.block_rows`.

    Each is a tuple: the index of the matrix, its blocks, the columns of P. BLAS works block by block, so that each
    block of M is still in cache when it is used again.
    """
    blocks: list[Any] = []
    for i, (*matrices, factor) in enumerate(zip(*filter(None, by_rows), factors, strict=True)):
        step = table.block_rows[i]
        if step >= factor.shape[1]:  # a split costs as much as a small product
            blocks.append((i, *matrices, factor))
        else:
            blocks += zip(repeat(i), *[matrix.split(step) for matrix in matrices], factor.split(step, 1), strict=False)
    return blocks


def _add(m: Tensor, error: Sequence[Tensor], scratch: Tensor) -> Tensor:
    """A block of M in the scratch: BLAS may round by alignment, and gradients have any alignment."""
    out = scratch[: len(m)]
    return torch.add(m, error[0], out=out) if error else out.copy_(m)


def project_cpu(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """`project` on a CPU."""
    table = operands.table
    _prepare_wire(operands, table.p, p, scale)
    # Factors are computed on the wire itself if it has the dtype of the arithmetic.
    product = p if p.dtype == table.compute else torch.zeros_like(p, dtype=table.compute)
    qs, ps = table.q.cached_views(q), table.p.cached_views(p) if product is p else table.p.views(product)
    for i, source, target, *error, columns in _blocks(table, ps, operands.source, operands.target, operands.error):
        # P = Q M^T block by block: the columns of a factor stored transposed are rows of M.
        m = _add(source, error, table.scratch[i])
        torch.mm(qs[i], m.t(), out=columns)
        if operands.keep:
            target.copy_(m)
    torch.mul(product, scale, out=p)
    _remember(operands.own, table.p, p)


def backproject_cpu(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """`backproject` on a CPU."""
    table = operands.table
    _prepare_wire(operands, table.q, q, scale)
    product = q if q.dtype == table.compute else torch.empty_like(q, dtype=table.compute)
    ps, qs = table.p.cached_views(p), table.q.cached_views(q) if product is q else table.q.views(product)
    product.zero_()  # sums over the blocks, in their order
    parts_of_m = (operands.target, None) if operands.keep else (operands.source, operands.error)
    for i, m, *error, columns in _blocks(table, ps, *parts_of_m):
        torch.addmm(qs[i], columns, _add(m, error, table.scratch[i]), out=qs[i])
    torch.mul(product, scale, out=q)
    _remember(operands.own, table.q, q)


def reconstruct_cpu(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` on a CPU."""
    table, compute = operands.table, operands.table.compute
    _renew_and_unflatten(operands, p, q, finite, renew_cpu)
    ps = table.p.cached_views(p) if p.dtype == compute else table.p.views(p.to(compute))
    qs = table.q.cached_views(q) if q.dtype == compute else table.q.views(q.to(compute))
    flags, own, is_narrow = finite.tolist(), operands.own, table.dtype != compute
    own_rows, own_qs = None, qs
    if own is not None:
        own_p, own_q = _own_factors(own, table, p.to(compute), q.to(compute))
        own_rows, own_qs = [each.t() for each in table.p.views(own_p)], table.q.views(own_q)
    parts = (operands.source, operands.target, operands.error, own_rows)
    for i, source, target, *kept, columns in _blocks(table, ps, *parts):  # kept: the block of E, and of P_own
        if not flags[i]:  # on some rank: E stays as it was, on all ranks
            target.fill_(torch.nan)
            continue
        error: Any = kept[0] if kept else None
        scratch = table.scratch[i][: len(target)]
        if error is not None and operands.keep:  # M, before the result overwrites it
            error.copy_(target)
        elif error is not None:
            error.add_(source)
        if own is not None:
            error.sub_(torch.mm(kept[1], own_qs[i], out=scratch))
        product = torch.mm(columns.t(), qs[i], out=scratch)
        if own is not None and is_narrow:  # what the result is cut off and rounded by stays in E
            error.add_(product)
        if is_narrow:
            product.clamp_(-table.limit, table.limit)
        target.copy_(product)
        if error is not None and (own is None or is_narrow):
            error.sub_(target)


def renew_cpu(
    wire: Tensor, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor, finite: Tensor
) -> None:
    """`renew` on a CPU."""
    # In fp64, squares of fp32 and bf16 numbers neither overflow nor underflow: no scaling is needed before the norm.
    rows, targets = layout.views(wire.to(torch.float64, copy=True)), layout.cached_views(following)
    norms = [torch.linalg.vector_norm(q, dim=1, keepdim=True) for q in rows]
    smallest, largest = torch.aminmax(torch.cat(norms))
    if not (SAFE_NORMS[0] < smallest.item() and largest.item() < SAFE_NORMS[1] and finite.all()):
        easy = []  # factors for the common path below
        for i, norm in enumerate(norms):
            if not ((norm > SAFE_NORMS[0]) & (norm < SAFE_NORMS[1])).all():
                finite[i] *= rows[i].isfinite().all()
                if finite[i]:
                    _renew_carefully(rows[i], targets[i], keys[i], step)
            elif finite[i]:
                easy.append(i)
        rows, norms, targets = ([values[i] for i in easy] for values in (rows, norms, targets))
    if rows:
        torch._foreach_div_(rows, norms)
        torch._foreach_copy_(targets, rows)


def _renew_carefully(q: Tensor, after: Tensor, key: int, step: Tensor) -> None:
    """Renew a finite factor with rows that are zero, or whose squares leave the range of fp64."""
    largest = q.abs().amax(1, keepdim=True).to(after.dtype)
    torch.div(q, torch.where(largest > 0, largest, 1), out=after)
    if not largest.all():
        rows = (largest == 0).nonzero()[:, :1]
        after[rows[:, 0]] = uniform(key, step, rows * q.shape[1] + torch.arange(q.shape[1])).to(after.dtype)
    after.div_(torch.linalg.vector_norm(after, dim=1, keepdim=True))


Operation = Callable[..., None]


class LowRankKernels(NamedTuple):
    """The operations on the matrices of one table, with the arguments of `project_reference` and so on."""

    project: Operation
    backproject: Operation
    reconstruct: Operation
    orthogonalize: Operation
    draw: Operation


def bound_low_rank(table: MatrixTable) -> LowRankKernels:
    """The operations for a table: Triton, CPU code or references, chosen once for all steps."""
    passes: tuple[Operation, Operation, Operation]
    passes = (project_reference, backproject_reference, reconstruct_reference)
    if table.can_use_triton():
        launchers: Any = import_module("gradwire.kernels.lowrank_triton")
        passes = (launchers.project_triton, launchers.backproject_triton, launchers.reconstruct_triton)
    elif table.device.type == "cpu":
        passes = (project_cpu, backproject_cpu, reconstruct_cpu)
    orthogonalize = bound_orthogonalize(table.device, table.compute, table.compute, table.largest_rank)
    return LowRankKernels(*passes, orthogonalize, partial(draw, bound_renew(table.device, table.compute)))


def bound_renew(device: torch.device, dtype: torch.dtype) -> Operation:
    """`renew_reference` for factors in ``dtype``, or its Triton kernels or CPU path."""
    if dtype == torch.float32 and use_triton(device):
        launchers: Any = import_module("gradwire.kernels.lowrank_triton")
        return cast("Operation", launchers.renew_triton)
    return renew_cpu if device.type == "cpu" else renew_reference


def draw(renew: Operation, layout: FactorLayout, keys: Sequence[int], step: Tensor, following: Tensor) -> None:
    """Fill ``following`` with random unit columns: those that ``renew``, a `bound_renew`, draws for zero factors."""
    zeros = torch.zeros_like(following)
    finite = torch.ones(len(keys), dtype=torch.int32, device=following.device)
    renew(zeros, layout, keys, step, following, finite)
