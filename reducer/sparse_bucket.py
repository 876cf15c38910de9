"""The bucket of a sparse gradient, which travels alone and whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.reducer import errors
from gradwire.reducer.bucket import BucketFacts, TakeBack


class SparseBucket(BucketFacts):
    """The sparse gradient of one parameter, with the interface of ``torch.distributed.GradBucket``."""

    _gradient: Tensor | None

    def __init__(self, index: int, is_last: bool, parameter: Tensor, name: str) -> None:
        super().__init__(index, is_last, [parameter], [name])
        self._parameter = parameter

    def buffer(self) -> Tensor:
        """The gradient: sparse, in the parameter's shape."""
        assert self._gradient is not None
        return self._gradient

    def gradients(self) -> list[Tensor]:
        """The same."""
        return [self.buffer()]

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` stand for another tensor from now on."""
        self._gradient = buffer

    def collect(self, zero_copy: bool, unused: Sequence[int] = ()) -> None:
        """Take a copy of the gradient; one without entries if it is undefined.

        Raises:
            RuntimeError: it is dense.
        """
        gradient = self._parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise RuntimeError(errors.dense_gradient(self._names[0]))
        self._gradient = self._empty() if gradient is None else gradient.detach().clone()
        self.stand_ins = list(unused)

    def of_zeros(self, zero_copy: bool) -> SparseBucket:
        """This bucket with a gradient without entries."""
        bucket = SparseBucket(self._index, self._is_last, self._parameter, self._names[0])
        bucket._gradient = bucket._empty()
        return bucket

    def finish(
        self, result: Tensor | None, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None
    ) -> None:
        """Make the hook's result the gradient, and let go of it. See `GradBucket.finish`."""
        if used.get(0, True):
            assert result is not None
            result = result * scale if scale != 1 else result
            self._parameter.grad = result.to(self._parameter.dtype)
        self.release()

    def release(self) -> None:
        """Let go of this backward's gradient."""
        super().release()
        self._gradient = None

    def _empty(self) -> Tensor:
        # As an embedding's gradient has it: sparse in the first dimension only. Ranks must agree on that.
        shape = self._parameter.shape
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *shape[1:], dtype=self._parameter.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
