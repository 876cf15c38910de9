"""PowerSGD: gradients as products of low-rank factors, with the rest remembered for the next step.

For each matrix M of n rows and m columns, with Q from the step before:

    M = G + E                                   error feedback
    P = all-reduce(M Q),  P = orthogonalise(P)  one step of power iteration, from a warm start
    Q = all-reduce(M' P)
    G = P Q',             E = M - G

M is n x m, P is n x r, Q is m x r: r (n + m) elements are sent in place of n m. What is not compressed travels with P.
Source: Vogels, Karimireddy,
Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithms 1, 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.comm.collectives import Transport
from gradwire.comm.workspace import Workspace
from gradwire.compress.powersgd_bucket import LowRankBucket
from gradwire.kernels.lowrank import backproject, project, reconstruct
from gradwire.kernels.orthogonalization import orthogonalize
from gradwire.kernels.warm_start import draw, renew


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
    """Write the mean over all ranks of ``source`` into ``target``: of matrices an approximation of rank r.

    A matrix that is not finite on some rank becomes NaN on all, and leaves its error and its factors as they were.

    Args:
        bucket: the layout of the gradients, and their memory. Modified.
        source: the gradients, real. Modified if ``target`` is the same memory.
        target: where the result goes; may be ``source``.
        iteration: counts the steps, equal on all ranks.
        transport: sums over the ranks. Two waits.
        workspace: wire memory.
        warm_start: whether Q begins as the last step's; else it is drawn anew.

    Example: one process compresses two tensors, and error feedback makes up for it in later steps::

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
    table, mean = bucket.table, 1 / transport.world_size
    step = bucket.start_step(source, target, iteration, workspace, sent=table.p, basis=table.p, answer=table.q)
    m, p, q = step.matrices, step.basis, step.answer
    bucket.pack_uncompressed(source, step.uncompressed, mean)
    if not warm_start:
        draw(table.q, table.keys, bucket.counter, bucket.q)

    project(m, bucket.q, step.sent, scale=mean)
    await transport.all_reduce(*step.messages)
    orthogonalize(step.sent, table.p, p, bucket.finite)
    backproject(m, p, q, scale=mean)
    await transport.all_reduce(q)
    renew(q, table.q, table.keys, bucket.counter.add_(1), bucket.q, bucket.finite)
    reconstruct(m, p, q, bucket.finite)

    bucket.unpack_uncompressed(step.uncompressed, target)


async def alternating_all_reduce(
    bucket: LowRankBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """`powersgd_all_reduce` with one side a step, and so one wait on the wire and about half the bytes.

        even steps:  Q = orthogonalise(Q of the last step),  P = all-reduce(M Q),   G = P Q',  E = M - G
        odd steps:   P = orthogonalise(P of the last step),  Q = all-reduce(M' P),  G = P Q',  E = M - G

    The fixed side is a step old, so each result is a little worse. Source: Zhang, Zhang, Shi, Chu, Li, "Evaluation and
    Optimization of Gradient Compression for Distributed Deep Learning" (ACP-SGD), ICDCS 2023, algorithm 2.

    Args:
        bucket: the layout of the gradients, and their memory, made with ``alternating``. Modified.
        source: the gradients, real. Modified if ``target`` is the same memory.
        target: where the result goes; may be ``source``.
        iteration: counts the steps, equal on all ranks. Its parity chooses the side.
        transport: sums over the ranks. One wait.
        workspace: wire memory.
    """
    table, mean = bucket.table, 1 / transport.world_size
    assert bucket.p is not None, "the bucket was made for powersgd_all_reduce"
    sends_p = iteration % 2 == 0
    fixed, before, sent, after = (
        (table.q, bucket.q, table.p, bucket.p) if sends_p else (table.p, bucket.p, table.q, bucket.q)
    )
    step = bucket.start_step(source, target, iteration, workspace, sent=sent, basis=fixed)
    p, q = (step.sent, step.basis) if sends_p else (step.basis, step.sent)
    bucket.pack_uncompressed(source, step.uncompressed, mean)

    orthogonalize(before, fixed, step.basis, bucket.finite)
    if sends_p:
        project(step.matrices, q, p, scale=mean)
    else:
        backproject(step.matrices, p, q, scale=mean)
    await transport.all_reduce(*step.messages)
    renew(step.sent, sent, table.keys, bucket.counter.add_(1), after, bucket.finite)
    reconstruct(step.matrices, p, q, bucket.finite)

    bucket.unpack_uncompressed(step.uncompressed, target)
