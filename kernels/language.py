"""Triton, where it is installed; a stand-in that only lets the kernel files be imported, where it is not."""

from __future__ import annotations

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


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


__all__ = ["HAS_TRITON", "jit", "next_power_of_2", "tl"]
