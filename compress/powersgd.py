"""PowerSGD: all-reduce of matrices as low-rank factors, with error feedback and a warm start.

For each matrix M of n x m, with Q (m x r) from the step before:

    M = G + E                                   error feedback
    P = all-reduce(M Q),  P = orthogonalize(P)  one step of power iteration; P: n x r
    Q = all-reduce(M' P)
    G = P Q',             E = M - G

Each matrix sends r (n + m) elements instead of n m. Gradients that are not compressed are sent
together with P.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.compress.powersgd_bucket import LowRankBucket
from gradwire.kernels import backproject, draw, orthogonalize, project, reconstruct


async def powersgd_all_reduce(
    bucket: LowRankBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    transport: Transport,
    workspace: Workspace,
    *,
    warm_start: bool = True,
) -> None:
    """Write the mean of ``source`` over all ranks into ``target``, with each matrix approximated to rank r.

    A matrix with an inf or NaN on any rank becomes NaN on all ranks; its error and factors stay as they were.

    Args:
        bucket: layout and memory of the gradients. Its memory is modified.
        source: the gradients, real. Not modified, unless ``target`` is the same memory.
        target: the result: ``source`` itself, or other tensors like it.
        iteration: number of the step, equal on all ranks.
        transport: the two all-reduces over the ranks.
        workspace: provides the wire buffers.
        warm_start: whether to start from Q of the last step; otherwise from a random Q.

    Example: without a process group, on a list of tensors. The same gradient is compressed in 20 steps; error feedback
    sends in later steps what earlier ones left out, so the mean of the results is closer to it than any one of them::

        >>> import torch
        >>> from gradwire.comm import LocalTransport, Workspace, run_algorithm
        >>> from gradwire.compress import LowRankBucket, LowRankPolicy, powersgd_all_reduce
        >>> gradients = [torch.randn(256, 128), torch.randn(256)]
        >>> bucket = LowRankBucket(gradients, LowRankPolicy(rank=8).matrix_shapes(gradients))
        >>> transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
        >>> results, applied = [torch.empty_like(g) for g in gradients], torch.zeros(256, 128)
        >>> for step in range(20):
        ...     algorithm = powersgd_all_reduce(bucket, gradients, results, step, transport, workspace)
        ...     run_algorithm(algorithm, transport)
        ...     applied += results[0] / 20
        >>> transport.payload_bytes // 20, sum(g.nbytes for g in gradients)
        (13312, 132096)
        >>> bool((applied - gradients[0]).norm() < (results[0] - gradients[0]).norm())
        True
    """
    table, scale = bucket.table, 1 / transport.world_size
    step = bucket.start_step(source, target, iteration, workspace, sends=(table.p, table.q), basis=table.p)
    m, (p_wire, q_wire), p = step.matrices, step.wires, step.basis
    if not warm_start:
        draw(table.q, table.keys, bucket.counter_at(iteration), bucket.q)

    project(m, bucket.q, p_wire, scale=scale)
    await transport.all_reduce(*step.messages)
    orthogonalize(p_wire, table.p, p, bucket.finite)
    backproject(m, p, q_wire, scale=scale)
    await transport.all_reduce(q_wire)
    reconstruct(m, p, q_wire, bucket.finite)


async def alternating_all_reduce(
    bucket: LowRankBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """PowerSGD that sends one factor per step, P or Q: one all-reduce and about half the bytes.

        even steps:  Q = orthogonalize(Q of the last step),  P = all-reduce(M Q),   G = P Q',  E = M - G
        odd steps:   P = orthogonalize(P of the last step),  Q = all-reduce(M' P),  G = P Q',  E = M - G

    The other factor is one step old, so each approximation is slightly worse.

    Source: Zhang, Zhang, Shi, Chu, Li, "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning" (ACP-SGD), ICDCS 2023, algorithm 2.

    Args:
        bucket: layout and memory of the gradients, made with ``alternating=True``. Its memory is modified.
        source: the gradients, real. Not modified, unless ``target`` is the same memory.
        target: the result: ``source`` itself, or other tensors like it.
        iteration: number of the step, equal on all ranks. Even steps send P, odd ones Q.
        transport: the all-reduce over the ranks.
        workspace: provides the wire buffers.
    """
    table, scale = bucket.table, 1 / transport.world_size
    assert bucket.p is not None, "the bucket was made for powersgd_all_reduce"
    if iteration % 2 == 0:
        step = bucket.start_step(source, target, iteration, workspace, sends=(table.p,), basis=table.q)
        m, (p,), q = step.matrices, step.wires, step.basis
        orthogonalize(bucket.q, table.q, q, bucket.finite)
        project(m, q, p, scale=scale)
        await transport.all_reduce(*step.messages)
    else:
        step = bucket.start_step(source, target, iteration, workspace, sends=(table.q,), basis=table.p)
        m, (q,), p = step.matrices, step.wires, step.basis
        orthogonalize(bucket.p, table.p, p, bucket.finite)
        backproject(m, p, q, scale=scale)
        await transport.all_reduce(*step.messages)
    reconstruct(m, p, q, bucket.finite)
