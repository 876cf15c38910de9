"""Programs of the low-rank kernels: which part of which matrix each handles, as tables that kernels read.

Each table is int64 with one row per field and one column per program, and has its own jitted decoder.
"""

from __future__ import annotations

from gradwire.kernels.language import jit, tl
from gradwire.kernels.matrix_table import MatrixTable


def strips(table: MatrixTable, to_p: bool, block: int, strip: int) -> list[list[int]]:
    """The programs of a product, [4, programs]: matrix, block of the result, strip, start of the partial sum.

    Args:
        table: the matrices.
        to_p: whether P is computed, else Q.
        block: rows of M that a program handles for P, columns for Q.
        strip: columns of M that it sums over for P, rows for Q.
    """
    programs, base = [], 0
    for i, matrix in enumerate(table.matrices):
        along, across = (matrix.rows, matrix.columns) if to_p else (matrix.columns, matrix.rows)
        size = matrix.rank * along
        n_strips = -(-across // strip)
        programs += [(i, b, s, base + s * size) for b in range(-(-along // block)) for s in range(n_strips)]
        base += n_strips * size
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def load_strip(strips_ptr, n_programs, program):
    """Decode one program of `strips`."""
    matrix = tl.load(strips_ptr + program)
    block = tl.load(strips_ptr + n_programs + program)
    strip = tl.load(strips_ptr + 2 * n_programs + program)
    partial_start = tl.load(strips_ptr + 3 * n_programs + program)
    return matrix, block, strip, partial_start


def chunks(table: MatrixTable, to_p: bool, chunk: int, strip: int) -> list[list[int]]:
    """The programs that add up partial sums, [5, programs].

    The fields: start of the chunk in its factor, size of the factor, number of strips, start of the factor's partial
    sums, offset of the factor in the packed result.

    Args:
        table: the matrices.
        to_p: whether P is computed, else Q.
        chunk: elements that a program adds up.
        strip: as in `strips`.
    """
    programs, base = [], 0
    for i, matrix in enumerate(table.matrices):
        layout, across = (table.p, matrix.columns) if to_p else (table.q, matrix.rows)
        size, n_strips = layout.sizes[i], -(-across // strip)
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


def tiles(table: MatrixTable, block_n: int, block_m: int) -> list[list[int]]:
    """The programs of `reconstruct`, [3, programs]: matrix, block of ``block_n`` rows, block of ``block_m`` columns."""
    programs = [
        (i, n, m)
        for i, matrix in enumerate(table.matrices)
        for n in range(-(-matrix.rows // block_n))
        for m in range(-(-matrix.columns // block_m))
    ]
    return [list(column) for column in zip(*programs, strict=True)]


@jit
def load_tile(tiles_ptr, n_programs, program):
    """Decode one program of `tiles`."""
    matrix = tl.load(tiles_ptr + program)
    block_n = tl.load(tiles_ptr + n_programs + program)
    block_m = tl.load(tiles_ptr + 2 * n_programs + program)
    return matrix, block_n, block_m
