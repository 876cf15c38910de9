"""Wire formats: how a block of fp32 numbers becomes bytes.

    format          bits  scale s            code of an element x                                    decoded
    int8            8     absmax / levels    q = rint(x * (1 / s)), in two's complement              s * q
    int4            4     absmax / levels    q + 2^(bits - 1)                                        s * q
    int2            2     absmax / levels    (q + 3) / 2, q the nearest of -3, -1, 1 and 3           s * q
    sign            1     mean of |x|        x >= 0                                                  +-s
    fp8_e4m3        8     absmax / 448       x * (1 / s) in e4m3fn, rounded to nearest even          s * q
    bf16 fp16 fp32  16 32 none               x, saturated at the format's largest number             x

The levels are 127, 7, 3 and 1. Scales travel in bf16, which has the range of fp32. A scale is rounded up, so no element
exceeds the levels by more than rounding. It is raised to 2^-126, so that 1 / s is finite, and lowered to a number
whose product with the levels is finite; an element beyond the levels then saturates. A block of zeros has the scale 0.
A block with an inf or a NaN has the scale NaN and decodes to NaN. Formats without scales pass inf and NaN through.

In int8 and int4, s * q has 8 + 7 significant bits at most and is therefore exact in fp32, and so is x - s * q,
because s * q is 0 or within a factor of two of x. What was sent plus the error is x to the bit.

int2 and sign have no zero, and sign saturates: the largest element of a block may be many times the mean. With a scale
of 2/3 of the mean of |x|, int2 would saturate, too: its relative error on normal numbers would be 0.35 instead of 0.51,
but error feedback would send large elements late, and trainings take more steps (docs/log/quantization.md).

The codes of a block are packed in planes: with k = 8 / bits, byte i holds the elements i + t * block_size / k at the
bits t * bits, for t = 0 .. k - 1. Both ends of the exchange then work on contiguous elements.

The mean of a block is a halving fold of |x| / block_size, a[:h] + a[h:], times block_size / (number of elements). Every
implementation adds in this order.

Stochastic rounding of y to an integer is floor(y) + (u < y - floor(y)), where u is uniform in [0, 1). Numbers on the
grid stay as they are; the expectation is y plus at most 2^-24.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor, frexp, ldexp
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.counter_random import random_bits

FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
# The smallest scale of a block that is not zero: its reciprocal is finite.
MIN_SCALE = 2.0**-126
SCALE_BYTES = 2
# Offset from the payload's salt to the salt of the random numbers that round the error memory.
ERROR_SALT = 0x5851F42D4C957F2D


# The dtypes that a payload may have, and their levels: those of fp8 are scaled.
FLOAT_LEVELS = {torch.float8_e4m3fn: 448, torch.bfloat16: 0, torch.float16: 0, torch.float32: 0}


@dataclass(frozen=True)
class WireFormat:
    """One encoding of blocks.

    Attributes:
        name: the name that users write.
        bits: payload bits per element: 2, 4 or 8 for integers, 1, 2 or 4 for odd numbers, else those of ``dtype``.
        levels: the largest magnitude on the grid, in units of the scale; 0: there are no scales.
        dtype: dtype of the payload, if the codes are floating-point numbers.
        is_odd: whether the grid is the odd numbers from -levels to levels, without a zero.

    Raises:
        ValueError: the implementations cannot encode and decode such a format.
    """

    name: str
    bits: int
    levels: int = 0
    dtype: torch.dtype | None = None
    is_odd: bool = False

    def __post_init__(self) -> None:
        bits, levels = self.bits, self.levels
        if self.dtype is not None:
            if self.dtype not in FLOAT_LEVELS:
                raise self._wrong("dtype", self.dtype, f"None or one of {', '.join(map(str, FLOAT_LEVELS))}")
            if self.is_odd:
                raise self._wrong("is_odd", True, f"False with {self.dtype}")
            if bits != 8 * self.dtype.itemsize:
                raise self._wrong("bits", bits, f"{8 * self.dtype.itemsize}, the size of {self.dtype}")
            if levels != FLOAT_LEVELS[self.dtype]:
                raise self._wrong("levels", levels, f"{FLOAT_LEVELS[self.dtype]} with {self.dtype}")
        elif self.is_odd:
            if bits not in (1, 2, 4):
                raise self._wrong("bits", bits, "1, 2 or 4 for odd numbers: several codes fill a byte")
            if levels != (1 << bits) - 1:
                raise self._wrong("levels", levels, f"{(1 << bits) - 1}, the largest of 2^{bits} odd numbers")
        else:
            if bits not in (2, 4, 8):
                raise self._wrong("bits", bits, "2, 4 or 8 for integers: whole codes fill a byte, and one code is 0")
            if levels not in range(1, 1 << bits - 1):
                raise self._wrong("levels", levels, f"1 to {(1 << bits - 1) - 1}, the largest integer of {bits} bits")

    def _wrong(self, attribute: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{attribute} of the wire format {self.name!r} is {value!r}; expected {expected}.")

    @cached_property
    def is_scaled(self) -> bool:
        """Whether each block has a scale."""
        return self.levels > 0

    @cached_property
    def is_integer(self) -> bool:
        """Whether the codes are integers, with a code for 0."""
        return self.dtype is None and not self.is_odd

    @cached_property
    def is_bf16(self) -> bool:
        """Whether the payload is bf16; Triton's kernels cannot compare dtypes of PyTorch."""
        return self.dtype == torch.bfloat16

    @cached_property
    def offset(self) -> int:
        """The number added to an integer to make its code. A byte holds any integer of int8 as it is."""
        return 0 if self.bits == 8 else 1 << self.bits - 1

    @cached_property
    def planes(self) -> int:
        """Number of elements in a byte, each of another plane; 1 for formats of 8 bits or more."""
        return max(8 // self.bits, 1)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of one block's scale."""
        return SCALE_BYTES if self.is_scaled else 0

    @cached_property
    def max_scale(self) -> float:
        """The largest scale: the largest bf16 number whose product with the levels is finite in fp32."""
        mantissa, exponent = frexp(FP32_MAX / self.levels)
        return ldexp(floor(mantissa * 256) / 256, exponent)

    def payload_bytes(self, block_size: int) -> int:
        """Bytes of one block's payload."""
        return block_size * self.bits // 8

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: scale and payload."""
        return self.scale_bytes + self.payload_bytes(block_size)


WIRE_FORMATS = {
    wire.name: wire
    for wire in (
        WireFormat("int8", 8, levels=127),
        WireFormat("int4", 4, levels=7),
        WireFormat("int2", 2, levels=3, is_odd=True),
        WireFormat("sign", 1, levels=1, is_odd=True),
        WireFormat("fp8_e4m3", 8, levels=448, dtype=torch.float8_e4m3fn),
        WireFormat("bf16", 16, dtype=torch.bfloat16),
        WireFormat("fp16", 16, dtype=torch.float16),
        WireFormat("fp32", 32, dtype=torch.float32),
    )
}


@dataclass(frozen=True, eq=False)
class Rounding:
    """The random numbers with which a launch rounds an error memory in bf16.

    An element's number depends on its tensor's key + salt, the step, and its index: its place in the memory order of
    its tensor. So the numbers do not depend on the bucket.

    Attributes:
        step: int64, one element, on the device: the number of the step. Kernels read it on the device.
        salt: a signed 64-bit number that tells apart uses with the same keys, such as the two shots, or ranks.
    """

    step: Tensor
    salt: int = 0

    @property
    def error_salt(self) -> int:
        """The salt that kernels add to keys: signed, 64 bits."""
        return (self.salt + ERROR_SALT + 2**63) % 2**64 - 2**63


class Blocks(NamedTuple):
    """Contents of consecutive blocks: int64, one element per block."""

    counts: Tensor  # number of elements
    keys: Tensor  # key of the tensor
    starts: Tensor  # index of the first element in the tensor's memory order


def round_scale(absmax: Tensor, quotient: Tensor, wire: WireFormat) -> Tensor:
    """``quotient`` rounded up to bf16 and into the range of scales; 0 where ``absmax`` is 0. All are fp32."""
    # bf16 is the upper half of fp32: adding 0xFFFF before cutting off the lower half rounds away from zero.
    up = ((quotient.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(absmax > 0, up.clamp(MIN_SCALE, wire.max_scale), 0.0)


def block_scales(blocks: Tensor, counts: Tensor, wire: WireFormat) -> Tensor:
    """The scales of blocks, as in `encode`: fp32 numbers that are exact in bf16, [n, 1]; NaN for non-finite blocks."""
    if wire.bits == 1:
        block_size = blocks.shape[1]
        mean = blocks.abs() * (1 / block_size)
        while mean.shape[1] > 1:
            half = mean.shape[1] // 2
            mean = mean[:, :half] + mean[:, half:]
        share = torch.full_like(mean, block_size) / counts.unsqueeze(1).to(torch.float32)
        largest, quotient = mean, mean * share
    else:
        largest = blocks.abs().amax(1, keepdim=True)
        quotient = largest / torch.full_like(largest, wire.levels)  # a tensor: CUDA would multiply by 1 / number
    return torch.where(largest.isfinite(), round_scale(largest, quotient, wire), torch.nan)


def encode(blocks: Tensor, counts: Tensor, wire: WireFormat) -> tuple[Tensor | None, Tensor]:
    """Encode blocks in plain PyTorch.

    Args:
        blocks: [n, block_size], fp32. Missing elements are 0.
        counts: [n], int64: the number of elements of each block that are not missing.
        wire: the format.

    Returns:
        The scales, [n, 1] in bf16 (None if the format has none), and the payload, [n, payload bytes] in uint8.
    """
    if not wire.is_scaled:
        assert wire.dtype is not None
        return None, _encode_float(blocks, wire.dtype).view(torch.uint8)
    scales = block_scales(blocks, counts, wire)
    valid = torch.where(scales.isnan(), 0.0, blocks)  # the scale alone carries the NaN: codes have none
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    scaled = (valid * inverse).clamp(-wire.levels, wire.levels)
    if wire.bits == 1:
        payload = pack((valid >= 0).to(torch.uint8), 1)
    elif wire.dtype is not None:
        payload = _encode_float(scaled, wire.dtype).view(torch.uint8)
    elif wire.is_odd:
        codes = (scaled * 0.5).floor() + wire.offset  # 2 floor(y / 2) + 1 is the odd number nearest to y
        payload = pack(codes.to(torch.uint8), wire.bits)
    else:
        payload = pack(scaled.round().to(torch.int32) + wire.offset, wire.bits)
    # By their bits: the conversion of NaN to bf16 differs between devices.
    return (scales.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16), payload


def decode(scales: Tensor | None, payload: Tensor, wire: WireFormat) -> Tensor:
    """Decode what `encode` returned: [n, block_size], fp32."""
    if wire.dtype is not None:
        values = payload.view(wire.dtype).to(torch.float32)
    else:
        codes = (payload.view(torch.int8) if wire.bits == 8 else unpack(payload, wire.bits)).to(torch.float32)
        values = 2 * codes - wire.levels if wire.is_odd else codes - wire.offset
    return values if scales is None else values * scales.to(torch.float32)


def encode_with_errors(
    values: Tensor, blocks: Blocks, wire: WireFormat, pending: Tensor | None, rounding: Rounding | None
) -> tuple[Tensor | None, Tensor]:
    """`encode` blocks, [n, block_size], and write their errors to ``pending``."""
    scales, payload = encode(values, blocks.counts, wire)
    if pending is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        error = values - decode(scales, payload, wire)
        error = torch.where(columns < blocks.counts.unsqueeze(1), error, 0.0) + 0.0  # -0 becomes 0: codes have no -0
        if pending.dtype == torch.bfloat16:
            assert rounding is not None
            keys = blocks.keys.unsqueeze(1) + rounding.error_salt
            error = round_to_bf16(error, random_bits(keys, rounding.step, blocks.starts.unsqueeze(1) + columns))
        pending.copy_(error.view_as(pending))
    return scales, payload


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the codes of blocks, [n, block_size], in planes: [n, block_size * bits / 8] in uint8."""
    planes = 8 // bits
    # Plane t is shifted by t * bits; planes share no bits, so their sum is their union.
    parts = codes.to(torch.int32).view(codes.shape[0], planes, codes.shape[1] // planes)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device).view(1, planes, 1)
    return (parts << shifts).sum(1).to(torch.uint8)


def unpack(payload: Tensor, bits: int) -> Tensor:
    """The codes that `pack` packed, in int32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=payload.device).view(1, -1, 1)
    return ((payload.to(torch.int32).unsqueeze(1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def round_to_bf16(x: Tensor, draws: Tensor) -> Tensor:
    """Round fp32 numbers stochastically to bf16, by 24 random bits for each. Finite numbers stay finite."""
    bits = (x.view(torch.int32) + (draws >> 8).to(torch.int32)) & -0x10000
    rounded = bits.view(torch.float32).clamp(-BF16_MAX, BF16_MAX)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _encode_float(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 numbers to another floating-point dtype, to nearest even. Finite numbers stay finite."""
    if dtype == torch.float32:
        return x.contiguous()
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)
