"""`Gradients`: the tensors of a bucket and their layout in a wire buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradwire.kernels import SegmentTable


class Gradients(NamedTuple):
    """Gradients of one dtype, and the position of each in a flat wire buffer.

    Attributes:
        tensors: one for each parameter, or one flat buffer that holds all.
        table: their layout in a wire buffer.
    """

    tensors: Sequence[Tensor]
    table: SegmentTable

    @property
    def flat(self) -> Tensor | None:
        """The flat buffer, if the bucket is one real 1-D tensor; else None."""
        if len(self.tensors) == 1 and self.tensors[0].dim() == 1 and not self.table.is_complex:
            return self.tensors[0]
        return None

    def each(self, table: SegmentTable) -> list[Tensor]:
        """One real tensor for each gradient of ``table``: views of the flat buffer, or the tensors themselves."""
        flat = self.flat
        return table.views(flat) if flat is not None else self.table.real(self.tensors)
