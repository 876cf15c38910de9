"""Quantized all-reduce in two shots, with error feedback for both.

On each of n ranks, with the error memories E and E2 from the step before:

    M = G / n + E,   m = Q(M),   E' = M - m             quantize; one scale for each block
    all-to-all: rank j gets the j-th shard of every m
    S = sum of the n shards + E2,   s = Q(S),   E2' = S - s       in fp32, in rank order
    all-gather: every rank gets every s
    G = s                                               the mean

All ranks decode the same bytes, so the results are bitwise equal. Each rank sends 2 (n - 1) / n times the message, as
in a ring all-reduce of elements of that width; but sums are in fp32, so they neither overflow nor lose precision as the
number of ranks grows. If a gradient of the bucket is inf or NaN on any rank, its block becomes NaN on all ranks, and
E and E2 stay as they were on all.

Sources: Tang, Lian, Yu, Zhang, Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
Error-Compensated Compression", ICML 2019, algorithm 1; Wang et al., "ZeRO++", arXiv:2306.10209, section 3.3
(block-wise quantization, all-to-all).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.compress.quantized_bucket import QuantizedBucket
from gradwire.kernels import commit_errors, dequantize, quantize, reduce_quantized


async def quantized_all_reduce(
    bucket: QuantizedBucket,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    iteration: int,
    transport: Transport,
    workspace: Workspace,
) -> None:
    """Write the mean of ``source`` over all ranks into ``target``, quantized on the way to the sum and back.

    Args:
        bucket: wire formats and error memories of the gradients. Its errors are modified.
        source: the gradients, real. Not modified, unless ``target`` is the same memory.
        target: the result: ``source`` itself, or other tensors like it.
        iteration: number of the step, equal on all ranks.
        transport: the two shots over the ranks; the one that the bucket was built for.
        workspace: provides the messages.

    Example: without a process group, on a list of tensors. The same gradient is quantized to 4 bits in 20 steps; error
    feedback sends in later steps what earlier ones left out, so the mean of the results is closer to it than any of
    them::

        >>> import torch
        >>> from gradwire.comm import LocalTransport, Workspace, run_algorithm
        >>> from gradwire.compress import Quantization, QuantizedBucket, WirePolicy, quantized_all_reduce
        >>> gradients = [torch.randn(256, 128), torch.randn(256)]
        >>> formats = WirePolicy(wire="int4").wire_formats(gradients)
        >>> transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
        >>> bucket = QuantizedBucket(gradients, formats, transport, Quantization(block_size=64))
        >>> results, applied = [torch.empty_like(g) for g in gradients], torch.zeros(256, 128)
        >>> for step in range(20):
        ...     algorithm = quantized_all_reduce(bucket, gradients, results, step, transport, workspace)
        ...     run_algorithm(algorithm, transport)
        ...     applied += results[0] / 20
        >>> transport.payload_bytes // 20, sum(g.nbytes for g in gradients)
        (17936, 132096)
        >>> bool((applied - gradients[0]).norm() < (results[0] - gradients[0]).norm() / 5)
        True
    """
    step = bucket.start_step(source, target, iteration, workspace)
    for part in step.parts:
        quantize(
            part.source,
            part.section,
            step.message,
            scale=1 / transport.world_size,
            errors=part.errors,
            pending=part.pending,
            rounding=step.first_rounding,
        )
    await transport.all_to_all(step.received, step.message)
    for part in step.parts:
        reduce_quantized(
            step.received,
            part.section,
            step.result,
            rank=transport.rank,
            errors=part.shard_errors,
            pending=part.shard_pending,
            rounding=step.second_rounding,
        )
    await transport.all_gather(step.message, step.result)
    for part in step.parts:
        dequantize(step.message, part.section, part.target)
    if step.pending is not None:
        assert bucket.errors is not None
        commit_errors(step.message, step.pending, bucket.errors)
