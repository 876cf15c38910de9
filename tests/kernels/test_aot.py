"""Every kernel, compiled ahead of time for the GPUs it is meant for, must be vectorized and must not spill.

What is compiled is what the operations launch: their arguments are recorded, not written down again here.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from gradwire.kernels import bound_update_scale
from tests.kernels.support.ahead_of_time import (
    BF16,
    FP16,
    FP32,
    FP64,
    check_program_number,
    compiled,
    launches_and_targets,
    recorded,
)
from tests.kernels.support.calls import flatten, unflatten
from tests.kernels.support.cases import REALS, name

# The largest number of registers that a thread may take (on gfx942: of vector registers). 64 lets four programs of
# 8 warps share a multiprocessor, 80 three, 128 two. No kernel may spill, and full aligned chunks must move through
# 128-bit accesses alone. The comments are the largest numbers measured, over all dtypes, with Triton 3.7.1 / 3.6.0.
LIMITS = {
    # (kernel, arithmetic, whether it counts or looks for the maximum): limit of each target
    ("flatten", FP32, False): {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 40},  # 64/48  64/48  64/54  37/38
    ("flatten", FP32, True): {"sm_80": 80, "sm_90": 80, "sm_100": 80, "gfx942": 64},  # 79/64  76/64  70/48  53/57
    ("flatten", FP64, False): {"sm_80": 104, "sm_90": 96, "sm_100": 96, "gfx942": 64},  # 100/100  94/94  88/94  56/56
    ("flatten", FP64, True): {"sm_80": 80, "sm_90": 80, "sm_100": 80, "gfx942": 64},  # 80/80  80/80  72/76  59/58
    ("unflatten", FP32, False): {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 40},  # 59/40  63/40  63/40  35/36
    ("unflatten", FP32, True): {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 48},  # 64/64  64/64  62/59  46/44
    ("unflatten", FP64, False): {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 48},  # 64/60  64/57  64/57  48/47
    ("unflatten", FP64, True): {"sm_80": 72, "sm_90": 72, "sm_100": 72, "gfx942": 64},  # 69/69  69/69  69/69  55/58
    ("update_scale", FP32, True): {"sm_80": 32, "sm_90": 32, "sm_100": 32, "gfx942": 16},  # 26/26  30/30  30/30  8/8
}
FUNCTIONS = {
    "flatten": flatten,
    "unflatten": unflatten,
    "update_scale": lambda *tensors, **options: bound_update_scale(tensors[0].device)(*tensors, **options),
}

# Gradient dtype and wire dtype.
PAIRS = [(gradient, wire) for gradient in REALS for wire in (FP32, FP16, BF16)] + [(FP64, FP64)]
# For the targets other than sm_90.
REPRESENTATIVE = [(FP32, FP16)]


@dataclass(frozen=True)
class Launch:
    """A call of an operation on a bucket that is aligned and has full chunks."""

    function: str
    gradient: torch.dtype = FP32
    wire: torch.dtype = FP32
    tensor_scale: bool = False
    observed: bool = False  # counted, or looked at for its maximum
    n_tensors: int = 2  # one is special: Triton makes an argument of value 1 a constant
    is_last: bool = True

    def __str__(self):
        if self.function == "update_scale":
            return f"update_scale-{'last' if self.is_last else 'earlier'}"
        options = {"scale": self.tensor_scale, "observed": self.observed, "single": self.n_tensors == 1}
        return "-".join([self.function, name(self.gradient), name(self.wire), *(o for o, on in options.items() if on)])


@cache
def launched(launch):
    """The launch that a call makes."""
    return recorded(lambda: _call(FUNCTIONS[launch.function], launch))[launch.function]


def _call(function, launch):
    if launch.function == "update_scale":
        tensors = (torch.zeros(2, dtype=torch.int32), torch.zeros(2), torch.zeros(1), torch.zeros(4, dtype=torch.int64))
        options = {"top": 13, "margin": 4, "growth": 1, "backoff": 4, "inverse_world": 0.5, "is_last": launch.is_last}
        function(*tensors, **options)
        return
    gradients = [torch.zeros(8192, dtype=launch.gradient) for _ in range(launch.n_tensors)]
    wire = torch.zeros(8192 * launch.n_tensors, dtype=launch.wire)
    scales = torch.ones(2)
    if launch.function == "flatten":
        counters = torch.zeros(4, dtype=torch.int64) if launch.observed else None
        function(gradients, wire, scale=scales[0] if launch.tensor_scale else 0.5, counters=counters)
    else:
        absmax = torch.zeros(1) if launch.observed else None
        function(wire, gradients, scale=scales[1] if launch.tensor_scale else 0.5, absmax=absmax)


def check(launch, target):
    arithmetic = FP64 if launch.gradient == FP64 else FP32
    binary = compiled(launched(launch), target, LIMITS[launch.function, arithmetic, launch.observed][target])
    if launch.function != "update_scale":
        chunk = launched(launch).arguments["CHUNK"]
        read, written = launch.gradient, launch.wire
        if launch.function == "unflatten":
            read, written = written, read
        # Each element of a full chunk passes through wide accesses once; the tail's accesses are narrow.
        assert (binary.loaded, binary.stored) == (chunk * read.itemsize, chunk * written.itemsize), binary


def launches(pairs, variants):
    return [
        Launch(function, gradient, wire, tensor_scale, observed)
        for function in ("flatten", "unflatten")
        for gradient, wire in pairs
        for tensor_scale, observed in variants
    ]


ENDS = [(False, False), (True, True)]
EVERY = [(tensor_scale, observed) for tensor_scale in (False, True) for observed in (False, True)]
UPDATES = [Launch("update_scale", observed=True, is_last=is_last) for is_last in (False, True)]
SINGLES = [Launch(f, FP32, BF16, True, True, n_tensors=1) for f in ("flatten", "unflatten")]


USUAL = {"sm_90": launches(PAIRS, ENDS[1:]) + launches(REPRESENTATIVE, ENDS[:1]) + UPDATES + SINGLES}
USUAL |= dict.fromkeys(("sm_80", "sm_100", "gfx942"), launches(REPRESENTATIVE, ENDS) + UPDATES[:1])


@launches_and_targets(USUAL, launches(PAIRS, EVERY) + UPDATES + SINGLES)
def test_cast_kernel_does_not_spill_and_is_vectorized(launch, target):
    check(launch, target)


@pytest.mark.parametrize("launch", SINGLES, ids=str)
def test_program_id_is_widened_to_64_bits_before_arithmetic(launch):
    check_program_number(launched(launch))
