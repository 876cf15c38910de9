"""Programs of the low-rank kernels: which part of which matrix each handles, and how they read M.

A program works through a strip of one matrix, tile by tile: along a few rows to compute P or the result, or down a few
columns to compute Q. The tables are int64 with one row per field and one column per program, and have a decoder each.
"""

from __future__ import annotations

from typing import NamedTuple

from gradwire.kernels.language import jit, next_power_of_2, tl
from gradwire.kernels.matrix_table import MatrixTable

# Up to this rank, padded, products are formed element by element in fp32 registers; above, by `tl.dot`.
ELEMENTWISE_RANK = 8


class Tiling(NamedTuple):
    """How the kernels cut matrices.

    Attributes:
        rows: of a tile of M.
        columns: of a tile of M.
        strip_rows: the number of rows that a program for Q sums over, about.
        strip_columns: the number of columns that a program for P, or for the result, works through, about.
    """

    rows: int
    columns: int
    strip_rows: int
    strip_columns: int


# A tile of 8 elements a thread: with 16, the registers of `project` leave room for 12 warps on a multiprocessor, not
# 20. Its rows are shorter than a program has threads: Triton then loads a factor's elements in every thread that needs
# them, from the L1 cache. Those of longer rows it would load once and distribute through shared memory.
ELEMENTWISE = Tiling(rows=16, columns=64, strip_rows=128, strip_columns=512)
# Two tiles in fp32 and one of a factor are in flight three times over, within 64 KiB of shared memory.
DOT = Tiling(rows=32, columns=32, strip_rows=512, strip_columns=512)
# The largest number of partial sums of a factor: the strips of longer matrices are longer.
MAX_STRIPS = 128


def padded_rank(table: MatrixTable) -> int:
    """The rank that the kernels are compiled for; beyond `ELEMENTWISE_RANK` at least 16, as `tl.dot` demands."""
    return next_power_of_2(table.largest_rank)


def tiling(table: MatrixTable) -> Tiling:
    """How these matrices are cut."""
    return ELEMENTWISE if padded_rank(table) <= ELEMENTWISE_RANK else DOT


def _strip_length(across: int, tile: int, wanted: int) -> int:
    """The length of the strips of one matrix: whole tiles, about ``wanted``, as nearly equal as tiles allow."""
    n_strips = min(-(-across // wanted), MAX_STRIPS)
    return -(-across // (n_strips * tile)) * tile


def _strips_of(table: MatrixTable, to_p: bool) -> list[tuple[int, int, int]]:
    """For each matrix: the length of a side of the result, the length that strips cut, and the length of a strip."""
    cut = tiling(table)
    if to_p:
        return [(m.rows, m.columns, _strip_length(m.columns, cut.columns, cut.strip_columns)) for m in table.matrices]
    return [(m.columns, m.rows, _strip_length(m.rows, cut.rows, cut.strip_rows)) for m in table.matrices]


def strips(table: MatrixTable, to_p: bool) -> list[list[int]]:
    """The programs of a product, [5, programs].

    The fields: matrix; first row for P, or column for Q; first and last column of the strip for P, or row for Q; start
    of the partial sum.

    Args:
        table: the matrices.
        to_p: whether P is computed, else Q. `reconstruct` has the programs of P.
    """
    cut, programs, base = tiling(table), [], 0
    block = cut.rows if to_p else cut.columns
    for i, (along, across, length) in enumerate(_strips_of(table, to_p)):
        size = table.matrices[i].rank * along
        for first in range(0, along, block):
            for s, begin in enumerate(range(0, across, length)):
                programs.append((i, first, begin, min(begin + length, across), base + s * size))
        base += -(-across // length) * size
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def load_strip(strips_ptr, n_programs, program):
    """Decode one program of `strips`, without the start of its partial sum."""
    matrix = tl.load(strips_ptr + program)
    first = tl.load(strips_ptr + n_programs + program)
    begin = tl.load(strips_ptr + 2 * n_programs + program)
    end = tl.load(strips_ptr + 3 * n_programs + program)
    return matrix, first, begin, end


@jit
def load_partial_start(strips_ptr, n_programs, program):
    """Decode the last field of `strips`."""
    return tl.load(strips_ptr + 4 * n_programs + program)


def chunks(table: MatrixTable, to_p: bool, chunk: int) -> list[list[int]]:
    """The programs that add up partial sums, [5, programs].

    The fields: start of the chunk in its factor, size of the factor, number of strips, start of the factor's partial
    sums, offset of the factor in the packed result.

    Args:
        table: the matrices.
        to_p: whether P is computed, else Q.
        chunk: elements that a program adds up.
    """
    layout, programs, base = table.p if to_p else table.q, [], 0
    for i, (_, across, length) in enumerate(_strips_of(table, to_p)):
        size, n_strips = layout.sizes[i], -(-across // length)
        programs += [(start, size, n_strips, base, layout.offsets[i]) for start in range(0, size, chunk)]
        base += n_strips * size
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def load_chunk(chunks_ptr, n_programs, program):
    """Decode one program of `chunks`."""
    start = tl.load(chunks_ptr + program)
    size = tl.load(chunks_ptr + n_programs + program)
    n_strips = tl.load(chunks_ptr + 2 * n_programs + program)
    partial_start = tl.load(chunks_ptr + 3 * n_programs + program)
    offset = tl.load(chunks_ptr + 4 * n_programs + program)
    return start, size, n_strips, partial_start, offset


def n_partials(table: MatrixTable, to_p: bool) -> int:
    """The number of elements of all partial sums."""
    sizes = (table.p if to_p else table.q).sizes
    return sum(
        -(-across // length) * size for (_, across, length), size in zip(_strips_of(table, to_p), sizes, strict=True)
    )


@jit
def load_m(
    source,  # address of [n, m]
    target,  # address of [n, m]
    error,  # address of [n, m] fp32
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    SOURCE: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of M in fp32: from the target if `project` kept it there, else G + E."""
    source_ptr = (target if KEPT else source).to(tl.pointer_type(SOURCE)) + first
    error_ptr = error.to(tl.pointer_type(tl.float32)) + first
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        error_ptr = tl.multiple_of(error_ptr, 16)
    m = tl.load(source_ptr + offs, mask=mask, other=0).to(tl.float32)
    if HAS_ERROR and not KEPT:
        m += tl.load(error_ptr + offs, mask=mask, other=0)
    return m


@jit
def keep_m(
    target,  # address of [n, m]
    first,  # the tile's first element, int64
    offs,  # [tile] int32, from there
    mask,  # [tile]
    m,  # [tile] fp32
    SOURCE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a tile of M in the target, where `load_m` finds it."""
    target_ptr = target.to(tl.pointer_type(SOURCE)) + first
    if ALIGNED:
        target_ptr = tl.multiple_of(target_ptr, 16)
    tl.store(target_ptr + offs, m, mask=mask)
