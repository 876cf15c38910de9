"""The gradients of a bucket as the algorithms see them: tensors where they lie, and their layout on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradwire.kernels import SegmentTable


class Gradients(NamedTuple):
    """Tensors of one dtype, and the table that says where each stands in a flat wire buffer."""

    tensors: Sequence[Tensor]
    table: SegmentTable

    @property
    def flat(self) -> Tensor | None:
        """The one real 1-D tensor that holds all of them, where the bucket is flat already; else None."""
        if len(self.tensors) == 1 and self.tensors[0].dim() == 1 and not self.table.is_complex:
            return self.tensors[0]
        return None

    def each(self, table: SegmentTable) -> list[Tensor]:
        """One real tensor for each parameter whose gradient is among them, laid out as ``table`` says."""
        flat = self.flat
        return table.views(flat) if flat is not None else self.table.real(self.tensors)
