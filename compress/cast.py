"""`Gradients`, and their all-reduce in their own dtype or in 16 bits.

    w_k = cast(g_k / n),   w = sum over the n ranks of w_k,   g = cast(w)

Division comes before the cast: 1e5 and 0 on two ranks would overflow fp16, but their mean, 5e4, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.kernels import SegmentTable, flatten, unflatten


class Gradients(NamedTuple):
    """The gradients of a bucket: a list with one tensor per parameter, or one flat buffer that holds them all.

    Attributes:
        tensors: one per parameter, or one flat buffer; of one dtype.
        table: layout of ``tensors`` in a wire buffer.
        layout: layout of the gradients, one per parameter, in the flat buffer; None: ``tensors`` are the gradients.
    """

    tensors: Sequence[Tensor]
    table: SegmentTable
    layout: SegmentTable | None = None

    @property
    def flat(self) -> Tensor | None:
        """The flat buffer, if ``tensors`` is one real 1-D tensor; else None."""
        if len(self.tensors) == 1 and self.tensors[0].dim() == 1 and not self.table.is_complex:
            return self.tensors[0]
        return None

    def each(self) -> list[Tensor]:
        """One real tensor per parameter: the gradient itself, or a view of the flat buffer."""
        if self.layout is None:
            return self.table.real(self.tensors)
        return self.layout.views(self.tensors[0])

    def flatten(self, wire: Tensor, **options: Any) -> Tensor:
        """Gather all gradients in ``wire``; see `gradwire.kernels.flatten`."""
        return flatten(self.tensors, wire, table=self.table, **options)

    def unflatten(self, wire: Tensor, **options: Any) -> None:
        """Scatter ``wire`` to all gradients; see `gradwire.kernels.unflatten`."""
        unflatten(wire, self.tensors, table=self.table, **options)


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
    source.flatten(wire, scale=1 / (divisor or transport.world_size))
    await transport.all_reduce(wire)
    if wire is not flat:
        target.unflatten(wire)


async def sparse_all_reduce(gradient: Tensor, transport: Transport, divisor: int) -> Tensor:
    """Divide a sparse gradient by ``divisor``, in place, and return its sum over all ranks."""
    gradient.div_(divisor)
    await transport.all_reduce(gradient)
    return gradient
