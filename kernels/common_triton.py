"""Device functions that the Triton kernels share, and the decorator of kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from gradwire.kernels.launch import Kernel


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` for a function that is launched, as a `Kernel`. Its pointers are named ``*_ptr``.

    Triton compiles a kernel anew for an integer argument that is 1, a multiple of 16, or neither. The counts that our
    kernels take gain nothing from it, and differ between the buckets of a model: every new combination would stop
    training for a compilation. Here only pointers (by their alignment) and constexprs are specialized.
    """
    scalars = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and "constexpr" not in str(parameter.annotation)
    ]
    return Kernel(triton.jit(function, do_not_specialize=scalars))


@cache
def triton_dtype(dtype: torch.dtype) -> object:
    """The Triton type of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """`narrow_reference` in Triton."""
    # A single return: Triton type-checks every return, even one that a constexpr rules out.
    return x if DTYPE == tl.float64 else x.to(tl.float32).to(DTYPE)


@triton.jit
def load_fields(
    table_ptr,  # [fields, n] int64
    n,
    column,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):
    """The fields ``FIRST`` to ``LAST - 1`` of one column, as a tuple.

    Addresses are returned as integers, not pointers: `tl.multiple_of` marks the operation that creates a pointer. A
    pointer returned from a call loses that mark, and its accesses are no longer vectorized.

    A kernel that needs fields again after a long loop loads them again, VOLATILE: the compiler cannot merge these loads
    with those before the loop, so the fields, and masks made of them, occupy no registers in the loop.
    """
    fields = tl.tuple(())
    for field in tl.static_range(FIRST, LAST):
        fields += (tl.load(table_ptr + field * n + column, volatile=VOLATILE),)
    return fields


@triton.jit
def load_chunk(
    table_ptr,  # [FIELDS S + 2 C] int64: `SegmentTable.packed`
    n_segments,
    n_chunks,
    chunk,
    FIELDS: tl.constexpr,
):
    """The fields of a chunk's segment, the address first, and the chunk's start within it."""
    segment, start = load_fields(table_ptr + FIELDS * n_segments, n_chunks, chunk, 0, 2)
    return load_fields(table_ptr, n_segments, segment, 0, FIELDS) + (start,)  # noqa: RUF005 (Triton's tuples)


@triton.jit
def _mix_triton(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_bits_triton(
    key,
    step,
    index,  # [BLOCK]
):
    """`random_bits` in Triton: uint64, [BLOCK]. All arguments are int64."""
    gamma: tl.constexpr = 0x9E3779B97F4A7C15
    stream = _mix_triton(key.to(tl.uint64, bitcast=True) + step.to(tl.uint64, bitcast=True) * gamma)
    return _mix_triton(stream + (index + 1).to(tl.uint64, bitcast=True) * gamma) >> 40


@triton.jit
def uniform_triton(
    key,
    step,
    index,  # [BLOCK]
):
    """`uniform` in Triton: fp32, [BLOCK]. All arguments are int64."""
    return (random_bits_triton(key, step, index).to(tl.float32) * 1.1920928955078125e-07 - 1.0) + 5.9604644775390625e-08
