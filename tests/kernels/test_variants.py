"""How often Triton compiles for a model: once for each kernel, dtype and rank, all in the first step.

Triton's launcher looks a compiled kernel up by the types, constants, alignments and options of a launch. Its own code
computes that key here for every launch that the hooks' algorithms make on the buckets of GPT-2, which needs no GPU.
"""

import asyncio
from collections import Counter
from functools import partial

import pytest
import torch

from gradwire.bench.shapes import buckets, gpt2
from gradwire.compress import Quantization
from tests.kernels.support.ahead_of_time import recorded_launches, variant
from tests.kernels.support.algorithm_steps import STEPS, cast, powersgd, quantized, scaled_cast


@pytest.fixture(scope="module")
def model():
    """The gradients of each bucket at 25 MiB, which no kernel reads."""
    return [[torch.empty(shape) for shape in shapes] for shapes in buckets(gpt2, 25 << 20)]


def compiled_in(step):
    """How often each kernel is compiled in each of `STEPS`."""
    known, counts = set(), []

    def run(iteration):
        for algorithm in step(iteration):
            asyncio.run(algorithm)

    for iteration in STEPS:
        launches = recorded_launches(lambda i=iteration: run(i))
        new = {(launch.name, variant(launch, "sm_90")) for launch in launches} - known
        known |= new
        counts.append(Counter(name for name, _ in new))
    return counts


# One variant of each kernel. Two of `multiply`, for P and for Q; of `sum_partials`, which packs gradients on the way to
# P; of `apply`, whose first round prepares the second; and of `norms`, which unpacks gradients in steps, not in `draw`.
ONCE = {
    "multiply": 2,
    "sum_partials": 2,
    "gram_schmidt": 1,
    "gram": 1,
    "factorize": 1,
    "apply": 2,
    "norms": 2,
    "renew": 1,
    "reconstruct": 1,
}


@pytest.mark.parametrize("factor_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_gpt2_compiles_each_powersgd_kernel_once_and_in_the_first_step(model, rank, factor_dtype):
    first, *later = compiled_in(powersgd(model, rank, factor_dtype))
    assert not any(later), f"compiled in mid-training: {later}"
    allowed = Counter(ONCE)
    if rank < 32:  # else every P of this model is large
        allowed["gram_schmidt"] += 1  # for buckets without a long P
    else:
        del allowed["gram_schmidt"]
    assert first.keys() == allowed.keys()
    assert first <= allowed


CAST = ["flatten", "unflatten"]
QUANTIZED = 2 * ["quantize", "reduce", "dequantize"]  # vectors are sent in bf16, a format of their own
COMPILED = {
    "fp32": (partial(cast, dtype=torch.float32), CAST),
    "fp16": (partial(cast, dtype=torch.float16), CAST),
    "bf16": (partial(cast, dtype=torch.bfloat16), CAST),
    # Two of `update_scale`: for the last bucket, and for others.
    "scaled fp16": (partial(scaled_cast, dtype=torch.float16), [*CAST, "update_scale", "update_scale"]),
    "int4": (partial(quantized, wire="int4", options=Quantization()), [*QUANTIZED, "commit_errors"]),
    "int8, bf16 errors": (
        partial(quantized, wire="int8", options=Quantization(error_dtype=torch.bfloat16)),
        [*QUANTIZED, "commit_errors"],
    ),
    "sign, no error feedback": (
        partial(quantized, wire="sign", options=Quantization(error_dtype=None, block_size=128)),
        QUANTIZED,
    ),
}


@pytest.mark.parametrize("make, expected", COMPILED.values(), ids=COMPILED)
def test_gpt2_compiles_each_kernel_once_and_in_the_first_step(model, make, expected):
    first, *later = compiled_in(make(model))
    assert first == Counter(expected)
    assert not any(later), f"compiled in mid-training: {later}"
