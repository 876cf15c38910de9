"""Low-rank passes: the three times that PowerSGD touches every element of a bucket's matrices, one launch each.

    project       M = G + E,   P' = scale M Q'       G, E: n x m;  Q: r x m;  P: r x n
    backproject   Q = scale P M
    reconstruct   out = P' Q,  E = M - out           only for matrices whose factors are finite

E is the error memory; the update conserves G + E = out + E (new) to the rounding of one subtraction, and that of a
16-bit result is part of the error. E is overwritten in the last pass alone, when it is known on every rank whether all
factors are finite; so a step with an inf or NaN anywhere leaves it as it was, to the bit, without asking the host.

Traffic for N elements of s bytes, e bytes of an error element (the factors, r (n + m) elements, are small beside it):
M kept in the target between the passes (fp32):    (2s + e) + s + (2s + e)  N   = 28 N in fp32
M added up again (16 bit):                         (s + e) + (s + e) + (2s + 2e) N = 24 N with 16-bit gradients

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels.matrices import Operands


def project_reference(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """What `project` computes, written for reading."""
    table = operands.table
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q), table.p.views(p), strict=True)):
        m = operands.source[i].to(table.compute)
        if operands.error is not None:
            m = m + operands.error[i]
        if operands.keep:
            operands.target[i].copy_(m)
        p_i.copy_(scale * (q_i @ m.t()))


def backproject_reference(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """What `backproject` computes, written for reading."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        q_i.copy_(scale * (p_i @ _compensated(operands, i)))


def reconstruct_reference(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """What `reconstruct` computes, written for reading."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        out = (p_i.to(table.compute).t() @ q_i.to(table.compute)).to(table.dtype)
        if operands.error is not None:
            error = _compensated(operands, i) - out.to(table.compute)
            operands.error[i].copy_(torch.where(finite[i] > 0, error, operands.error[i]))
        operands.target[i].copy_(out)


def _compensated(operands: Operands, index: int) -> Tensor:
    """M after `project`."""
    if operands.keep:
        return operands.target[index]
    m = operands.source[index].to(operands.table.compute)
    return m if operands.error is None else m + operands.error[index]


def _row_blocks(operands: Operands, index: int) -> Iterator[slice]:
    """The rows of a matrix in blocks that stay in cache."""
    rows, step = operands.table.matrices[index].rows, operands.table.block_rows[index]
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _block_of_m(operands: Operands, index: int, rows: slice) -> Tensor:
    """M in a block of rows: a view where it lies somewhere, else added up in the scratch."""
    if operands.keep:
        return operands.target[index][rows]
    source = operands.source[index][rows]
    if operands.error is not None:
        return torch.add(source, operands.error[index][rows], out=operands.table.scratch(index)[: len(source)])
    if source.dtype == operands.table.compute:
        return source
    return operands.table.scratch(index)[: len(source)].copy_(source)


def _project_cpu(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    table = operands.table
    product = p if p.dtype == table.compute else torch.empty_like(p, dtype=table.compute)
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q), table.p.views(product), strict=True)):
        for rows in _row_blocks(operands, i):
            if operands.keep:
                assert operands.error is not None
                torch.add(operands.source[i][rows], operands.error[i][rows], out=operands.target[i][rows])
            torch.mm(q_i, _block_of_m(operands, i, rows).t(), out=p_i[:, rows])
    torch.mul(product, scale, out=p) if product is p else p.copy_(product.mul_(scale))


def _backproject_cpu(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    table = operands.table
    product = q if q.dtype == table.compute else torch.empty_like(q, dtype=table.compute)
    is_whole = operands.keep or (operands.error is None and table.dtype == table.compute)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(product), strict=True)):
        if is_whole:  # one read of M needs no blocks
            torch.mm(p_i, operands.target[i] if operands.keep else operands.source[i], out=q_i)
            continue
        for rows in _row_blocks(operands, i):
            m = _block_of_m(operands, i, rows)
            torch.addmm(q_i, p_i[:, rows], m, beta=0 if rows.start == 0 else 1, out=q_i)
    torch.mul(product, scale, out=q) if product is q else q.copy_(product.mul_(scale))


def _reconstruct_cpu(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    table = operands.table
    is_finite = finite.tolist()
    p, q = p.to(table.compute), q.to(table.compute)
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        if not is_finite[i]:
            operands.target[i].copy_(p_i.t() @ q_i)
            continue
        for rows in _row_blocks(operands, i):
            target = operands.target[i][rows]
            if operands.error is None:
                product = target if target.dtype == table.compute else table.scratch(i)[: len(target)]
            else:
                product = table.scratch(i)[: len(target)]
                error = operands.error[i][rows]
                if not operands.keep:
                    error.add_(operands.source[i][rows])
            torch.mm(p_i[:, rows].t(), q_i, out=product)
            if operands.error is not None and operands.keep:
                torch.sub(target, product, out=error)
            if product is not target:
                target.copy_(product)
            if operands.error is not None and not operands.keep:
                error.sub_(target)


def project(operands: Operands, q: Tensor, p: Tensor, *, scale: float) -> None:
    """M = G + E; P' = scale M Q', for every matrix of a bucket.

    Args:
        operands: the matrices. With ``keep``, the target is overwritten with M; nothing else is modified.
        q: the packed factors Q, fp32 or fp64 as ``table.compute``.
        p: the packed factors P, of a wire dtype: fp32, bf16, or fp64. Overwritten. Not finite in every row in which M
            is not.
        scale: 1 / world size, say.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.check()
    operands.table.q.check(q, "q")
    operands.table.p.check(p, "p")
    _project_cpu(operands, q, p, scale) if p.device.type == "cpu" else project_reference(operands, q, p, scale)


def backproject(operands: Operands, p: Tensor, q: Tensor, *, scale: float) -> None:
    """Q = scale P M, for every matrix of a bucket.

    Args:
        operands: the matrices, after `project` if it keeps M. Not modified.
        p: the packed factors P, fp32 or fp64 as ``table.compute``.
        q: the packed factors Q, of a wire dtype. Overwritten.
        scale: 1 / world size, say.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.table.p.check(p, "p")
    operands.table.q.check(q, "q")
    if p.device.type == "cpu":
        _backproject_cpu(operands, p, q, scale)
    else:
        backproject_reference(operands, p, q, scale)


def reconstruct(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """out = P' Q into the target; E = M - out, for every matrix whose factors are finite.

    Args:
        operands: the matrices, after `project` if it keeps M. Target and error memory are overwritten.
        p: the packed factors P, as they came off the wire or orthogonalised.
        q: the packed factors Q, likewise.
        finite: int32, one element a matrix: 0 leaves its error memory alone. The result is then not finite.

    Raises:
        ValueError: an operand does not fit the table.
    """
    operands.table.p.check(p, "p")
    operands.table.q.check(q, "q")
    if p.device.type == "cpu":
        _reconstruct_cpu(operands, p, q, finite)
    else:
        reconstruct_reference(operands, p, q, finite)
