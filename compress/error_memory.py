"""Error feedback: what compression left out of earlier gradients, to be sent with the next.

    M = G + E,    E = M - (what was applied in place of M)

So nothing is lost: summed over ranks and steps, gradients in = results out + the error that is left. One tensor a
parameter, in the layout of its gradient and in the dtype of the arithmetic: fp32, or fp64 for fp64 gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compress.transport import Transport
from gradwire.kernels import SegmentTable, compute_dtype, memory_order


class ErrorMemory:
    """The error of each parameter on this rank, by name."""

    def __init__(self) -> None:
        self.errors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(error.nbytes for error in self.errors.values())

    def of(self, name: str, layout: Tensor, dtype: torch.dtype) -> Tensor:
        """The error of a parameter, zeros at first.

        Args:
            name: of the parameter.
            layout: a real dense tensor with the shape, strides and device of its gradient.
            dtype: of the arithmetic.

        Raises:
            ValueError: the remembered error has another shape.
        """
        known = self.errors.get(name)
        if known is not None and known.shape != layout.shape:
            raise ValueError(
                f"The error memory of {name} has shape {tuple(known.shape)}, its gradient {tuple(layout.shape)}. "
                "Load the state of this model, or begin with a new one."
            )
        wanted = (dtype, layout.device, layout.stride())
        if known is None or (known.dtype, known.device, known.stride()) != wanted:
            error = torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)
            self.errors[name] = error.zero_() if known is None else error.copy_(known)
        return self.errors[name]

    def packed(self, names: Sequence[str], table: SegmentTable) -> Tensor:
        """One flat tensor with the errors of several parameters, which become views of it.

        Args:
            names: of the parameters.
            table: the layout of their gradients in a flat buffer.

        Raises:
            ValueError: a remembered error has another shape.
        """
        flat = torch.zeros(table.numel, dtype=compute_dtype(table.dtype), device=table.device)
        for name, view in zip(names, table.views(flat), strict=True):
            if name in self.errors:
                view.copy_(self.of(name, view, flat.dtype))
            self.errors[name] = view
        return flat

    async def averaged(self, transport: Transport, device: torch.device) -> dict[str, Tensor]:
        """The mean of every error over the ranks, on the CPU. Every rank must call it.

        PowerSGD is linear in M, so its results depend only on the mean error: ranks that all start from the mean go on
        as those went that had one error each, however many there were and are.
        """
        means = {}
        for name in sorted(self.errors):
            mean = self.errors[name].to(device) / transport.world_size
            await transport.all_reduce(memory_order(mean))
            means[name] = mean.contiguous().cpu()
        return means
