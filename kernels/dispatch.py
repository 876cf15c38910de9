"""Triton where it is installed, and the choice between Triton kernels, CPU paths and references.

Triton kernels run on a GPU or in Triton's interpreter. The environment variable ``GRADWIRE_KERNELS`` overrides the
choice: ``auto`` (the default), ``triton``, or ``torch``. Without Triton, the kernel files can be imported, and their
kernels cannot be launched.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language

    HAS_TRITON = True
    jit: Any = triton.jit
    tl: Any = triton.language
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    HAS_TRITON = False
    jit = staticmethod
    tl = None

CHOICES = ("auto", "triton", "torch")
WIRE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Any) -> Any:
    """`triton.jit` for a function that is launched. Its pointers are named ``*_ptr``.

    Triton compiles a kernel anew for an integer argument that is 1, a multiple of 16, or neither. The counts that our
    kernels take gain nothing from it, and differ between the buckets of a model: every new combination would stop
    training for a compilation. Here only pointers (by their alignment) and constexprs are specialized.
    """
    if not HAS_TRITON:
        return jit(function)
    scalars = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and "constexpr" not in str(parameter.annotation)
    ]
    return jit(function, do_not_specialize=scalars)


@jit
def _probe_kernel() -> None:
    """Never launched: its type tells how Triton decorates kernels."""


@cache
def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which takes CPU tensors (``TRITON_INTERPRET=1``)."""
    return HAS_TRITON and type(_probe_kernel).__name__ == "InterpretedFunction"


@cache
def has_tf32(device: torch.device) -> bool:
    """Whether `tl.dot` in TF32 compiles for ``device``. Triton's interpreter accepts it, and computes in fp32."""
    if device.type != "cuda":
        return True
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942")
    return torch.cuda.get_device_capability(device) >= (8, 0)


def use_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of ``device`` run as Triton kernels.

    Raises:
        ValueError: ``GRADWIRE_KERNELS`` is none of auto, triton, torch.
        RuntimeError: ``GRADWIRE_KERNELS=triton``, and Triton cannot run on ``device``.
    """
    choice = os.environ.get("GRADWIRE_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"GRADWIRE_KERNELS is {choice!r}; expected one of {', '.join(CHOICES)}. Unset it for auto.")
    possible = HAS_TRITON and (device.type == "cuda" or is_interpreted())
    if choice == "triton" and not possible:
        reason = f"the tensors are on {device}" if HAS_TRITON else "Triton is not installed"
        raise RuntimeError(
            f"GRADWIRE_KERNELS=triton, but {reason}: Triton kernels need a CUDA or ROCm tensor, "
            "or TRITON_INTERPRET=1 set before gradwire is imported. Set GRADWIRE_KERNELS=auto to choose by device."
        )
    return possible and choice != "torch"


def choose(
    device: torch.device, triton: Function, cpu: Function, reference: Function, takes_triton: bool = True
) -> Function:
    """The implementation for tensors of ``device``; the Triton kernels only if they accept the operands."""
    if takes_triton and use_triton(device):
        return triton
    return cpu if device.type == "cpu" else reference


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, a positive integer."""
    return 1 << (number - 1).bit_length()


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic between these dtypes: fp64 if one of them is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def triton_dtype(dtype: torch.dtype) -> object:
    """The Triton type of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def narrow_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast from the dtype of the arithmetic. fp64 is rounded to fp32 on its way to 16 bits, as in PyTorch."""
    return x if dtype == torch.float64 else x.to(torch.float32).to(dtype)


@jit
def narrow(x, DTYPE: tl.constexpr):
    """`narrow_reference` in Triton."""
    # A single return: Triton type-checks every return, even one that a constexpr rules out.
    return x if DTYPE == tl.float64 else x.to(tl.float32).to(DTYPE)
