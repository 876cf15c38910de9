"""Wire formats: scales, planes, and rounding, held to what the format tables say."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.kernels import WIRE_FORMATS
from gradwire.kernels.wire_formats import (
    FP32_MAX,
    MIN_SCALE,
    Float8,
    Floats,
    Integers,
    OddIntegers,
    Signs,
    pack,
    round_to_bf16,
    unpack,
)
from tests.kernels.support.cases import PROPERTY
from tests.kernels.support.exact import assert_same_bits

SCALED = [wire for wire in WIRE_FORMATS.values() if wire.is_scaled]


def round_trip(wire, blocks):
    return wire.decode(*wire.encode(blocks, torch.full((len(blocks),), blocks.shape[1])))


MAGNITUDES = st.floats(2.0**-149, FP32_MAX, width=32, allow_subnormal=True)


@pytest.mark.parametrize("wire", SCALED, ids=lambda wire: wire.name)
@PROPERTY
@given(absmax=MAGNITUDES)
@example(absmax=2.0**-149)
@example(absmax=FP32_MAX)
@example(absmax=127.0)
def test_scale_is_rounded_up_to_bf16_and_into_range(wire, absmax):
    largest = torch.tensor([[absmax]])
    quotient = largest / wire.levels
    scale = wire.round_scale(largest, quotient)
    assert scale == scale.bfloat16().float(), "the scale is exact in bf16"
    assert MIN_SCALE <= scale.item() <= wire.max_scale
    assert (scale.double() * wire.levels).item() <= FP32_MAX, "no decoded value overflows"
    if MIN_SCALE < quotient.item() < wire.max_scale * (1 - 2.0**-8):
        assert quotient.item() <= scale.item() <= quotient.item() * (1 + 2.0**-7)
    assert torch.isfinite(1 / scale)


def test_scale_of_zeros_is_zero_and_of_non_finite_blocks_nan():
    blocks = torch.zeros(4, 32)
    blocks[1, 3], blocks[2, 31], blocks[3, 0] = torch.nan, torch.inf, 1e-45
    for wire in SCALED:
        scales = wire.scales(blocks, torch.full((4,), 32))
        assert scales[0] == 0
        assert scales[1:3].isnan().all()
        assert scales[3].abs() == MIN_SCALE


@pytest.mark.parametrize("exponent", [0.5, 1, 3], ids=["light", "normal", "heavy"])
@pytest.mark.parametrize("count", [1, 5, 31, 32])
def test_scale_of_signs_has_a_gain_of_1_up_to_twice_the_mean(count, exponent):
    blocks = torch.zeros(100, 32)
    normal = torch.randn(100, count)
    blocks[:, :count] = normal.sign() * normal.abs() ** exponent
    scales = WIRE_FORMATS["sign"].scales(blocks, torch.full((100,), count))
    magnitudes = blocks.double().abs()
    total, squares = magnitudes.sum(1, keepdim=True), magnitudes.square().sum(1, keepdim=True)
    matched, bound = squares / total, 2 * total / count
    # Magnitudes are rounded to a step for the sum of the squares, and to 2^-7 of it for their sum; the scale to bf16.
    step = magnitudes.amax(1, keepdim=True) / 127
    in_squares = (step * total + count * step**2 / 4) / squares
    in_total = count * step * 2.0**-8 / total
    assert (scales <= torch.minimum(matched * (1 + in_squares) / (1 - in_total) * (1 + 2.0**-7), bound)).all()
    assert (scales >= torch.minimum(matched * (1 - in_squares) / (1 + in_total), bound * (1 - 2.0**-6))).all()
    assert exponent < 3 or count == 1 or (matched > bound).any(), "some blocks reach the bound"


@PROPERTY
@given(
    block=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=32, max_size=32),
    scale=st.sampled_from([2.0**-60, 1.0, 2.0**60]),
)
@example(block=[1.0] + 31 * [2.0**-15], scale=1.0)
@example(block=[1.0] + 31 * [1 / 31], scale=1.0)
def test_errors_of_signs_are_no_larger_than_the_block(block, scale):
    blocks = torch.tensor([block]) * scale
    error = blocks.double() - round_trip(WIRE_FORMATS["sign"], blocks).double()
    smallest = 32**0.5 * MIN_SCALE  # the error of a block whose scale was raised to the smallest
    assert error.norm() <= max(blocks.double().norm() * (1 + 2.0**-22), smallest)


def gradient_like(kind, shape, seed):
    """Numbers distributed like gradients, fp32."""
    generator = torch.Generator().manual_seed(seed)
    normal, uniform = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    if kind == "normal":
        return normal
    if kind == "uniform":
        return 2 * uniform - 1
    if kind == "Laplace":
        return normal.sign() * -(1 - uniform).log()
    if kind == "Student, 3 degrees":
        return normal / (torch.randn((3, *shape), generator=generator).square().mean(0)).sqrt()
    if kind == "one of 8 is large":
        return normal * torch.where(uniform < 1 / 8, 10.0, 1.0)
    if kind == "sparse":
        return normal * (uniform < 1 / 8)
    assert kind == "constant"
    return torch.ones(shape)


KINDS_OF_GRADIENTS = ["normal", "uniform", "Laplace", "Student, 3 degrees", "one of 8 is large", "sparse", "constant"]


# Mean norm of the error memory, at most, in units of the gradient's.
LARGEST_ERRORS = {"int2": 1.2, "sign": 1.5}


def gain(wire, blocks):
    """The share of the blocks that is sent in its own step: <Q(x), x> / <x, x>."""
    x = blocks.double()
    return ((round_trip(wire, blocks).double() * x).sum() / x.square().sum()).item()


@pytest.mark.parametrize("wire", WIRE_FORMATS.values(), ids=WIRE_FORMATS)
def test_gain_is_1_within_3_percent(wire):
    for kind in KINDS_OF_GRADIENTS:
        least, most = 0.97, 1.03
        if wire.kind == "signs" and kind not in ("normal", "uniform", "constant"):
            least = 0.15  # the bound on the scale holds the largest elements back: they take several steps
        if wire.kind == "odd integers" and kind not in ("normal", "sparse", "constant"):
            most = 1.3  # without a zero, small elements are sent as a third of the largest
        assert least < gain(wire, gradient_like(kind, (4096, 64), 1)) < most, kind


@pytest.mark.parametrize(
    "wire",
    [pytest.param(wire, marks=[] if wire.name in ("int4", "sign") else pytest.mark.slow) for wire in SCALED],
    ids=lambda wire: wire.name,
)
def test_error_memory_stays_bounded_over_10_000_steps(wire):
    steps, counts = 10_000, torch.full((len(KINDS_OF_GRADIENTS) * 2,), 64)
    gradients = torch.cat([gradient_like(kind, (steps, 2, 64), 2) for kind in KINDS_OF_GRADIENTS], 1)
    error, norms = torch.zeros(gradients.shape[1:]), torch.empty(gradients.shape[:2])
    for gradient, norm in zip(gradients, norms, strict=True):
        values = gradient + error
        error = values - wire.decode(*wire.encode(values, counts))
        norm.copy_(error.norm(dim=1))
    norms /= gradients.square().sum(2).mean(0).sqrt()
    early, late = norms[: steps // 2].mean(0), norms[steps // 2 :].mean(0)
    assert (late <= 1.1 * early + 1e-6).all(), "does not grow"
    assert (late <= LARGEST_ERRORS.get(wire.name, 0.5)).all()


def test_planes_hold_elements_at_a_distance_of_a_part_of_the_block():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 3], codes[0, 16 + 5] = 9, 12
    packed = pack(codes, 4)
    assert packed[0, 3] == 9
    assert packed[0, 5] == 12 << 4
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 3 * 4 + 1] = 1  # bit 3 of byte 1
    assert pack(codes, 1).tolist() == [[0, 8, 0, 0]]
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, [3, 8 + 3, 16 + 3, 24 + 3]] = torch.tensor([1, 2, 4, 63], dtype=torch.uint8)  # of one word
    word = 1 | 2 << 6 | 4 << 12 | 63 << 18
    expected = [[word >> 8 * i & 255 if k == 3 else 0 for k in range(8)] for i in range(3)]
    assert pack(codes, 6).view(3, 8).tolist() == expected, "the lowest bytes of all words come first"


@pytest.mark.parametrize("bits", sorted({wire.bits for wire in SCALED}))
def test_unpack_is_the_inverse_of_pack(bits):
    codes = torch.randint(0, 1 << bits, (50, 128), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits), codes.int())
    payload = torch.randint(0, 256, (50, 128 * bits // 8), dtype=torch.uint8)
    assert torch.equal(pack(unpack(payload, bits).to(torch.uint8), bits), payload)


@pytest.mark.parametrize(
    ("name", "values", "codes", "decoded"),
    [
        # Ties round to even; codes are offset by half their number, or in two's complement.
        ("int4", [-8, 7, 2, 0.5, 1.5, 2.5, -3.5, 7.75], [0, 15, 10, 8, 10, 10, 4, 15], [-8, 7, 2, 0, 2, 2, -4, 7]),
        # The largest element has the code of -8, so this scale is -1.
        ("int4", [8, -7, -2, 3.5, 0], [0, 15, 10, 4, 8], [8, -7, -2, 4, 0]),
        ("int6", [-32, 31, 2, 0.5, 31.75], [0, 63, 34, 32, 63], [-32, 31, 2, 0, 31]),
        ("int6", [32, -31, -2.5, 0], [0, 63, 34, 32], [32, -31, -2, 0]),
        ("int8", [-128, 127, 2, 0.5], [128, 127, 2, 0], [-128, 127, 2, 0]),
        ("int2", [3, -3, 1, -1, 0, 2.5, -0.5], [3, 0, 2, 1, 2, 3, 1], [3, -3, 1, -1, 1, 3, -1]),
    ],
)
def test_codes_of_explicit_integers(name, values, codes, decoded):
    wire, block = WIRE_FORMATS[name], torch.zeros(1, 32)
    block[0, : len(values)] = torch.tensor(values)
    scales, payload = wire.encode(block, torch.tensor([32]))
    assert scales.abs() == 1
    assert unpack(payload, wire.bits)[0, : len(codes)].tolist() == codes
    assert wire.decode(scales, payload)[0, : len(codes)].tolist() == decoded


KINDS = [Integers, OddIntegers, Signs, Float8, Floats]


@PROPERTY
@given(
    bits=st.integers(-1, 17) | st.sampled_from([32, 64]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    block_size=st.sampled_from([32, 64, 1024]),
)
@example(bits=3, kind=Integers, dtype=torch.uint8, block_size=64)
@example(bits=4, kind=Integers, dtype=torch.uint8, block_size=64)
@example(bits=6, kind=Integers, dtype=torch.uint8, block_size=32)
@example(bits=2, kind=Integers, dtype=torch.uint8, block_size=64)
@example(bits=4, kind=OddIntegers, dtype=torch.uint8, block_size=64)
@example(bits=8, kind=Float8, dtype=torch.uint8, block_size=64)
@example(bits=16, kind=Floats, dtype=torch.bfloat16, block_size=64)
def test_format_decodes_what_it_encodes_or_is_refused(bits, kind, dtype, block_size):
    try:
        wire = kind("new", bits, dtype)
    except ValueError as error:
        assert str(error).split()[0] in ("bits", "dtype")
        assert "of the wire format 'new' is" in str(error) and "; expected" in str(error)
        return
    blocks = torch.randn(20, block_size, generator=torch.Generator().manual_seed(bits))
    scales, payload = wire.encode(blocks, torch.full((20,), block_size))
    assert payload.shape == (20, wire.payload_bytes(block_size))
    error = (wire.decode(scales, payload) - blocks).abs()
    largest = blocks.abs().amax(1, keepdim=True)
    if kind in (Float8, Floats):  # half a distance of the grid, relative to the element
        eps = torch.finfo(torch.float8_e4m3fn if kind is Float8 else dtype).eps
        assert (error <= eps / 2 * blocks.abs() + largest * 2.0**-18).all()
    elif kind is Signs:
        assert (error.norm(dim=1) <= blocks.norm(dim=1)).all()
    else:  # half a distance of the grid, relative to the scale, which is rounded up to bf16
        steps = wire.spacing * largest / wire.levels * (1 + 2.0**-7)
        top = torch.where(blocks.amin(1, keepdim=True) == -largest, -1, 1)
        is_saturated = (blocks * top < -(wire.levels - 0.5) * scales.abs()) & (kind is Integers)
        assert (error <= torch.where(is_saturated, steps, steps / 2)).all()


DRAWS = torch.arange(0, 1 << 24, 1 << 8)  # evenly spaced: their mean is that of all draws


@PROPERTY
@given(x=st.floats(-(2.0**127), 2.0**127, width=32))
@example(x=1.0)
@example(x=2.0**-149)
@example(x=-(2.0**-133))
@example(x=0.0)
def test_stochastic_rounding_to_bf16_is_unbiased_to_the_bit(x):
    x = torch.tensor(x)
    rounded = round_to_bf16(x.expand(len(DRAWS)), DRAWS)  # all 2^16 values of the bits that matter
    assert rounded.double().mean() == x.double(), "the mean over all draws is exact"
    if x == x.bfloat16().float():
        assert_same_bits(rounded.float(), x.expand(len(DRAWS)), "numbers of bf16")


def test_largest_numbers_stay_finite():
    block = torch.full((1, 32), FP32_MAX)
    for wire in WIRE_FORMATS.values():
        assert round_trip(wire, block).isfinite().all(), wire.name
    assert round_to_bf16(block, torch.full((1, 32), 2**24 - 1)).isfinite().all()
