"""The quantization kernels, compiled ahead of time: no spills, few registers, wide accesses, few variants."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from gradwire.kernels import WIRE_FORMATS, BlockTable, MessageLayout, Rounding
from tests.kernels.support.ahead_of_time import (
    BF16,
    FP16,
    FP32,
    FP64,
    TARGETS,
    check_program_number,
    compiled,
    launches_and_targets,
    recorded,
    recorded_launches,
    variant,
)
from tests.kernels.support.calls import commit_errors, dequantize, quantize, reduce_quantized, sum_quantized
from tests.kernels.support.cases import name

# The largest number of registers that a thread may take (on gfx942: of vector registers): 64 lets four programs of 8
# warps share a multiprocessor, 80 three, 128 two. Stochastic fp8 takes the most. The comments are the largest numbers
# measured with Triton 3.7.1, on a sample of formats and dtypes.
LIMITS = {
    "quantize": {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 96},  # 116  120  114  61
    "reduce": {"sm_80": 80, "sm_90": 80, "sm_100": 80, "gfx942": 80},  # 64  64  64  74
    "sum": {"sm_80": 80, "sm_90": 80, "sm_100": 80, "gfx942": 64},
    "dequantize": {"sm_80": 96, "sm_90": 96, "sm_100": 96, "gfx942": 64},  # 66  79  64  46
    "commit_errors": {"sm_80": 64, "sm_90": 64, "sm_100": 64, "gfx942": 32},  # 56  56  56  18
}
FORMATS = tuple(WIRE_FORMATS)


@dataclass(frozen=True)
class Launch:
    """One exchange on a bucket that is aligned and has full chunks."""

    wire: str
    gradient: torch.dtype = FP32
    errors: torch.dtype | None = FP32
    block_size: int = 64
    n_tensors: int = 2

    def __str__(self):
        return f"{self.wire}-{self.block_size}-{name(self.gradient)}-{name(self.errors)}"


def memory(numel, dtype):
    return None if dtype is None else torch.zeros(numel, dtype=dtype)


def launch_all(launch, length=8192, world_size=2, pieces=1):
    """Call all five functions."""
    tensors = [torch.zeros(length, dtype=launch.gradient) for _ in range(launch.n_tensors)]
    table = BlockTable(tensors, launch.block_size, list(range(launch.n_tensors)))
    layout = MessageLayout([(WIRE_FORMATS[launch.wire], table)], world_size, pieces)
    (section,) = layout.sections
    message = torch.zeros(layout.message_shape, dtype=torch.uint8)
    result = torch.zeros(layout.result_shape, dtype=torch.uint8)
    rounding = Rounding(torch.zeros(1, dtype=torch.int64), world_size) if launch.errors == BF16 else None

    def memories(numel):
        return {"errors": memory(numel, launch.errors), "pending": memory(numel, launch.errors), "rounding": rounding}

    quantize(tensors, section, message, scale=1 / world_size, **memories(table.numel))
    shard = memories(layout.shard_numel(section))
    reduce_quantized(message, section, result, rank=world_size - 1, **shard)
    sum_quantized(message, section, torch.zeros(layout.shard_numel(section)), rank=0)
    dequantize(message, section, tensors)
    if launch.errors is not None:
        commit_errors(message, memory(table.numel, launch.errors), memory(table.numel, launch.errors))


@cache
def launched(launch):
    return recorded(lambda: launch_all(launch))


def check(launch, target):
    for kernel, found in launched(launch).items():
        arguments, binary = found.arguments, compiled(found, target, LIMITS[kernel][target])
        assert not binary.flushes, kernel  # CPUs keep subnormal numbers
        numel = arguments.get("TILE", arguments["CHUNK"])
        threads = arguments["num_warps"] * TARGETS[target].warp_size

        least = 16 * threads * WIRE_FORMATS[launch.wire].planes if kernel != "commit_errors" else 16 * threads

        def wide(*dtypes, numel=numel, least=least):
            """Bytes of those dtypes, unless a thread has less than 16 of each plane, as it may have on gfx942."""
            return sum(numel * d.itemsize for d in dtypes if d is not None and numel * d.itemsize >= least)

        if kernel == "quantize":
            # At least: the errors are wide in the branch for tails, too, and so are payloads of 16 bits or more.
            assert binary.loaded >= wide(launch.gradient, launch.errors), (kernel, binary)
            assert binary.stored >= wide(launch.errors), (kernel, binary)
        elif kernel == "reduce":
            assert binary.loaded >= wide(launch.errors), (kernel, binary)
            assert binary.stored >= wide(launch.errors), (kernel, binary)
        elif kernel == "sum":
            assert binary.stored >= wide(FP32), (kernel, binary)
        elif kernel == "dequantize":
            assert binary.stored >= wide(launch.gradient), (kernel, binary)
        else:
            assert (binary.loaded, binary.stored) == (wide(launch.errors),) * 2, (kernel, binary)


USUAL = [Launch("int4"), Launch("int8", BF16, BF16), Launch("int2", errors=None)]


EVERY = [
    Launch(wire, gradient, errors, block_size)
    for wire in FORMATS
    for gradient, errors, block_size in (
        (FP32, FP32, 64),
        (FP32, FP32, 32),
        (FP32, BF16, 128),
        (BF16, BF16, 64),
        (BF16, None, 64),
        (FP16, FP32, 1024),
        (FP64, FP32, 64),
    )
]


@launches_and_targets({"sm_90": USUAL, "gfx942": USUAL[:1]}, EVERY)
def test_quantization_kernel_does_not_spill_and_is_vectorized(launch, target):
    check(launch, target)


def test_program_id_is_widened_to_64_bits_before_arithmetic():
    for launch in launched(Launch("int4")).values():
        check_program_number(launch)


@pytest.mark.parametrize("errors", [None, FP32, BF16], ids=name)
@pytest.mark.parametrize("wire", ["int4", "bf16"])
def test_buckets_worlds_and_steps_share_one_variant_of_each_kernel(wire, errors):
    """Worlds of 8 to 63 ranks: others have variants of their own of the kernels that sum."""
    launch = Launch(wire, errors=errors)
    variants = {}
    for length, world_size, pieces in ((8192, 8, 1), (4100, 9, 2), (64, 63, 1), (100_000, 16, 1)):
        for n_tensors in (1, 2, 16):
            each = Launch(wire, errors=errors, n_tensors=n_tensors)
            call = lambda: launch_all(each, length, world_size, pieces)  # noqa: B023, E731
            for made in recorded_launches(call):
                variants.setdefault(made.name, set()).add(variant(made, "sm_90"))
    assert {kernel: len(keys) for kernel, keys in variants.items()} == dict.fromkeys(launched(launch), 1)
