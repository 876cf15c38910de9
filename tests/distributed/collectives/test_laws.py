"""The laws of docs/guarantees.md for the functions of `gradwire.collectives`, called by a hook."""

from types import NoneType

import pytest
from torch.futures import Future

from gradwire.collectives import all_reduce_coalesced
from gradwire.testing import check_laws


def averaged(bucket, wire):
    gradients = [gradient for gradient in bucket.gradients() if gradient.numel() > 0]
    if gradients:
        all_reduce_coalesced(gradients, wire=wire)
    future = Future()
    future.set_result(bucket.buffer())
    return future


def fp32_hook(state, bucket):
    return averaged(bucket, "fp32")


def bf16_hook(state, bucket):
    return averaged(bucket, "bf16")


def int8_hook(state, bucket):
    return averaged(bucket, "int8")


@pytest.mark.parametrize("hook", [fp32_hook, bf16_hook, int8_hook])
@pytest.mark.parametrize("examples", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_laws_hold_for_compressed_all_reduces(hook, examples):
    # "sums fit" simulates many ranks for hooks that pass an algorithm to `HookState.run`.
    check_laws(NoneType, hook, skip=["sums fit"], max_examples=examples)
