"""Triton where it is installed; elsewhere a stand-in with which the kernel files can be imported, but not launched."""

from __future__ import annotations

import inspect
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit: Any = triton.jit
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    HAS_TRITON = False
    tl: Any = None  # type: ignore[no-redef]

    jit = staticmethod


def kernel(function: Any) -> Any:
    """`triton.jit` for a function that is launched. Its pointers are named ``*_ptr``.

    Triton compiles a kernel anew for an integer argument that is 1, a multiple of 16, or neither. The counts that our
    kernels take gain nothing from it, and differ between the buckets of a model: every new combination would stop
    training for a compilation. Here only pointers (by their alignment) and constexprs are specialised.
    """
    if not HAS_TRITON:
        return jit(function)
    scalars = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and "constexpr" not in str(parameter.annotation)
    ]
    return jit(function, do_not_specialize=scalars)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, a positive integer."""
    return 1 << (number - 1).bit_length()


__all__ = ["HAS_TRITON", "jit", "kernel", "next_power_of_2", "tl"]
