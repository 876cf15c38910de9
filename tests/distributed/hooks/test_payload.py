"""`payload_bytes` of each algorithm, hook and collective, to the byte."""

import pytest
import torch
from torch import nn

from gradwire.hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.training import WRAPPERS, register, sent_bytes

# Rank 2: 2 x 24 and 2 x 16 elements of factors, both multiples of 16, to which factors are padded.
ROWS, COLUMNS, RANK, BIAS = 24, 16, 2, 7


def low_rank(**options):
    return PowerSGDState(None, RANK, 2, **options), powerSGD_hook


HOOKS = {
    "none": (lambda: (None, allreduce_hook), [1564] * 5),
    "fp16": (lambda: (None, fp16_compress_hook), [782] * 5),
    "bf16": (lambda: (None, bf16_compress_hook), [782] * 5),
    "scaled": (lambda: (ScaledCastState(), scaled_cast_hook), [794] * 2 + [782] * 3),  # buckets change once
    "scaled in bf16": (lambda: (ScaledCastState(dtype=torch.bfloat16), scaled_cast_hook), [794] * 2 + [782] * 3),
    "powersgd": (low_rank, [1564] * 2 + [348] * 3),
    # (48 + 7) + 32 elements of 4 bytes, or factors of 2 bytes and 7 elements of 4; alternating, 48 + 7 and then 32 + 7.
    "powersgd, bf16 factors": (lambda: low_rank(factor_dtype=torch.bfloat16), [1564] * 2 + [188] * 3),
    # A header of 16 bytes, scales padded to 16, and a block of 64 codes; next to P also 7 elements in a block of fp32.
    "powersgd, int8 factors": (lambda: low_rank(factor_wire="int8"), [1564] * 2 + [352 + 96] * 3),
    "alternating": (lambda: low_rank(alternating=True), [1564] * 2 + [220, 156, 220]),
    "alternating, bf16 factors": (
        lambda: low_rank(alternating=True, factor_dtype=torch.bfloat16),
        [1564] * 2 + [124, 92, 124],
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_payload_of_each_hook_step_is_exact(world_of_one, hook, wrapper):
    make, expected = HOOKS[hook]
    model = nn.Linear(COLUMNS, ROWS)
    model.bias = nn.Parameter(torch.zeros(BIAS))
    model.forward = lambda x: (x @ model.weight.t()).sum() + model.bias.sum()
    ddp = WRAPPERS[wrapper](model)
    register(ddp, make())
    sent = []
    for _ in expected:
        before = sent_bytes()
        ddp(torch.ones(2, COLUMNS)).backward()
        sent.append(sent_bytes() - before)
    assert sent == expected
