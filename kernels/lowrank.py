"""Low-rank passes: PowerSGD touches every element of a bucket's matrices three times, in one launch each.

    project       M = G + E,  P = scale M Q          G, E: n x m,  P: n x r,  Q: m x r
    backproject   Q = scale M^T P
    reconstruct   out = P Q^T,  E = M - out          if the factors are finite; otherwise out = NaN and E stays

``out`` saturates at the largest finite value of the gradients' dtype; the part that is cut off stays in E. Factors are
stored transposed (`matrix_table`).

E is the error memory. The update conserves G + E = out + E (new) to the rounding of one subtraction; the rounding of a
16-bit result is part of the new E. Only the last pass overwrites E, when every rank knows whether all factors are
finite. A step with an inf or NaN anywhere therefore leaves E bitwise as it was, without a host synchronisation.

Traffic for N elements of s bytes, with e bytes per element of the error memory (factors, r (n + m) elements, are small
beside it):
M kept in the target between the passes (fp32):    (2s + e) + s + (2s + e)  N   = 28 N in fp32
M added up again (16 bit):                         (s + e) + (s + e) + (2s + 2e) N = 24 N with 16-bit gradients

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.column_norms import Renewal, check_renewal, renew
from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.dtypes import compute_dtype
from gradwire.kernels.flattening import flatten, unflatten
from gradwire.kernels.lowrank_cpu import backproject_cpu, project_cpu, reconstruct_cpu
from gradwire.kernels.lowrank_triton import backproject_triton, project_triton
from gradwire.kernels.matrix_table import MAX_RANK, FactorLayout, MatrixTable, Operands, Uncompressed
from gradwire.kernels.reconstruction_triton import reconstruct_and_renew_triton, reconstruct_triton

# The Triton kernels address the elements of a tile of up to 32 rows by 32-bit offsets.
MAX_COLUMNS = 1 << 26


def lowrank_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that the three passes together read and write for ``numel`` elements of matrices, with error feedback."""
    gradient, error = dtype.itemsize, compute_dtype(dtype).itemsize
    if gradient == error:  # M is kept in the target
        return numel * ((2 * gradient + error) + gradient + (2 * gradient + error))
    return numel * ((gradient + error) + (gradient + error) + (2 * gradient + 2 * error))


def project_reference(operands: Operands, q: Tensor, p: Tensor, scale: float) -> None:
    """`project` in plain PyTorch, matrix by matrix."""
    table = operands.table
    for i, (q_i, p_i) in enumerate(zip(table.q.views(q), table.p.views(p), strict=True)):
        m = operands.source[i].to(table.compute)
        if operands.error is not None:
            m = m + operands.error[i]
        if operands.keep:
            operands.target[i].copy_(m)
        p_i.copy_(scale * (q_i @ m.t()))


def backproject_reference(operands: Operands, p: Tensor, q: Tensor, scale: float) -> None:
    """`backproject` in plain PyTorch, matrix by matrix."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        q_i.copy_(scale * (p_i @ _compensated(operands, i)))


def reconstruct_reference(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """`reconstruct` in plain PyTorch, matrix by matrix."""
    table = operands.table
    for i, (p_i, q_i) in enumerate(zip(table.p.views(p), table.q.views(q), strict=True)):
        out = (p_i.to(table.compute).t() @ q_i.to(table.compute)).clamp(-table.limit, table.limit).to(table.dtype)
        out = torch.where(finite[i] > 0, out, torch.nan)
        if operands.error is not None:
            error = _compensated(operands, i) - out.to(table.compute)
            operands.error[i].copy_(torch.where(finite[i] > 0, error, operands.error[i]))
        operands.target[i].copy_(out)


def _compensated(operands: Operands, index: int) -> Tensor:
    """M = G + E of one matrix, after `project`."""
    if operands.keep:
        return operands.target[index]
    m = operands.source[index].to(operands.table.compute)
    return m if operands.error is None else m + operands.error[index]


def can_use_triton(table: MatrixTable) -> bool:
    """Whether the Triton kernels accept these matrices: ranks up to `MAX_RANK`, rows below 2^26 elements, no fp64."""
    is_in_range = table.largest_rank <= MAX_RANK and max(table.q.lengths) <= MAX_COLUMNS
    return use_triton(table.device) and is_in_range and table.compute == torch.float32


def can_keep(table: MatrixTable) -> bool:
    """Whether `project` should store M in the target: where the target can hold it, and where that saves a read.

    On a CPU it saves no read: the CPU paths copy M into their scratch in any case, and add there at
    no cost.
    """
    return can_use_triton(table) and table.dtype == table.compute


def can_capture(table: MatrixTable) -> bool:
    """Whether a CUDA graph of a step serves later steps: if the kernels read the matrices' addresses on the device."""
    return can_use_triton(table)


def project(operands: Operands, q: Tensor, p: Tensor, *, scale: float, pack: Uncompressed | None = None) -> None:
    """M = G + E; P = scale M Q, for every matrix of a bucket.

    Args:
        operands: the matrices. With ``keep``, the target is overwritten with M; nothing else is modified.
        q: the packed factors Q, fp32 or fp64 as ``table.compute``.
        p: the packed factors P, in a wire dtype: fp32, bf16 or fp64. Overwritten, with zeros between the factors. A row
            of P is not finite if that row of M is not.
        scale: for example 1 / world size.
        pack: gradients that `flatten` writes onto the wire, times ``scale``, in the same launches.

    Raises:
        ValueError: an operand does not fit its table.
    """
    table = operands.table
    operands.check()
    table.q.check(q, "q")
    table.p.check(p, "p")
    if can_use_triton(table):
        _check(pack)
        project_triton(operands, q, p, scale, pack)
    else:
        run = project_cpu if table.device.type == "cpu" else project_reference
        run(operands, q, _without_gaps(table.p, p), scale)
        _pack(pack, scale)


def backproject(operands: Operands, p: Tensor, q: Tensor, *, scale: float, pack: Uncompressed | None = None) -> None:
    """Q = scale M^T P, for every matrix of a bucket.

    Args:
        operands: the matrices, after `project` if it keeps M. Not modified.
        p: the packed factors P, fp32 or fp64 as ``table.compute``.
        q: the packed factors Q, in a wire dtype: fp32, bf16 or fp64. Overwritten, with zeros between the factors.
        scale: for example 1 / world size.
        pack: gradients that `flatten` writes onto the wire, times ``scale``, in the same launches.

    Raises:
        ValueError: an operand does not fit its table.
    """
    table = operands.table
    operands.check()
    table.p.check(p, "p")
    table.q.check(q, "q")
    if can_use_triton(table):
        _check(pack)
        backproject_triton(operands, p, q, scale, pack)
    else:
        run = backproject_cpu if table.device.type == "cpu" else backproject_reference
        run(operands, p, _without_gaps(table.q, q), scale)
        _pack(pack, scale)


def _without_gaps(layout: FactorLayout, factors: Tensor) -> Tensor:
    """The buffer ``factors``, with zeros where there is no factor, if there are such places."""
    return factors.zero_() if layout.has_gaps else factors


def _check(uncompressed: Uncompressed | None) -> None:
    if uncompressed is not None:
        uncompressed.check()


def _pack(pack: Uncompressed | None, scale: float) -> None:
    if pack is not None:
        flatten(pack.source, pack.wire, table=pack.table, scale=scale)


def reconstruct(operands: Operands, p: Tensor, q: Tensor, finite: Tensor) -> None:
    """out = P Q^T into the target; E = M - out, for every matrix whose factors are finite.

    Args:
        operands: the matrices, after `project` if it keeps M. Target and error memory are overwritten.
        p: the packed factors P, of any dtype: as received or orthogonalised.
        q: the packed factors Q, of any dtype.
        finite: int32, one element per matrix: 0 leaves the matrix's error memory alone and makes its result NaN.

    Raises:
        ValueError: an operand does not fit the table.
    """
    table = operands.table
    operands.check()
    table.p.check(p, "p")
    table.q.check(q, "q")
    if can_use_triton(table):
        reconstruct_triton(operands, p, q, finite)
    else:
        run = reconstruct_cpu if table.device.type == "cpu" else reconstruct_reference
        run(operands, p, q, finite)


def reconstruct_and_renew(
    operands: Operands,
    p: Tensor,
    q: Tensor,
    finite: Tensor,
    renewal: Renewal,
    *,
    unpack: Uncompressed | None = None,
) -> None:
    """`renew` a factor for the next step, and `reconstruct`: in two launches for both.

    Args:
        operands: as in `reconstruct`.
        p: as in `reconstruct`.
        q: as in `reconstruct`.
        finite: int32, one element per matrix: 0 for a matrix that is not finite. Set to 0 where the factor to renew is
            not finite, before it is used.
        renewal: the factor to renew, P or Q, and the number of the step, which advances.
        unpack: gradients that `unflatten` reads from the wire, in the same launches.

    Raises:
        ValueError: an operand does not fit its table.
    """
    table = operands.table
    if can_use_triton(table):
        operands.check()
        table.p.check(p, "p")
        table.q.check(q, "q")
        check_renewal(renewal.wire, renewal.layout, renewal.step, renewal.following)
        _check(unpack)
        reconstruct_and_renew_triton(operands, p, q, finite, renewal, unpack)
        return
    if renewal.advance_to is None:
        renewal.step.add_(1)
    else:
        renewal.step.fill_(renewal.advance_to)
    renew(*renewal[:5], finite)
    reconstruct(operands, p, q, finite)
    if unpack is not None:
        unflatten(unpack.wire, unpack.target, table=unpack.target_table)
