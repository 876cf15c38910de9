"""Counter-based random numbers: the same counters give the same bits on every rank and device, in every run.

    u(key, step, index) = (2 k + 1) / 2^24 - 1, where k is the top 24 bits of mix(mix(key + step g) + (index + 1) g)

u is uniform in (-1, 1) and never 0, so that a vector of such numbers can be divided by its norm. mix is the finalizer
of SplitMix64, g its increment. `random_bits` gives k alone.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

# Signed 64-bit numbers: torch has no unsigned arithmetic.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def random_key(seed: int, name: str) -> int:
    """A signed 64-bit key that depends on the seed and the name alone."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """The logical shift; that of torch copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def random_bits(key: int | Tensor, step: Tensor, index: Tensor) -> Tensor:
    """24 random bits for each element of ``index``: int64. ``key`` is an int64 number or broadcasts with ``index``."""
    stream = _mix(step * GAMMA + key)
    return _shift_right(_mix(stream + (index + 1) * GAMMA), 40)


def uniform(key: int, step: Tensor, index: Tensor) -> Tensor:
    """u(key, step, index) for each element of ``index``: fp32, in (-1, 1), never 0.

    Args:
        key: signed 64-bit number (`random_key`).
        step: int64, one element, on the device of ``index``.
        index: int64, any shape.
    """
    return (random_bits(key, step, index).to(torch.float32) * 2.0**-23 - 1) + 2.0**-24
