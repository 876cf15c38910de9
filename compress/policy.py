"""Policy: which parameters are compressed, as which matrices, to which rank, and from which step on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from torch import Tensor

from gradwire.compress._options import check_number, check_patterns, check_whole_number


class MatrixShape(NamedTuple):
    """How a parameter is compressed: as this many matrices of n rows and m columns, one after another in memory."""

    matrices: int
    rows: int
    columns: int
    rank: int

    @property
    def rate(self) -> float:
        """Elements of a matrix for each element of its factors, of a rank above 0."""
        return self.rows * self.columns / ((self.rows + self.columns) * self.rank)


@dataclass(frozen=True, kw_only=True)
class LowRankPolicy:
    """What PowerSGD compresses.

    A parameter o x i x k ... is a matrix of o rows and i k ... columns, a complex one with a real pair for each
    element; PowerSGD's result does not depend on the order of columns, so they are taken as they lie in memory.

    Attributes:
        rank: r of the factors, clamped to min(n, m). A higher one is more accurate and sends more.
        start_iteration: first step that is compressed. A later one lets training settle first.
        min_compression_rate: a matrix is compressed if (n + m) r times this is below n m. Never if it would not
            shrink, whatever this is. A higher one leaves more parameters uncompressed. Finite.
        ranks: other ranks by name pattern, as in `fnmatch`; the first that matches counts, and 0 exempts.
        stacks: parameters that are several matrices along their first dimension, by name pattern, and how many: 3
            for a fused query-key-value weight, the number of experts for experts x n x m.

    Raises:
        ValueError: an attribute is of another type or out of range.
    """

    rank: int = 1
    start_iteration: int = 1_000
    min_compression_rate: float = 2
    ranks: Mapping[str, int] = field(default_factory=dict)
    stacks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole_number("rank", self.rank, "at least 1, a whole number", 1)
        check_whole_number("start_iteration", self.start_iteration, "a whole number of steps")
        check_number("min_compression_rate", self.min_compression_rate, "a finite number")
        check_patterns("ranks", self.ranks, "a rank, or 0 to send it uncompressed", 0)
        check_patterns("stacks", self.stacks, "a number of matrices, at least 1", 1)

    def has_started(self, iteration: int) -> bool:
        """Whether the step ``iteration``, counted from 0, is compressed."""
        return iteration >= self.start_iteration

    def matrix_shape(self, name: str, layout: Tensor) -> MatrixShape | None:
        """How the parameter ``name`` is compressed, or None if it is sent as it is.

        Args:
            name: of the parameter.
            layout: a dense tensor with its shape, strides and dtype.

        Raises:
            ValueError: a pattern asks for more matrices than its first dimension can be cut into.
        """
        shape = self.as_matrices(name, layout)
        sent = (shape.rows + shape.columns) * shape.rank * max(self.min_compression_rate, 1)
        return shape if 0 < sent < shape.rows * shape.columns else None

    def matrix_shapes(self, layouts: Sequence[Tensor], names: Sequence[str] | None = None) -> list[MatrixShape | None]:
        """`matrix_shape` of each of some parameters; without names, patterns see them as "0", "1", ..."""
        names = names if names is not None else [str(i) for i in range(len(layouts))]
        return [self.matrix_shape(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first pattern that matches none of the names, as ``ranks['head.*']``; None if all match."""
        names = list(names)
        for option, patterns in (("ranks", self.ranks), ("stacks", self.stacks)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    return f"{option}[{pattern!r}]"
        return None

    def as_matrices(self, name: str, layout: Tensor) -> MatrixShape:
        """The matrices that ``name`` is, whether or not compressing them pays; of rank 0 if ``ranks`` exempts it.

        Raises:
            ValueError: a pattern asks for more matrices than its first dimension can be cut into.
        """
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


def _first_match(patterns: Mapping[str, int], name: str, default: int) -> int:
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), default)


def _memory_matrix(layout: Tensor) -> tuple[int, int]:
    """Rows and columns of the row-major matrix that a dense tensor is in memory.

    The first dimension is one side of it if it lies outermost or innermost in memory; else the outermost is.
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
