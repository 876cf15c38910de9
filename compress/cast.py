"""All-reduce in the gradients' own dtype or in 16 bit.

    w_k = cast(g_k / n),   w = sum over the n ranks of w_k,   g = cast(w)

Division comes before the cast: 1e5 and 0 on two ranks would overflow fp16, but their mean, 5e4, does not.
"""

from __future__ import annotations

import torch

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.compress.gradients import Gradients
from gradwire.kernels import flatten, unflatten


async def cast_all_reduce(
    source: Gradients,
    target: Gradients,
    dtype: torch.dtype,
    transport: Transport,
    workspace: Workspace,
    divisor: int | None = None,
) -> None:
    """Write the mean of ``source`` over all ranks into ``target``; the sum is taken in ``dtype``.

    Each rank's contribution saturates at the largest finite value of ``dtype``; inf and NaN pass through. A sum
    beyond the range of ``dtype`` becomes inf, as in PyTorch's fp16 hook.

    Args:
        source: the gradients. Not modified, unless ``target`` is the same memory.
        target: the result: ``source`` itself, other tensors like it, or one flat tensor of as many elements.
        dtype: wire dtype: fp16, bf16, or the gradients' own for a plain all-reduce.
        transport: the all-reduce over the ranks.
        workspace: provides the wire buffer, unless ``target`` is flat and of ``dtype``: then it is the wire buffer.
        divisor: n, by default the world size; lower if some ranks contribute nothing.
    """
    flat = target.flat
    wire = flat if flat is not None and flat.dtype == dtype else workspace.wire(source.table.numel, dtype)
    flatten(source.tensors, wire, table=source.table, scale=1 / (divisor or transport.world_size))
    await transport.all_reduce(wire)
    if wire is not flat:
        unflatten(wire, target.tensors, table=target.table)


async def sparse_all_reduce(gradient: torch.Tensor, transport: Transport, divisor: int) -> torch.Tensor:
    """Divide a sparse gradient by ``divisor``, in place, and return its sum over all ranks."""
    gradient.div_(divisor)
    await transport.all_reduce(gradient)
    return gradient
