"""`Case`: a kernel on the buckets of a model, beside other implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.bench.shapes import Shape

RANKS = 2  # the gradients are divided by it

Call = Callable[[int], object]  # takes the index of a bucket


@dataclass(frozen=True)
class Case:
    """A kernel on some buckets of a model.

    Outputs are NaN before, because fresh memory may hold the right result of another case.

    Attributes:
        kernel: its name and options.
        nbytes: bytes that gradwire's kernel reads and writes, for each bucket.
        implementations: by name, gradwire's first.
        check: raises AssertionError if gradwire's result for bucket 0 is wrong; call it after a run on that bucket.
    """

    kernel: str
    nbytes: list[int]
    implementations: dict[str, Call]
    check: Callable[[], None]


def random_gradients(shapes: Sequence[Sequence[Shape]], device: torch.device) -> list[list[Tensor]]:
    """Normal gradients of the shapes of each bucket."""
    return [[torch.randn(shape, device=device) for shape in of_bucket] for of_bucket in shapes]
