"""`Gradients`, and their all-reduce in their own dtype or in 16 bits.

    w_k = cast(g_k / n),   w = sum over the n ranks of w_k,   g = cast(w)

Division comes before the cast: 1e5 and 0 on two ranks would overflow fp16, but their mean, 5e4, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.kernels import SegmentTable, flatten, unflatten


class Gradients(NamedTuple):
    """Gradients of one dtype, and the position of each in a flat wire buffer.

    Attributes:
        tensors: one per parameter, or one flat buffer.
        table: their layout in a wire buffer.
    """

    tensors: Sequence[Tensor]
    table: SegmentTable

    @property
    def flat(self) -> Tensor | None:
        """The flat buffer, if ``tensors`` is one real 1-D tensor; else None."""
        if len(self.tensors) == 1 and self.tensors[0].dim() == 1 and not self.table.is_complex:
            return self.tensors[0]
        return None

    def each(self, table: SegmentTable) -> list[Tensor]:
        """One real tensor per gradient of ``table``: a view of the flat buffer, or the gradient itself."""
        flat = self.flat
        return table.views(flat) if flat is not None else self.table.real(self.tensors)


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
        target: the result: ``source`` itself, other tensors like it, or one flat tensor of the same numel.
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


async def sparse_all_reduce(gradient: Tensor, transport: Transport, divisor: int) -> Tensor:
    """Divide a sparse gradient by ``divisor``, in place, and return its sum over all ranks."""
    gradient.div_(divisor)
    await transport.all_reduce(gradient)
    return gradient
