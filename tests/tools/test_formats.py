"""Published formats: values from their specifications, and the properties that all formats share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tools.formats import E2M1, E2M3, E4M3, GRADWIRE, PUBLISHED

ALL = GRADWIRE | PUBLISHED


def numbers_of(minifloat):
    """Every number of the format: codes times the least spacing, as exponents and mantissas."""
    m, least, largest = minifloat.mantissa_bits, minifloat.least_exponent, minifloat.largest_exponent
    subnormal = [k * 2.0 ** (least - m) for k in range(2**m)]
    normal = [(1 + k / 2**m) * 2.0**e for e in range(least, largest + 1) for k in range(2**m)]
    return [number for number in subnormal + normal if number <= minifloat.largest]


def test_e2m1_has_the_numbers_of_the_specification():
    assert numbers_of(E2M1) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e4m3_rounds_like_pytorch():
    x = torch.cat([torch.randn(1000) * 10.0**exponent for exponent in range(-4, 3)]).clamp(-448, 448)
    assert torch.equal(E4M3.rounded(x), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("minifloat", [E2M1, E2M3, E4M3])
def test_minifloats_round_to_the_nearest_and_of_two_to_the_even_one(minifloat):
    grid = torch.tensor(numbers_of(minifloat))
    assert torch.equal(minifloat.rounded(grid), grid)
    middles = (grid[1:] + grid[:-1]) / 2
    even = torch.where(torch.arange(len(middles)) % 2 == 0, grid[:-1], grid[1:])
    assert torch.equal(minifloat.rounded(middles), even)
    assert torch.equal(minifloat.rounded(-grid * 1e6), torch.where(grid > 0, -minifloat.largest, 0.0))


def test_microscaling_shares_the_power_of_two_of_the_largest_element():
    # The largest element is 5 = 1.25 * 2^2, and e2m1's largest power of two is 2^2: the scale is 1.
    block = torch.tensor([5.0, 2.6, -0.2, 0.3] + [0.0] * 28)
    assert PUBLISHED["MXFP4 (e2m1)"].rounded(block)[:4].tolist() == [4.0, 3.0, -0.0, 0.5]
    assert PUBLISHED["MXFP4 (e2m1)"].rounded(8 * block)[:4].tolist() == [32.0, 24.0, -0.0, 4.0]


def test_nvfp4_scales_its_largest_element_to_6():
    x = torch.randn(1024)
    rounded = PUBLISHED["NVFP4"].rounded(x)
    at = x.abs().argmax()
    assert rounded[at].item() == pytest.approx(x[at].item(), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_bits_of_formats(name):
    expected = {"MXFP8 (e4m3)": 8.25, "MXFP6 (e2m3)": 6.25, "MXFP4 (e2m1)": 4.25, "NVFP4": 4.5, "int4-128": 4.125}
    assert ALL[name].bits == expected.get(name, ALL[name].bits) <= 32


@pytest.mark.parametrize("name", ALL)
@given(shape=st.sampled_from([(1,), (64,), (3, 50), (2, 3, 65)]), exponent=st.integers(-30, 30))
def test_rounding_keeps_shapes_zeros_and_scales_with_powers_of_two(name, shape, exponent):
    x = torch.randn(shape)
    rounded = ALL[name].rounded(x)
    assert rounded.shape == x.shape
    assert ALL[name].rounded(torch.zeros(shape)).eq(0).all()
    if name != "fp16":  # which overflows
        torch.testing.assert_close(ALL[name].rounded(x * 2.0**exponent), rounded * 2.0**exponent, rtol=1e-6, atol=0)
