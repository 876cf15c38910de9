"""All-reduce of gradients in another dtype, or in their own.

    w_k = cast(g_k / n),   w = sum over the n ranks of w_k,   g = cast(w)

Dividing before the cast keeps 1e5 and 0 on two ranks from overflowing fp16: their mean, 5e4, is representable.
"""

from __future__ import annotations

import torch

from gradwire.comm.collectives import Transport
from gradwire.comm.workspace import Workspace
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
    """Write the mean over all ranks of ``source`` into ``target``, summed on the wire in ``dtype``.

    Each rank's contribution saturates at the largest finite value of ``dtype``; inf and NaN pass through. A sum of
    contributions that leaves the range of ``dtype`` is inf, as in PyTorch's own fp16 hook.

    Args:
        source: the gradients. Unchanged, unless ``target`` is the same memory.
        target: where the result goes; may be ``source``, or one flat tensor of the same elements.
        dtype: the wire's: fp16, bf16, or the gradients' own for a plain all-reduce.
        transport: sums over the ranks.
        workspace: wire memory; not used where ``target`` is flat and has ``dtype`` already.
        divisor: n, where it is not the number of ranks: some may have nothing to add.
    """
    flat = target.flat
    wire = flat if flat is not None and flat.dtype == dtype else workspace.wire(source.table.numel, dtype)
    flatten(source.tensors, wire, table=source.table, scale=1 / (divisor or transport.world_size))
    await transport.all_reduce(wire)
    if wire is not flat:
        unflatten(wire, target.tensors, table=target.table)


async def sparse_all_reduce(gradient: torch.Tensor, transport: Transport, divisor: int) -> torch.Tensor:
    """The sum over all ranks of a sparse gradient divided by ``divisor``; uses its memory."""
    gradient.div_(divisor)
    await transport.all_reduce(gradient)
    return gradient
