"""Per-parameter memory of compressors, kept from step to step: declarations, and the memory of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.kernels import SegmentTable, compute_dtype
from gradwire.validation import check_memory_shape

Merge = Literal["sum", "mean", "same"]
MemoryByName = Mapping[str, Mapping[str, Tensor]]  # by entry and parameter name


@dataclass(frozen=True)
class Memory:
    """The declaration of a tensor that a state keeps for each parameter.

    Attributes:
        merge: how the tensors of all ranks become one in a checkpoint. "sum": a resumed rank gets its share, the sum
            divided by the world size. "mean": each rank gets the mean. "same": all ranks have equal tensors.
        dtype: dtype of the tensor; None: fp32, or fp64 for fp64 gradients.
        shape: shape of the tensor, from the gradient as a real tensor; by default the gradient's own shape. None, only
            with "same": the state makes the tensors in `make_bucket` and validates their shapes itself.

    Raises:
        ValueError: ``merge`` is another word, or memory of another merge than "same" has no shape.
    """

    merge: Merge = "sum"
    dtype: torch.dtype | None = None
    shape: Callable[[Tensor], Sequence[int]] | None = lambda gradient: gradient.shape

    def __post_init__(self) -> None:
        if self.merge not in get_args(Merge):
            raise ValueError(f"merge is {self.merge!r}; expected one of {', '.join(map(repr, get_args(Merge)))}.")
        if self.shape is None and self.merge != "same":
            # After an error, ranks may have tensors of different parameters: the others add zeros.
            raise ValueError(f"shape is None with merge={self.merge!r}; expected a shape, or merge='same'.")

    def zeros(self, layout: Tensor, device: torch.device) -> Tensor:
        """Zeros in the declared shape: a parameter's memory before its first step."""
        assert self.shape is not None
        return torch.zeros(tuple(self.shape(layout)), dtype=self.dtype or compute_dtype(layout.dtype), device=device)


class BucketMemory:
    """The memory of a bucket, kept from step to step: ``bucket["errors"]`` is a list, with one tensor per parameter.

    Subclasses are buckets of one algorithm, which may hold their errors in another form than by parameter name.

    Attributes:
        layout: position of each gradient in a flat buffer of the bucket.
        memory: tensors by entry and parameter name. Updated in place.
        errors: all errors of the bucket, if one tensor holds them; those in ``memory`` are views of it.
        inherited: errors by parameter name that the next step takes over, and then sets to None.
        is_retired: whether a state has dropped it: no later step may use it.
        can_replay: whether the launches of a step can be repeated in later steps, after `refresh`.
    """

    can_replay: bool = False
    is_retired = False

    errors: Tensor | None = None
    inherited: dict[str, Tensor] | None = None

    def __init__(self, layout: SegmentTable, memory: dict[str, dict[str, Tensor]]) -> None:
        self.layout = layout
        self.memory = memory

    def __getitem__(self, entry: str) -> list[Tensor]:
        return list(self.memory[entry].values())

    def folded(self) -> MemoryByName:
        """The memory that the next bucket of these parameters starts from, on any ranks: ``memory``, or copies."""
        return self.memory

    def refresh(self, source: Sequence[Tensor], target: Sequence[Tensor], iteration: int) -> None:
        """Replace the numbers that a step reads from device memory: addresses of its tensors, the number of the step.

        Then the launches of an earlier step can be repeated, if both are in place or both are not.
        """

    def take_back(self, name: str, error: Tensor) -> bool:
        """Add to this bucket's own errors of a parameter. False if it has none: the caller adds to ``memory``."""
        return False


def names_or_numbers(names: Sequence[str] | None, layouts: Sequence[Tensor]) -> Sequence[str]:
    """The names of parameters; without names "0", "1", ..."""
    return names if names is not None else [str(i) for i in range(len(layouts))]


def error_like(error: Tensor | None, layout: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The error memory of a parameter, as a copy if it has another layout or dtype; zeros if there is none yet."""
    if error is not None:
        check_memory_shape("errors", name, error, layout.shape)
        if (error.dtype, error.device, error.stride()) == (dtype, layout.device, layout.stride()):
            return error
    like = torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)
    return like.zero_() if error is None else like.copy_(error)
