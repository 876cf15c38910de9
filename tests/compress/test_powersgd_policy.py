"""`LowRankPolicy`: which parameters are compressed, as which matrices, and what is sent then."""

from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from gradwire.compress.policy import LowRankPolicy, MatrixShape
from gradwire.kernels import memory_order

# Derandomized: a failure in one run is a failure in every run.
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True, database=None)

SIZES = st.one_of(st.integers(1, 12), st.sampled_from((13, 64, 127, 1000, 4096)))
SHAPES = st.lists(SIZES, min_size=1, max_size=4).map(tuple)
RATES = st.one_of(st.just(1), st.just(2), st.floats(1, 50))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def permuted(shape, order, dtype=torch.float32):
    """A dense tensor of that shape whose dimensions lie in memory in that order, outermost first."""
    count = prod(shape)
    values = torch.arange(count, dtype=torch.float32).to(dtype)
    return values.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


@PROPERTY
@given(shape=SHAPES, rank=st.integers(1, 40), rate=RATES)
@example(shape=(6, 3), rank=1, rate=2)  # the boundary itself: (n + m) r times the rate equals n m
@example(shape=(6, 4), rank=1, rate=2)
@example(shape=(12, 12), rank=2, rate=3)
@example(shape=(2, 2), rank=1, rate=1)
def test_decisions_at_rates_of_at_least_one_equal_pytorchs(shape, rank, rate):
    n, m = shape[0], prod(shape[1:])
    expected, _, _ = _should_compress(n, m, min(n, m, rank), rate)
    policy = LowRankPolicy(rank=rank, min_compression_rate=rate)
    chosen = policy.matrix_shape("weight", meta(*shape))
    assert chosen == (MatrixShape(1, n, m, min(n, m, rank)) if expected else None)


def rows_as_sets(matrix):
    return {frozenset(row) for row in matrix.tolist()}


@st.composite
def dense_layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    return permuted(shape, draw(st.permutations(range(len(shape)))))


def side(layout):
    """The dimension that should be one side of the matrix: the first, unless it lies between others in memory."""
    by_memory = sorted((d for d in range(layout.dim()) if layout.shape[d] > 1), key=layout.stride, reverse=True)
    if layout.shape[0] == 1 or by_memory[0] == 0 or by_memory[-1] == 0:
        return 0
    return by_memory[0]


EVERYTHING = LowRankPolicy(rank=1, min_compression_rate=1)


@PROPERTY
@given(layout=dense_layouts())
def test_matrix_in_memory_order_has_one_dimension_as_rows_or_columns(layout):
    # Up to the order of columns, on which PowerSGD's result does not depend; each element is a different number.
    d = side(layout)
    expected = layout.movedim(d, 0).reshape(layout.shape[d], -1)
    chosen = EVERYTHING.matrix_shape("weight", layout)
    n, m = expected.shape
    assert (chosen is not None) == (n + m < n * m)
    if chosen is not None:
        matrix = memory_order(layout).view(chosen.rows, chosen.columns)
        assert rows_as_sets(expected) in (rows_as_sets(matrix), rows_as_sets(matrix.t()))


LAYOUTS = {
    "row-major": (meta(8, 5), (8, 5)),
    "transposed": (meta(5, 8).t(), (5, 8)),
    "conv": (meta(8, 5, 3, 3), (8, 45)),
    "channels_last": (meta(8, 5, 3, 3).contiguous(memory_format=torch.channels_last), (8, 45)),
    "first innermost": (meta(5, 3, 8).permute(2, 0, 1), (15, 8)),
    "first in the middle": (meta(5, 8, 3).permute(1, 0, 2), (5, 24)),
    "size 1 with a wild stride": (torch.empty_strided((8, 1, 5), (5, 77, 1), device="meta"), (8, 5)),
    "complex": (meta(8, 5, dtype=torch.complex64), (8, 10)),
    "vector": (meta(100), None),
    "column": (meta(100, 1), None),
    "0-d": (meta(), None),
    "empty": (meta(0, 3), None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix_shape_follows_memory_order(layout):
    tensor, sides = LAYOUTS[layout]
    assert EVERYTHING.matrix_shape("weight", tensor) == (None if sides is None else MatrixShape(1, *sides, 1))


PATTERNS = {"embedding.weight": 0, "layers.*.mlp.*": 8, "layers.0.*": 3, "*.[qk].weight": 2, "Head.*": 5}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("embedding.weight", 0),
        ("module.embedding.weight", 4),  # a pattern is the whole name
        ("layers.0.mlp.up.weight", 8),  # the first that matches counts, not the closest
        ("layers.0.attention.weight", 3),
        ("layers.1.attention.q.weight", 2),
        ("layers.1.attention.v.weight", 4),
        ("layers.0.attention.k.weight", 3),
        ("head.weight", 4),  # upper and lower case are different
        ("Head.weight", 5),
    ],
)
def test_first_matching_pattern_gives_rank(name, rank):
    chosen = LowRankPolicy(rank=4, ranks=PATTERNS).matrix_shape(name, meta(200, 300))
    assert chosen == (MatrixShape(1, 200, 300, rank) if rank else None)


STACKS = {
    "fused query, key and value": (permuted((96, 32), (0, 1)), 3, (32, 32)),
    "experts": (permuted((4, 16, 24), (0, 1, 2)), 4, (16, 24)),
    "transposed experts": (permuted((4, 16, 24), (0, 2, 1)), 4, (24, 16)),
    "experts of convolutions": (permuted((4, 8, 6, 3, 3), (0, 1, 2, 3, 4)), 4, (8, 54)),
    "channels_last experts": (permuted((4, 8, 6, 3, 3), (0, 1, 3, 4, 2)), 4, (8, 54)),
    "two experts in each of three": (permuted((6, 16, 24), (0, 1, 2)), 3, (2, 384)),
    "grouped convolution": (permuted((32, 8, 3, 3), (0, 1, 2, 3)), 4, (8, 72)),
}


@pytest.mark.parametrize("stack", STACKS)
def test_stack_is_matrices_along_first_dimension(stack):
    layout, count, sides = STACKS[stack]
    chosen = LowRankPolicy(min_compression_rate=1, stacks={"w*": count}).matrix_shape("weight", layout)
    assert chosen == MatrixShape(count, *sides, 1)
    matrices = memory_order(layout).view(count, *sides)
    for matrix, part in zip(matrices, layout.chunk(count), strict=True):
        inner = part[0] if part.shape[0] == 1 else part
        expected = inner.reshape(inner.shape[0], -1)
        assert rows_as_sets(expected) in (rows_as_sets(matrix), rows_as_sets(matrix.t()))


@pytest.mark.parametrize(
    "layout",
    [meta(8, 8), meta(), meta(9), meta(8, 9).t(), meta(2, 9, 4).transpose(0, 1)],
    ids=["not divisible", "0-d", "vector", "transposed", "first in the middle"],
)
def test_stack_that_does_not_fit_raises(layout):
    with pytest.raises(ValueError, match=r"stacks asks for 3 matrices in blocks\.qkv.*expected") as error:
        LowRankPolicy(stacks={"*.qkv": 3}).matrix_shape("blocks.qkv", layout)
    assert str(tuple(layout.shape)) in str(error.value)
