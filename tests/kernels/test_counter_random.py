"""The counter-based random numbers, held to SplitMix64."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.kernels import random_key, uniform
from gradwire.kernels.common_triton import uniform_triton
from gradwire.kernels.dispatch import use_triton
from tests.kernels.support.cases import PROPERTY
from tests.kernels.support.exact import assert_same_bits
from tests.kernels.support.random_oracle import at, splitmix64, uniform_oracle

INT64 = st.integers(-(2**63), 2**63 - 1)
EXTREMES = (0, 1, -1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63))


def test_oracle_matches_published_splitmix64_numbers():
    # The first numbers from seed 1234567, as published with several implementations of the generator.
    state, found = 1234567, []
    for _ in range(5):
        state, z = splitmix64(state)
        found.append(z)
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@PROPERTY
@given(key=INT64, step=INT64)
@example(key=0, step=0)
@example(key=2**63 - 1, step=2**63 - 1)
@example(key=-(2**63), step=-(2**63))
def test_uniform_matches_splitmix64(device, key, step):
    found = uniform(key, at(step, device), torch.arange(40, device=device))
    assert found.dtype == torch.float32
    assert_same_bits(found.cpu().double(), uniform_oracle(key, step, 40), f"stream {key}, {step}")


@triton.jit
def _uniform_kernel(out_ptr, counters_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    key, step, first = tl.load(counters_ptr), tl.load(counters_ptr + 1), tl.load(counters_ptr + 2)
    tl.store(out_ptr + offs, uniform_triton(key, step, first + offs))


@pytest.mark.parametrize("first", [0, 2**31 - 5, 2**40])
@pytest.mark.parametrize("step", EXTREMES)
@pytest.mark.parametrize("key", EXTREMES)
def test_uniform_in_triton_is_bitwise_equal_to_reference(key, step, first, device):
    if not use_triton(device):
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    out = torch.full((64,), torch.nan, device=device)
    _uniform_kernel[(1,)](out, torch.tensor([key, step, first], device=device), N=64)
    assert_same_bits(out.cpu().double(), uniform_oracle(key, step, 64, first), f"stream {key}, {step} from {first}")
    if first == 0:
        assert_same_bits(out, uniform(key, at(step, device), torch.arange(64, device=device)), f"stream {key}, {step}")


def test_random_key_depends_on_seed_and_name_alone():
    assert random_key(0, "weight") == random_key(0, "weight")
    keys = {random_key(seed, name) for seed in (0, 1, -1, 2**70) for name in ("", "a", "b", "a/0", "a/1", "0/a", "ä")}
    assert len(keys) == 28
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert min(keys) < 0 < max(keys), "all 64 bits are used"


def test_random_key_matches_earlier_versions():
    # States that are resumed draw the columns that they would have drawn.
    assert random_key(0, "weight") == -2227690008018053774
