"""Formats as functions that round tensors: gradwire's, and published ones, written here after their specifications.

MXFP8, MXFP6 and MXFP4: OCP Microscaling Formats (MX) Specification 1.0, section 5 and 6: 32 elements share a power of
two. NVFP4: blocks of 16 elements with a scale in e4m3, and one fp32 scale per tensor (NVIDIA, "Pretraining Large
Language Models with NVFP4", arXiv:2509.25149, section 2). ``int4-128``: symmetric integers in groups of 128, as SDP4Bit
quantizes gradients between nodes (Jia et al., NeurIPS 2024), without its Hadamard rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradwire import kernels
from gradwire.bench.kernel_bytes import BLOCK_SIZE, element_bytes

Rounding = Callable[[Tensor], Tensor]  # of fp32 numbers, to those that arrive


class Format(NamedTuple):
    """A format that rounds a tensor in blocks. Missing elements of the last block are 0."""

    name: str
    bits: float  # per element, with scales
    block_size: int
    round_blocks: Rounding  # of [blocks, block_size], all blocks of one tensor

    def rounded(self, x: Tensor) -> Tensor:
        """The numbers that arrive if ``x``, fp32, is sent."""
        flat = x.flatten()
        blocks = functional.pad(flat, (0, -flat.numel() % self.block_size)).view(-1, self.block_size)
        return self.round_blocks(blocks).flatten()[: flat.numel()].view_as(x)


class Minifloat(NamedTuple):
    """Floating-point numbers without infinities: the exponents of its normal numbers, and the largest number."""

    mantissa_bits: int
    least_exponent: int
    largest_exponent: int
    largest: float

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest numbers, of two the even one; beyond the largest number, that one."""
        exponents = torch.frexp(x).exponent - 1
        spacing = torch.exp2(exponents.clamp(min=self.least_exponent) - self.mantissa_bits)
        return ((x / spacing).round() * spacing).clamp(-self.largest, self.largest)


E4M3 = Minifloat(3, -6, 8, 448.0)
E2M3 = Minifloat(3, 0, 2, 7.5)
E2M1 = Minifloat(1, 0, 2, 6.0)


def of_wire(wire: kernels.WireFormat) -> Format:
    """A format of gradwire, by its reference."""

    def round_blocks(blocks: Tensor) -> Tensor:
        return wire.decode(*wire.encode(blocks, torch.full((len(blocks),), BLOCK_SIZE)))

    return Format(wire.name, 8 * element_bytes(wire), BLOCK_SIZE, round_blocks)


def microscaling(name: str, bits: int, elements: Minifloat) -> Format:
    """Elements times a power of two: that of the block's largest element, divided by the largest power of two."""

    def round_blocks(blocks: Tensor) -> Tensor:
        exponents = torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent - 1 - elements.largest_exponent
        scales = torch.exp2(exponents.clamp(-126, 127).float())
        return elements.rounded(blocks / scales) * scales

    return Format(name, bits + 8 / 32, 32, round_blocks)


def _nvfp4(blocks: Tensor) -> Tensor:
    largest = blocks.abs().amax(1, keepdim=True)
    of_tensor = (largest.amax() / (E2M1.largest * E4M3.largest)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = E4M3.rounded(largest / E2M1.largest / of_tensor) * of_tensor
    return torch.where(scales > 0, E2M1.rounded(blocks / scales) * scales, 0.0)


def _symmetric(blocks: Tensor) -> Tensor:
    scales = blocks.abs().amax(1, keepdim=True) / 7
    return torch.where(scales > 0, (blocks / scales).round() * scales, 0.0)


GRADWIRE = {name: of_wire(wire) for name, wire in kernels.WIRE_FORMATS.items()}
PUBLISHED = {
    each.name: each
    for each in (
        microscaling("MXFP8 (e4m3)", 8, E4M3),
        microscaling("MXFP6 (e2m3)", 6, E2M3),
        microscaling("MXFP4 (e2m1)", 4, E2M1),
        Format("NVFP4", 4 + 8 / 16, 16, _nvfp4),
        Format("int4-128", 4 + 16 / 128, 128, _symmetric),
    )
}
