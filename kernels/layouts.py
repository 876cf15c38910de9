"""Layouts and dtypes of tensors: in which order elements lie in memory, and in which dtype to compute with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo import guards

WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic between these dtypes: fp64 if one of them is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, a positive integer."""
    return 1 << (number - 1).bit_length()


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one as real pairs in a new last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_numel(tensor: Tensor) -> int:
    """The number of real elements of a tensor: a complex one counts twice."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def memory_order(tensor: Tensor) -> Tensor:
    """The 1-D real view of a dense tensor's elements in the order of its memory; complex numbers become pairs."""
    tensor = as_real(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def gradient_layout(parameter: Tensor) -> Tensor:
    """A tensor in the layout that autograd gives the gradient: the parameter's own if dense, else row-major."""
    if is_dense(parameter.shape, parameter.stride()):
        return parameter.detach()
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def layout_in_dtype(layout: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the shape, strides and device of ``layout``, in ``dtype``; ``layout`` itself if it has it."""
    if layout.dtype == dtype:
        return layout
    return torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that compares as many tensors with ``tensors`` at once, in C++.

    True: each has the shape, strides, dtype, device, memory format and lazy conjugation of its counterpart. False is
    inconclusive: the Python type and ``requires_grad`` are compared, too.

    It is the check by which TorchDynamo decides whether compiled code fits its inputs. It keeps no tensor alive.
    """
    make: Any = guards.TensorGuards  # a private name of PyTorch; the stub lacks the tensors
    return cast("Callable[..., bool]", make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check)
