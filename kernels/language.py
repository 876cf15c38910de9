"""Triton, where it is installed; a stand-in that only lets the kernel files be imported, where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit: Callable[[Callable[..., Any]], Any] = triton.jit
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    HAS_TRITON = False
    tl: Any = None  # type: ignore[no-redef]

    def jit(fn: Callable[..., Any]) -> Any:  # noqa: D103
        return fn


__all__ = ["HAS_TRITON", "jit", "tl"]
