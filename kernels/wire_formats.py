"""Wire formats: how a block of fp32 numbers becomes bytes.

    kind                scale s            code of an element x                                      decoded
    integers            -top / levels      q + levels, q = rint(x * (1 / s)), -levels <= q < levels  s * q
    integers of 8 bits  -top / levels      q, in two's complement                                    s * q
    odd integers        absmax / levels    (q + levels) / 2, q the nearest odd number to x * (1 / s) s * q
    signs               see below          x >= 0                                                    +-s
    e4m3fn              absmax / 448       x * (1 / s) in e4m3fn, rounded to nearest even            s * q
    floats              none               x, saturated at the format's largest number               x

Scales travel in bf16, which has the range of fp32. A scale is rounded away from 0, so no element exceeds the levels by
more than rounding. Its magnitude is raised to 2^-126, so that 1 / s is finite, and lowered to a number whose product
with the levels is finite; an element beyond the levels then saturates. A block of zeros has the scale 0. A block with
an inf or a NaN has the scale NaN and decodes to NaN. Formats without scales pass inf and NaN through.

`top` is the element of the largest magnitude, the negative one of two, so that it becomes -levels: all codes of two's
complement are in use, and the scale's sign is where the block needs more room. An element of the other sign that rounds
to +levels becomes levels - 1. int4 has a quarter less squared error than with -7 .. 7 (docs/log/quantization.md).

In integers, s * q has 8 + 8 significant bits at most and is therefore exact in fp32, and so is x - s * q,
because s * q is 0 or within a factor of two of x. What was sent plus the error is x to the bit.

int2 and sign have no zero, and sign saturates. Its scale is sum(x^2) / sum(|x|), at most 2 mean(|x|). Without the
bound, the *gain* <Q(x), x> / <x, x> of every block is 1: on average, error feedback sends nothing late. The bound keeps
the error no larger than the block, |x - Q(x)|^2 = |x|^2 + n s (s - 2 mean(|x|)), which error feedback needs. A scale of
mean(|x|) has the smallest error, but a gain of 0.64 on normal numbers, and trainings take more than twice the steps.
For the same reason, int2 does not saturate: with a scale of 2/3 mean(|x|), its error would be 0.35 instead of 0.51, but
its gain 0.88 (docs/log/quantization.md).

For the scale of signs, |x| is rounded to a multiple of absmax / 2^14, and each x^2 is the square of a multiple of
absmax / 2^7. Sums of these integers are exact in fp32, so they do not depend on the order of the additions.

The codes of a block are packed in words of k codes, which fill whole bytes: 4 codes of int6 in 3 bytes, else 8 / bits
codes in a byte. Word i holds the elements i + t * block_size / k at the bits t * bits, for t = 0 .. k - 1. The elements
of one t are a plane. The payload has the lowest bytes of all words, then the next bytes, and so on. So both ends of the
exchange work on contiguous elements and bytes.

Stochastic rounding of y to an integer is floor(y) + (u < y - floor(y)), where u is uniform in [0, 1). Numbers on the
grid stay as they are; the expectation is y plus at most 2^-24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, frexp, gcd, ldexp
from typing import ClassVar, NamedTuple

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


@dataclass(frozen=True)
class WireFormat:
    """One encoding of blocks. Each kind of codes is a subclass.

    Attributes:
        name: the name that users write.
        bits: payload bits per element.
        dtype: dtype of the payload's elements.
        kind: kind of codes. The CPU path and Triton's kernels have code for each kind.
        spacing: distance of neighbors on a grid of integers, in units of the scale.
        dtypes: the dtypes that the payload's elements may have.
        levels_of: the largest magnitude on the grid, in units of the scale, by the bits per element that all
            implementations can pack; 0: there are no scales.

    Raises:
        ValueError: the implementations cannot encode and decode such a format.
    """

    name: str
    bits: int
    dtype: torch.dtype = torch.uint8
    kind: ClassVar[str]
    spacing: ClassVar[int] = 1
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)
    levels_of: ClassVar[Mapping[int, int]]

    def __post_init__(self) -> None:
        self._expect("dtype", self.dtypes)
        in_dtype = [8 * self.dtype.itemsize] if self.dtype.is_floating_point else [*self.levels_of]
        self._expect("bits", in_dtype)

    def _expect(self, attribute: str, choices: Sequence[object]) -> None:
        if (value := getattr(self, attribute)) not in choices:
            expected = f"one of {', '.join(map(str, choices))}"
            raise ValueError(f"{attribute} of the wire format {self.name!r} is {value!r}; expected {expected}.")

    @cached_property
    def levels(self) -> int:
        """The largest magnitude on the grid, in units of the scale; 0: there are no scales."""
        return self.levels_of[self.bits]

    @cached_property
    def element(self) -> str:
        """The name of ``dtype``: Triton's kernels cannot compare dtypes of PyTorch."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def offset(self) -> int:
        """The number added to an integer, or to half of an odd one, rounded down, to make its code."""
        return 1 << self.bits - 1

    @cached_property
    def is_scaled(self) -> bool:
        """Whether each block has a scale."""
        return self.levels > 0

    @cached_property
    def planes(self) -> int:
        """Number of elements in a word, each of another plane; 1 for formats of 8 bits or more."""
        return 8 // gcd(8, self.bits)

    @cached_property
    def word_bytes(self) -> int:
        """Bytes of a word of codes."""
        return self.planes * self.bits // 8

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

    def encode(self, blocks: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor]:
        """Encode blocks in plain PyTorch.

        Args:
            blocks: [n, block_size], fp32. Missing elements are 0.
            counts: [n], int64: the number of elements of each block that are not missing.

        Returns:
            The scales, [n, 1] in bf16 (None if the format has none), and the payload, [n, payload bytes] in uint8.
        """
        scales = self.scales(blocks, counts)
        valid = torch.where(scales.isnan(), 0.0, blocks)  # the scale alone carries the NaN: codes have none
        payload = self.payload(valid, (valid * _inverse(scales)).clamp(-self.levels, self.levels))
        # By their bits: the conversion of NaN to bf16 differs between devices.
        return (scales.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16), payload

    def decode(self, scales: Tensor | None, payload: Tensor) -> Tensor:
        """Decode what `encode` returned: [n, block_size], fp32."""
        assert scales is not None
        return self.numbers(payload) * scales.to(torch.float32)

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """The scales of blocks: fp32 numbers that are exact in bf16, [n, 1]; NaN for non-finite blocks."""
        largest = blocks.abs().amax(1, keepdim=True)
        # Divided by a tensor: CUDA would multiply by 1 / number.
        return self.round_scale(largest, largest / torch.full_like(largest, self.levels))

    def round_scale(self, largest: Tensor, quotient: Tensor) -> Tensor:
        """``quotient`` rounded up to bf16 and into the range of scales.

        Args:
            largest: fp32. Where it is 0, the scale is 0; where it is not finite, NaN.
            quotient: fp32.
        """
        # bf16 is the upper half of fp32: adding 0xFFFF before cutting off the lower half rounds away from zero.
        up = ((quotient.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        scale = torch.where(largest > 0, up.clamp(MIN_SCALE, self.max_scale), 0.0)
        return torch.where(largest.isfinite(), scale, torch.nan)

    def payload(self, valid: Tensor, scaled: Tensor) -> Tensor:
        """The payload of finite blocks, [n, block_size]; ``scaled`` is the same in units of the scale."""
        raise NotImplementedError

    def numbers(self, payload: Tensor) -> Tensor:
        """The numbers of a payload in units of the scale: [n, block_size], fp32."""
        raise NotImplementedError

    def is_finite(self, scales: Tensor | None, payload: Tensor) -> Tensor:
        """Whether all encoded blocks are finite: a bool on the device."""
        assert scales is not None
        return scales.isfinite().all()


class Integers(WireFormat):
    """Integers from -levels to levels - 1."""

    kind = "integers"
    levels_of: ClassVar = {2: 2, 4: 8, 6: 32, 8: 128}

    @cached_property
    def offset(self) -> int:
        """The number added to an integer to make its code: 0 in int8, whose codes are in two's complement."""
        return 0 if self.bits == 8 else self.levels

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:  # noqa: D102
        scales = super().scales(blocks, counts)
        has_no_negative_one = blocks.amax(1, keepdim=True) > -blocks.amin(1, keepdim=True)
        return torch.where(has_no_negative_one & scales.isfinite(), -scales, scales)

    def payload(self, valid: Tensor, scaled: Tensor) -> Tensor:  # noqa: D102
        return pack(scaled.round().clamp(max=self.levels - 1).to(torch.int32) + self.offset, self.bits)

    def numbers(self, payload: Tensor) -> Tensor:  # noqa: D102
        codes = unpack(payload, self.bits) if self.offset > 0 else payload.view(torch.int8)
        return codes.to(torch.float32) - self.offset


class OddIntegers(WireFormat):
    """The odd numbers from -levels to levels, without a zero."""

    kind = "odd integers"
    spacing = 2
    levels_of: ClassVar = {2: 3, 4: 15}

    def payload(self, valid: Tensor, scaled: Tensor) -> Tensor:  # noqa: D102
        codes = (scaled * 0.5).floor() + self.offset  # 2 floor(y / 2) + 1 is the odd number nearest to y
        return pack(codes, self.bits)

    def numbers(self, payload: Tensor) -> Tensor:  # noqa: D102
        return 2 * unpack(payload, self.bits).to(torch.float32) - self.levels


class Signs(WireFormat):
    """-1 or 1, times a scale that keeps the gain of the block near 1."""

    kind = "signs"
    spacing = 2
    levels_of: ClassVar = {1: 1}

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:  # noqa: D102
        magnitudes = blocks.abs()
        largest = magnitudes.amax(1, keepdim=True)
        unit = self.round_scale(largest, largest * 2.0**-14)
        multiples = (magnitudes * _inverse(unit)).round()
        total = multiples.sum(1, keepdim=True)
        squares = (multiples * 2.0**-7).round().square().sum(1, keepdim=True)
        return self.round_scale(largest, unit * self.units(total, squares, counts.unsqueeze(1).to(torch.float32)))

    @staticmethod
    def units(total: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
        """The scales in units of absmax / 2^14: sum(x^2) / sum(|x|), at most 2 mean(|x|), however they are rounded.

        Args:
            total: sums of multiples of the unit.
            squares: sums of squared multiples of 2^7 units.
            counts: number of elements of each block.
        """
        return torch.minimum(squares * 2.0**14 / total.clamp(min=1), (total / counts - 0.5) * (2 - 2.0**-6))

    def payload(self, valid: Tensor, scaled: Tensor) -> Tensor:  # noqa: D102
        return pack(valid >= 0, 1)

    def numbers(self, payload: Tensor) -> Tensor:  # noqa: D102
        return 2 * unpack(payload, 1).to(torch.float32) - 1


class Float8(WireFormat):
    """Numbers in e4m3fn."""

    kind = "e4m3fn"
    levels_of: ClassVar = {8: 448}

    def payload(self, valid: Tensor, scaled: Tensor) -> Tensor:  # noqa: D102
        return _narrow(scaled, torch.float8_e4m3fn).view(torch.uint8)

    def numbers(self, payload: Tensor) -> Tensor:  # noqa: D102
        return payload.view(torch.float8_e4m3fn).to(torch.float32)


class Floats(WireFormat):
    """Floating-point numbers without scales, saturated at the largest number of their dtype."""

    kind = "floats"
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    levels_of: ClassVar = {16: 0, 32: 0}

    def encode(self, blocks: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor]:  # noqa: D102
        return None, _narrow(blocks, self.dtype).view(torch.uint8)

    def decode(self, scales: Tensor | None, payload: Tensor) -> Tensor:  # noqa: D102
        return payload.view(self.dtype).to(torch.float32)

    def is_finite(self, scales: Tensor | None, payload: Tensor) -> Tensor:  # noqa: D102
        return payload.view(self.dtype).isfinite().all()


_FORMATS: tuple[WireFormat, ...] = (
    Integers("int8", 8),
    Float8("fp8", 8),
    Integers("int6", 6),
    Integers("int4", 4),
    OddIntegers("int2", 2),
    Signs("sign", 1),
    Floats("bf16", 16, torch.bfloat16),
    Floats("fp16", 16, torch.float16),
    Floats("fp32", 32, torch.float32),
)
WIRE_FORMATS = {wire.name: wire for wire in _FORMATS}


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


def encode_with_errors(
    values: Tensor, blocks: Blocks, wire: WireFormat, pending: Tensor | None, rounding: Rounding | None
) -> tuple[Tensor | None, Tensor]:
    """`encode` blocks, [n, block_size], and write their errors to ``pending``."""
    scales, payload = wire.encode(values, blocks.counts)
    if pending is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        error = values - wire.decode(scales, payload)
        error = torch.where(columns < blocks.counts.unsqueeze(1), error, 0.0) + 0.0  # -0 becomes 0: codes have no -0
        if pending.dtype == torch.bfloat16:
            assert rounding is not None
            keys = blocks.keys.unsqueeze(1) + rounding.error_salt
            error = round_to_bf16(error, random_bits(keys, rounding.step, blocks.starts.unsqueeze(1) + columns))
        pending.copy_(error.view_as(pending))
    return scales, payload


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the codes of blocks, [n, block_size], in planes: [n, block_size * bits / 8] in uint8."""
    planes = 8 // gcd(8, bits)
    # Plane t is shifted by t * bits; planes share no bits, so their sum is their union.
    parts = codes.to(torch.int32).view(codes.shape[0], planes, codes.shape[1] // planes)
    words = (parts << _shifts(planes, bits, codes.device)).sum(1, keepdim=True)
    return (words >> _shifts(planes * bits // 8, 8, codes.device)).to(torch.uint8).flatten(1)


def unpack(payload: Tensor, bits: int) -> Tensor:
    """The codes that `pack` packed, in int32."""
    planes = 8 // gcd(8, bits)
    n_bytes = planes * bits // 8
    parts = payload.to(torch.int32).view(payload.shape[0], n_bytes, payload.shape[1] // n_bytes)
    words = (parts << _shifts(n_bytes, 8, payload.device)).sum(1, keepdim=True, dtype=torch.int32)
    return ((words >> _shifts(planes, bits, payload.device)) & ((1 << bits) - 1)).flatten(1)


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    """0, bits, 2 bits, ..., for parts of words: [1, count, 1]."""
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=device).view(1, count, 1)


def round_to_bf16(x: Tensor, draws: Tensor) -> Tensor:
    """Round fp32 numbers stochastically to bf16, by 24 random bits for each. Finite numbers stay finite."""
    bits = (x.view(torch.int32) + (draws >> 8).to(torch.int32)) & -0x10000
    rounded = bits.view(torch.float32).clamp(-BF16_MAX, BF16_MAX)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for the scales 0 and NaN."""
    return torch.where(scales.abs() > 0, scales.reciprocal(), 0.0)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 numbers to another floating-point dtype, to nearest even. Finite numbers stay finite."""
    if dtype == torch.float32:
        return x.contiguous()
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)
