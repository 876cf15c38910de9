"""`PowerSGDMemory`: the error feedback and the warm start of one parameter.

    M = G + E,    E = M - (the applied approximation of M)

Nothing is lost: summed over ranks and steps, gradients = results + remaining error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PowerSGDMemory:
    """PowerSGD's state of one parameter, kept from step to step. Its tensors are updated in place.

    Attributes:
        error: E, the residual of this rank: in the shape and strides of the gradient, in fp32, or fp64 for fp64
            gradients. None without error feedback.
        p: unit columns of P, in shape [matrices, r, n]; equal on all ranks. Only
            `alternating_all_reduce` needs it.
        q: unit columns of Q, in shape [matrices, r, m]; equal on all ranks.
    """

    error: Tensor | None = None
    p: Tensor | None = None
    q: Tensor | None = None

    def error_like(self, layout: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """``error``, as a copy if it has another layout or dtype; zeros if there is none yet.

        Args:
            layout: a real dense tensor with the shape, strides and device of the gradient.
            dtype: of the arithmetic.
            name: of the parameter, for the error message.

        Raises:
            ValueError: the error has another shape.
        """
        if self.error is not None and self.error.shape != layout.shape:
            raise ValueError(
                f"The error memory of {name} has shape {tuple(self.error.shape)}, its gradient {tuple(layout.shape)}. "
                "Load the state of this model, or begin with a new one."
            )
        wanted = (dtype, layout.device, layout.stride())
        if self.error is not None and (self.error.dtype, self.error.device, self.error.stride()) == wanted:
            return self.error
        error = torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)
        return error.zero_() if self.error is None else error.copy_(self.error)
