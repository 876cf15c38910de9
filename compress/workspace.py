"""Workspace: the wire memory of a bucket under way."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Bytes; a buffer on any device begins at least so aligned.
ALIGNMENT = 64


class Workspace:
    """One buffer that buckets reuse in turn, as large as the largest that it held in the last few steps.

    The first step's buckets may be much larger than all later ones, so the buffer shrinks when the last `MEMORY` steps
    needed less.
    """

    MEMORY = 4

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._peaks: deque[int] = deque(maxlen=self.MEMORY)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._buffer.nbytes

    def start_step(self) -> None:
        """Tell that the first bucket of a step comes next."""
        if len(self._peaks) == self.MEMORY and max(self._peaks) < self._buffer.nbytes:
            self._buffer = self._buffer.new_empty(max(self._peaks))
        self._peaks.append(0)

    def wire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor, not initialised, valid until the next call."""
        return self.wires((numel, dtype))[0]

    def wires(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """A 1-D tensor for each number of elements and dtype, not initialised, valid until the next call."""
        starts, nbytes = [], 0
        for numel, dtype in sizes:
            starts.append(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            nbytes = starts[-1] + numel * dtype.itemsize
        if not self._peaks:
            self._peaks.append(0)
        self._peaks[-1] = max(self._peaks[-1], nbytes)
        if nbytes > self._buffer.nbytes:
            self._buffer = self._buffer.new_empty(nbytes)
        return [
            self._buffer[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]
