"""PyTorch's private names that `gradwire.kernels` uses: a new release can break only this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch._C._dynamo import guards

__all__ = ["layout_guard"]


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors that compares all of them with ``tensors`` at once, in C++.

    True: each has the shape, strides, dtype, device, memory format and lazy conjugation of its counterpart. False says
    nothing, because more is compared than a layout: also the Python type and ``requires_grad``.

    It is the check by which TorchDynamo decides whether compiled code fits its inputs. It keeps no tensor alive.
    """
    make: Any = guards.TensorGuards  # the stub lacks the tensors
    return cast("Callable[..., bool]", make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check)
