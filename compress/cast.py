"""All-reduce of gradients in their own dtype or in 16 bits.

    w_k = cast(g_k / n),   w = sum over the n ranks of w_k,   g = cast(w)

Division comes before the cast: 1e5 and 0 on two ranks would overflow fp16, but their mean, 5e4, does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.transport import Transport
from gradwire.compress.step import Step, repeatable
from gradwire.kernels import flatten_kernels


@repeatable
async def cast_all_reduce(step: Step, dtype: torch.dtype | None = None, divisor: int | None = None) -> None:
    """Write the mean of the gradients over all ranks into the results; the sum is taken in ``dtype``.

    Each rank's contribution saturates at the largest finite value of ``dtype``; inf and NaN pass through. A sum
    beyond the range of ``dtype`` becomes inf, as in PyTorch's fp16 hook.

    Args:
        step: source and target; its target may be one flat tensor, which is the wire buffer if it is of ``dtype``.
        dtype: wire dtype, fp16 or bf16; None: the gradients' own, a plain all-reduce.
        divisor: n, by default the world size; lower if some ranks contribute nothing.
    """
    source, target, flat = step.source, step.target, step.target.flat
    dtype = dtype or source.table.dtype
    if flat is not None and flat.dtype == dtype:
        wire = flat
    else:
        (wire,) = step.workspace.wires((source.table.numel, dtype))
    scale = 1 / (divisor or step.transport.world_size)
    flatten_kernels(source.table).flatten(source.tensors, source.table, wire, scale)
    await step.transport.all_reduce(wire)
    if wire is not flat:
        flatten_kernels(target.table).unflatten(wire, target.tensors, target.table, 1.0, None)


async def sparse_all_reduce(gradient: Tensor, transport: Transport, divisor: int) -> Tensor:
    """Divide a sparse gradient by ``divisor``, in place, and return its sum over all ranks."""
    gradient.div_(divisor)
    await transport.all_reduce(gradient)
    return gradient
