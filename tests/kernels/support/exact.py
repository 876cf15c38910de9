"""Comparison to the bit, guarded memory, and an oracle that shares no code with the kernels and their references."""

import numpy as np
import torch

GUARD = 16
SENTINEL = 776.0  # exact in every dtype
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The elements as integers, every NaN as the same one."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if not real.is_floating_point():
        return real
    real = real.cpu().contiguous()
    return torch.where(real.isnan(), torch.full_like(real, torch.nan), real).view(INTEGERS[real.itemsize])


def assert_same_bits(actual, expected, what):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    wrong = (bits(actual) != bits(expected)).nonzero()
    if len(wrong) > 0:
        at = tuple(wrong[0].tolist())
        got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (actual, expected))
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} elements differ; the first, at {at}, is {got[at].item()!r}, "
            f"expected {want[at].item()!r}"
        )


class Guarded:
    """A 1-D window of elements between guards that must stay unchanged.

    Attributes:
        window: the elements, ``offset`` elements off the alignment of a fresh allocation.
    """

    def __init__(self, values, *, offset=0, device="cpu"):
        self.start = GUARD + offset
        self.stop = self.start + values.numel()
        self.buffer = torch.full((self.stop + GUARD,), SENTINEL, dtype=values.dtype, device=device)
        self.window = self.buffer[self.start : self.stop]
        self.window.copy_(values)
        self._before = self.buffer.clone()

    @classmethod
    def poisoned(cls, numel, dtype, *, offset=0, device="cpu"):
        """Elements that are NaN until they are written."""
        return cls(torch.full((numel,), torch.nan, dtype=dtype), offset=offset, device=device)

    def view(self, shape, strides):
        return self.buffer.as_strided(shape, strides, self.start)

    def assert_guards_untouched(self, what):
        assert_same_bits(self.buffer[: self.start], self._before[: self.start], f"guard before {what}")
        assert_same_bits(self.buffer[self.stop :], self._before[self.stop :], f"guard after {what}")

    def assert_untouched(self, what):
        assert_same_bits(self.buffer, self._before, what)


def as_float64(tensor):
    """The elements of a 1-D tensor in numpy, complex numbers as pairs; exact from every dtype."""
    real = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    return real.cpu().double().numpy()


def round_to(values, dtype):
    """Float64 values in another dtype, as a tensor: rounded to nearest even, to 16 bits by way of fp32."""
    if dtype == torch.float64:
        return torch.from_numpy(values.copy())
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if dtype == torch.float16:
            return torch.from_numpy(single.astype(np.float16))
    if dtype == torch.float32:
        return torch.from_numpy(single)
    pattern = single.view(np.uint32)
    rounded = (pattern + np.uint32(0x7FFF) + ((pattern >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)
    return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)


def _scaled(values, scale, compute):
    """Float64 values, each exact in the dtype ``compute``, times a scale; rounded once, to ``compute``."""
    with np.errstate(all="ignore"):
        if compute == torch.float64:
            return values * np.float64(scale)
        # A product of two fp32 numbers is exact in fp64, so this rounds once.
        return (values * np.float64(np.float32(scale))).astype(np.float32).astype(np.float64)


def flatten_oracle(values, source, wire, scale, limit):
    """Wire elements and the numbers of non-finite and saturated ones, from float64 values exact in ``source``."""
    compute = torch.float64 if source == torch.float64 else torch.float32
    largest = min(limit, torch.finfo(wire).max)
    with np.errstate(over="ignore"):
        largest = largest if compute == torch.float64 else float(np.float32(largest))
    # Where the wire is wider than the arithmetic, a finite element saturates at the arithmetic's largest number.
    largest = min(largest, torch.finfo(compute).max)
    scaled = _scaled(values, scale, compute)
    finite = np.isfinite(values)
    saturated = finite & (np.abs(scaled) > largest)
    clamped = np.where(saturated, np.copysign(largest, scaled), scaled)
    return round_to(clamped, wire), int((~finite).sum()), int(saturated.sum())


def unflatten_oracle(values, wire, target, scale):
    """Elements of the gradients from float64 values exact in ``wire``, and the largest magnitude in fp32."""
    compute = torch.float64 if torch.float64 in (wire, target) else torch.float32
    result = round_to(_scaled(values, scale, compute), target)
    magnitudes = np.abs(result.double().numpy())
    largest = np.max(magnitudes, initial=0.0)  # NaN if one element is
    return result, round_to(np.array([largest]), torch.float32)
