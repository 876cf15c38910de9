"""What the property tests draw: dtypes, layouts of many tensors, values, scales and limits."""

from dataclasses import dataclass
from math import inf, prod

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gradwire.kernels.dispatch import is_interpreted
from tests.kernels.support.exact import Guarded

INTERPRETED = is_interpreted()
REALS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SOURCES = (*REALS, torch.complex64)
WIRES = REALS
INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}

# Derandomized: a failure in one run is a failure in every run. The interpreter takes milliseconds per program.
PROPERTY = settings(
    max_examples=10 if INTERPRETED else 40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


on_the_cpu_path = pytest.mark.skipif(INTERPRETED, reason="blocks belong to the CPU path, not to the kernels")


def name(dtype):
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """Where one tensor lies: ``offset`` elements past an aligned address, with any dense strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self):
        return prod(self.shape)


def row_major(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# Primes, powers of two, and the neighbors of one program's 4096 elements; complex tensors have twice as many.
SIZES = (1, 2, 7, 31, 127, 1021, 2047, 2048, 2049, 4095, 4096, 4097, 8193, 12289)


@st.composite
def layouts(draw):
    offset = draw(st.sampled_from((0, 0, 1, 2, 3)))
    kind = draw(st.sampled_from(("vector", "vector", "matrix", "transposed", "channels_last", "0-d", "empty", "odd")))
    if kind == "vector":
        return Layout((draw(st.sampled_from(SIZES)),), (1,), offset)
    if kind == "matrix":
        shape = draw(st.tuples(st.integers(1, 61), st.integers(1, 61)))
        return Layout(shape, row_major(shape), offset)
    if kind == "transposed":
        rows, columns = draw(st.tuples(st.integers(2, 67), st.integers(2, 67)))
        return Layout((rows, columns), (1, rows), offset)
    if kind == "channels_last":
        n, c, h, w = draw(st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(1, 7), st.integers(1, 7)))
        return Layout((n, c, h, w), (h * w * c, 1, w * c, c), offset)
    if kind == "0-d":
        return Layout((), (), offset)
    if kind == "empty":
        shape = draw(st.sampled_from(((0,), (0, 3), (5, 0), (2, 0, 7))))
        return Layout(shape, row_major(shape), offset)
    return Layout((5, 1, 3), (3, 77, 1), offset)  # the stride of a dimension of one element means nothing


KINDS = ("normal", "normal", "bits", "spiked", "tiny")


@dataclass(frozen=True)
class Case:
    """A list of tensors and its wire."""

    layouts: tuple[Layout, ...]
    wire_offset: int
    kind: str
    seed: int

    def numel(self, dtype):
        return sum(layout.numel for layout in self.layouts) * (2 if dtype.is_complex else 1)

    def sources(self, dtype, device):
        """Guarded tensors with values in them."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            Guarded(values(layout.numel, dtype, self.kind, generator), offset=layout.offset, device=device)
            for layout in self.layouts
        ]

    def targets(self, dtype, device):
        """Guarded tensors of NaN."""
        return [Guarded.poisoned(layout.numel, dtype, offset=layout.offset, device=device) for layout in self.layouts]

    def wire(self, dtype, numel, device):
        """A guarded wire with values in it."""
        generator = torch.Generator().manual_seed(self.seed)
        return Guarded(values(numel, dtype, self.kind, generator), offset=self.wire_offset, device=device)

    def views(self, guarded):
        return [g.view(layout.shape, layout.strides) for g, layout in zip(guarded, self.layouts, strict=True)]


@st.composite
def cases(draw):
    return Case(
        layouts=tuple(draw(st.lists(layouts(), min_size=1, max_size=8))),
        wire_offset=draw(st.sampled_from((0, 0, 1, 3, 8))),
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 2**20)),
    )


def values(numel, dtype, kind, generator):
    """Random elements: of ordinary size, any bit patterns, ordinary with a few special ones, or subnormal."""
    if dtype.is_complex:
        return torch.view_as_complex(values(2 * numel, dtype.to_real(), kind, generator).view(-1, 2))
    if kind == "bits":
        integer = INTEGERS.get(dtype, torch.int64)
        info = torch.iinfo(integer)
        return torch.randint(info.min, info.max, (numel,), dtype=integer, generator=generator).view(dtype)
    result = torch.randn(numel, dtype=torch.float64, generator=generator)
    if kind == "tiny":
        result *= 8 * torch.finfo(dtype).smallest_normal
    result = result.to(dtype)
    if kind == "spiked" and numel > 0:
        special = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, -0.0, torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype
        )
        count = min(3, numel)
        at = torch.randint(numel, (count,), generator=generator)
        result[at] = special[torch.randint(len(special), (count,), generator=generator)]
    return result


# Without -0.0: the interpreter drops the sign of a number argument that is zero.
SCALES = st.one_of(
    st.sampled_from((1.0, 0.5, 1 / 3, 1e-3, 2.0, -1.0, 0.0, 2.0**-40, 2.0**60, 16777217.0)),
    st.floats(-1e4, 1e4, allow_subnormal=False).map(lambda number: number + 0.0),
)
SCALE_SHAPES = st.sampled_from((None, (), (1,)))  # None: a number
LIMITS = st.sampled_from((inf, inf, 1e9, 8188.0, 57.3, 1.0, 2.0**-10, 2.0**-70))


def scale_of_shape(scale, shape, device):
    """A number as it is, or as a tensor, which is not 16-byte aligned."""
    return scale if shape is None else torch.tensor([torch.nan, scale], device=device)[1].view(shape)
