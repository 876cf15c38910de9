"""Policies: which parameters are compressed, and how.

`LowRankPolicy` chooses matrices and their ranks for PowerSGD, `WirePolicy` the wire format of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.compress.memory import names_or_numbers
from gradwire.compress.quantization import Quantization
from gradwire.kernels import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, WIRE_FORMATS, WireFormat
from gradwire.validation import check_choice, check_flag, check_number, check_patterns, check_whole_number

Value = TypeVar("Value")
DEFAULT_EXEMPT = ("*.bias", "*norm*")
# Wire formats without error feedback by default: their rounding errors are small.
STATELESS = ("int8", "int6")
WIRE_ALIASES = {"fp8_e4m3": "fp8"}  # other names of wire formats


class MatrixShape(NamedTuple):
    """The matrices of a parameter, n x m each, one after another in memory, and the rank of their factors."""

    matrices: int
    rows: int
    columns: int
    rank: int

    @property
    def rate(self) -> float:
        """Compression rate n m / ((n + m) r), for a rank above 0."""
        return self.rows * self.columns / ((self.rows + self.columns) * self.rank)


@dataclass(frozen=True, kw_only=True)
class LowRankPolicy:
    """Which parameters PowerSGD compresses, as which matrices and to which rank.

    A parameter of shape o x i x k x ... becomes a matrix with o rows and i k ... columns; a complex
    element counts as two real ones. PowerSGD's result does not depend on the order of columns, so
    they stay in memory order and nothing is copied.

    Attributes:
        rank: r, clamped to min(n, m). Start with 1 to 4 and double it until accuracy suffices; the
            payload is proportional to r.
        min_compression_rate: a matrix is compressed if min_compression_rate (n + m) r < n m, and
            never if it would not shrink. A higher rate exempts matrices that gain little. Finite.
        ranks: other ranks by name pattern, as in `fnmatch`; the first match counts, and 0 exempts.
        stacks: number of matrices along the first dimension, by name pattern: 3 for a fused query-key-value
            weight, the number of experts for experts x n x m.

    Raises:
        ValueError: an attribute is of another type or out of range.
    """

    rank: int = 1
    min_compression_rate: float = 2
    ranks: Mapping[str, int] = field(default_factory=dict)
    stacks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole_number("rank", self.rank, "at least 1, a whole number", 1)
        check_number("min_compression_rate", self.min_compression_rate, "a finite number")
        check_patterns("ranks", self.ranks, "a rank, or 0 to send it uncompressed", 0)
        check_patterns("stacks", self.stacks, "a number of matrices, at least 1", 1)
        for name in ("ranks", "stacks"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    def matrix_shape(self, name: str, layout: Tensor) -> MatrixShape | None:
        """The matrices that a parameter is compressed as; None if it is sent uncompressed.

        Args:
            name: parameter name.
            layout: a dense tensor with its shape, strides and dtype, such as its gradient.

        Raises:
            ValueError: a pattern asks for more matrices than its first dimension can be cut into.
        """
        shape = self.as_matrices(name, layout)
        sent = (shape.rows + shape.columns) * shape.rank * max(self.min_compression_rate, 1)
        return shape if 0 < sent < shape.rows * shape.columns else None

    def matrix_shapes(self, layouts: Sequence[Tensor], names: Sequence[str] | None = None) -> list[MatrixShape | None]:
        """`matrix_shape` of every parameter; without names, patterns match "0", "1", ..."""
        names = names_or_numbers(names, layouts)
        return [self.matrix_shape(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern that matches none of the names, as ``ranks['head.*']``; None if all match."""
        return _unmatched(list(names), ranks=self.ranks, stacks=self.stacks)

    def as_matrices(self, name: str, layout: Tensor) -> MatrixShape:
        """The matrices of a parameter, even if compression does not pay; of rank 0 if ``ranks`` exempts it."""
        count = _first_match(self.stacks, name, 1)
        rows, columns = _memory_matrix(layout)
        if count > 1:
            if layout.dim() < 2 or layout.shape[0] % count != 0 or rows != layout.shape[0]:
                raise ValueError(
                    f"stacks asks for {count} matrices in {name}, which is {tuple(layout.shape)} with strides "
                    f"{layout.stride()}; expected a first dimension that {count} divides, outermost in memory."
                )
            rows //= count
            if rows == 1 and layout.dim() > 2:  # experts x n x m
                rows, columns = _memory_matrix(layout[0])
        return MatrixShape(count, rows, columns, min(_first_match(self.ranks, name, self.rank), rows, columns))

    def why_nothing_is_compressed(self, layouts: Mapping[str, Tensor]) -> str:
        """Why none of these parameters is compressed: the largest matrix, its rate, and the option to change."""
        shapes = {name: self.as_matrices(name, layout) for name, layout in layouts.items()}
        matrices = {
            name: shape for name, shape in shapes.items() if min(layouts[name].dim(), shape.rows, shape.columns) > 1
        }
        if not matrices:
            return "No parameter is a matrix, and only matrices are compressed."
        compressible = {name: shape for name, shape in matrices.items() if shape.rank > 0}
        if not compressible:
            return "ranks exempts every matrix."
        name = max(compressible, key=lambda name: layouts[name].numel())
        shape = compressible[name]
        wanted = max(self.min_compression_rate, 1)
        highest = shape._replace(rank=1).rate
        if shape.rate > 1:
            remedy = f"min_compression_rate={self.min_compression_rate} asks for a higher one: lower it"
            remedy += f", or matrix_approximation_rank: rank 1 has {highest:.2f}." if highest > wanted else "."
        elif highest > wanted:
            remedy = f"Lower matrix_approximation_rank: rank 1 has {highest:.2f}."
        elif highest > 1:
            remedy = f"Lower matrix_approximation_rank and min_compression_rate: rank 1 has {highest:.2f}."
        else:
            remedy = "It is too small for any rank."
        return (
            f"The largest matrix, {name}, has {shape.rows} x {shape.columns} elements; its factors of rank "
            f"{shape.rank} have {(shape.rows + shape.columns) * shape.rank:,}, a rate of {shape.rate:.2f}. {remedy}"
        )


def exempt_format(wire: str, dtype: torch.dtype) -> str:
    """The format of gradients that are not quantized: ``wire`` if it has no scales, else bf16, or fp16 for fp16."""
    if not WIRE_FORMATS[wire].is_scaled:
        return wire
    return "fp16" if dtype.to_real() == torch.float16 else "bf16"


@dataclass(frozen=True, kw_only=True)
class WirePolicy:
    """The wire format of each parameter, and how its blocks are quantized.

    The first pattern in ``wires`` that matches a parameter's name decides. A parameter that matches a pattern in
    ``exempt``, or has fewer than two dimensions, is sent in 16 bit if ``wire`` has fewer: fp16 for fp16 gradients, else
    bf16. All other parameters are sent in ``wire``.

    Attributes:
        wire: a format of `gradwire.kernels.WIRE_FORMATS`.
        exempt: name patterns, as in `fnmatch`.
        wires: other formats, by name pattern.
        block_size, seed: as in `Quantization`.
        use_error_feedback: whether to keep the rounding errors. None: unless the format of the fewest bits, of ``wire``
            and ``wires``, is int8 or int6.
        error_dtype: dtype of the rounding errors.

    Raises:
        ValueError: an attribute is of another type or out of range.
    """

    wire: str = "int4"
    exempt: tuple[str, ...] = DEFAULT_EXEMPT
    wires: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 64
    use_error_feedback: bool | None = None
    error_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "wire", wire_name("wire", self.wire))
        if not isinstance(self.exempt, tuple) or not all(isinstance(pattern, str) for pattern in self.exempt):
            raise ValueError(f"exempt is {self.exempt!r}; expected a tuple of name patterns, such as ('*.bias',).")
        if not isinstance(self.wires, Mapping) or not all(isinstance(pattern, str) for pattern in self.wires):
            raise ValueError(f"wires is {self.wires!r}; expected a dictionary from name patterns to wire formats.")
        wires = {pattern: wire_name(f"wires[{pattern!r}]", wire) for pattern, wire in self.wires.items()}
        object.__setattr__(self, "wires", wires)
        check_block_size("block_size", self.block_size)
        if self.use_error_feedback is not None:
            check_flag("use_error_feedback", self.use_error_feedback)
        check_choice("error_dtype", self.error_dtype, (torch.float32, torch.bfloat16))
        check_whole_number("seed", self.seed, "a whole number")

    @property
    def keeps_errors(self) -> bool:
        """``use_error_feedback``, or its default for these wire formats."""
        if self.use_error_feedback is not None:
            return self.use_error_feedback
        return min((self.wire, *self.wires.values()), key=lambda name: WIRE_FORMATS[name].bits) not in STATELESS

    def quantization(self, local_size: int = 1) -> Quantization:
        """The arithmetic of blocks, with ``local_size`` ranks on each node."""
        error_dtype = self.error_dtype if self.keeps_errors else None
        return Quantization(block_size=self.block_size, error_dtype=error_dtype, seed=self.seed, local_size=local_size)

    def wire_format(self, name: str, layout: Tensor) -> WireFormat:
        """The wire format of a parameter; ``layout`` has its shape and the dtype of its gradient."""
        wire = self.wire
        if layout.dim() < 2 or any(fnmatchcase(name, pattern) for pattern in self.exempt):
            wire = exempt_format(wire, layout.dtype)
        return WIRE_FORMATS[_first_match(self.wires, name, wire)]

    def wire_formats(self, layouts: Sequence[Tensor], names: Sequence[str] | None = None) -> list[WireFormat]:
        """`wire_format` of every parameter; without names, patterns match "0", "1", ..."""
        names = names_or_numbers(names, layouts)
        return [self.wire_format(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern in ``wires`` or ``exempt`` that matches no name, as ``wires['head.*']``; None if all match.

        The default patterns in ``exempt`` need not match: they suit models with and without normalization layers.
        """
        own = [pattern for pattern in self.exempt if pattern not in DEFAULT_EXEMPT]
        return _unmatched(list(names), wires=self.wires, exempt=own)


def _unmatched(names: Sequence[str], **options: Iterable[str]) -> str | None:
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                return f"{option}[{pattern!r}]"
    return None


def _first_match(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), default)


def _memory_matrix(layout: Tensor) -> tuple[int, int]:
    """Rows and columns of a dense tensor in memory order, as a row-major matrix.

    One side is the first dimension if it is outermost or innermost in memory; else it is the outermost dimension.
    """
    if layout.numel() == 0 or layout.dim() == 0:
        return layout.numel(), 1
    pair = 2 if layout.is_complex() else 1
    if layout.numel() == max(layout.shape):  # a vector, however many dimensions it has
        return layout.numel() * pair, 1
    order = sorted((d for d in range(layout.dim()) if layout.shape[d] > 1), key=layout.stride, reverse=True)
    outermost, innermost = order[0], order[-1]
    if innermost == 0 and outermost != 0:
        rest = prod(layout.shape[1:])
        return rest, layout.shape[0] * pair
    rows = layout.shape[0] if layout.shape[0] == 1 else layout.shape[outermost]
    return rows, layout.numel() * pair // rows


def check_block_size(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a power of two that blocks may have."""
    expected = f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
    check_whole_number(name, value, expected, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    if value & (value - 1):  # type: ignore[operator]
        raise ValueError(f"{name} is {value}; expected {expected}.")


def wire_name(option: str, value: Any, or_else: str = "") -> str:
    """The key of `WIRE_FORMATS` that ``value`` stands for. Raises ValueError as `check_choice` does."""
    name: str = WIRE_ALIASES.get(value, value) if isinstance(value, str) else value
    check_choice(option, name, WIRE_FORMATS, or_else)
    return name
