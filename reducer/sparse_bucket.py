"""The bucket of a sparse gradient, which no other gradient shares and no hook compresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.reducer import errors
from gradwire.reducer.bucket import BucketBase, BucketSpec, TakeBack

__all__ = ["SparseBucket"]


class SparseBucket(BucketBase):
    """The sparse gradient of one parameter, with the interface of ``torch.distributed.GradBucket``."""

    _gradient: Tensor | None

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(spec)
        (self._parameter,) = spec.parameters

    def buffer(self) -> Tensor:
        """The gradient: sparse, in the parameter's shape."""
        assert self._gradient is not None
        return self._gradient

    def gradients(self) -> list[Tensor]:
        """A list whose only element is `buffer`."""
        return [self.buffer()]

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that `buffer` returns."""
        self._gradient = buffer

    def collect(
        self,
        zero_copy: bool,
        unused: Sequence[int] = (),
        shared: Collection[int] = (),
        incoming: Tensor | None = None,
    ) -> None:
        """Copy the gradient; an undefined gradient becomes a sparse tensor without entries.

        Raises:
            RuntimeError: the gradient is dense.
        """
        gradient = self._parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise RuntimeError(errors.dense_gradient(self._names[0]))
        self._gradient = self._empty() if gradient is None else gradient.detach().clone()
        self.stand_ins = list(unused)

    def of_zeros(self, zero_copy: bool) -> SparseBucket:
        """A copy of this bucket whose gradient has no entries."""
        bucket = SparseBucket(self._spec)
        bucket._gradient = bucket._empty()
        return bucket

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Make the hook's result the gradient. See `DenseBucket.finish`."""
        if used.get(0, True):
            result = result * scale if scale != 1 else result
            self._parameter.grad = result.to(self._parameter.dtype)

    def release(self) -> None:
        """Drop all tensors of this backward."""
        super().release()
        self._gradient = None

    def _empty(self) -> Tensor:
        # Sparse in the first dimension only, like an embedding's gradient: equal on all ranks.
        shape = self._parameter.shape
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *shape[1:], dtype=self._parameter.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
