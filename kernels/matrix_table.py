"""Matrix tables: the matrices of a bucket, their ranks, and where their factors lie in flat buffers.

PowerSGD approximates a matrix M of n rows and m columns by two low-rank factors:

    M is about P Q^T         M: n x m,  P: n x r,  Q: m x r

Factors are stored transposed, P as r x n and Q as r x m, so that every column of a factor is contiguous. All P of a
bucket are packed one after another in one flat buffer, all Q in another, in list order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dtypes import compute_dtype
from gradwire.kernels.language import jit, tl
from gradwire.kernels.segment_table import CPU_BLOCK_NUMEL, SegmentTable
from gradwire.kernels.uploads import Upload, UploadCache

# Each factor begins at a multiple of this many elements: 64 bytes of fp32, which CPUs and GPUs read at once.
ALIGN_NUMEL = 16
# Padding of each row of the CPU paths' scratch, in elements: a row stride of a power of two halves the speed of BLAS.
ROW_GAP_NUMEL = 16
# The highest rank that the Triton kernels accept. Above it, the passes run in plain PyTorch.
MAX_RANK = 64


@jit
def load_factor(layout_ptr, n_factors, factor):
    """Decode one row of `FactorLayout.packed`.

    Returns:
        The rank, the length and the offset of factor number ``factor``.
    """
    rank = tl.load(layout_ptr + factor)
    length = tl.load(layout_ptr + n_factors + factor)
    offset = tl.load(layout_ptr + 2 * n_factors + factor)
    return rank, length, offset


@jit
def reload_factor_size(layout_ptr, n_factors, factor):
    """Load rank and length again, for a store after a long loop.

    The loads are volatile, so the compiler cannot merge them with those before the loop: the sizes,
    and the masks made of them, occupy no registers in the loop. Only fields that the store needs
    are loaded, because the compiler keeps every volatile load.
    """
    rank = tl.load(layout_ptr + factor, volatile=True)
    length = tl.load(layout_ptr + n_factors + factor, volatile=True)
    return rank, length


@jit
def load_sizes(layout_ptr, n_matrices, matrix):
    """Decode the sizes in `MatrixTable.packed`.

    Returns:
        Rows, columns and rank of matrix number ``matrix``.
    """
    rows = tl.load(layout_ptr + matrix)
    columns = tl.load(layout_ptr + n_matrices + matrix)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix)
    return rows, columns, rank


@jit
def reload_rows_and_rank(layout_ptr, n_matrices, matrix):
    """Load rows and rank again, for a store after a long loop: see `reload_factor_size`."""
    rows = tl.load(layout_ptr + matrix, volatile=True)
    rank = tl.load(layout_ptr + 2 * n_matrices + matrix, volatile=True)
    return rows, rank


@jit
def load_offsets(layout_ptr, n_matrices, matrix):
    """Decode the places of the factors in `MatrixTable.packed`.

    Returns:
        The offsets of P and of Q of matrix number ``matrix``.
    """
    p_offset = tl.load(layout_ptr + 3 * n_matrices + matrix)
    q_offset = tl.load(layout_ptr + 4 * n_matrices + matrix)
    return p_offset, q_offset


@jit
def load_addresses(addresses_ptr, n_matrices, matrix):
    """Decode `Operands.addresses`.

    Returns:
        The addresses of source, target and error of matrix number ``matrix``.
    """
    source = tl.load(addresses_ptr + matrix)
    target = tl.load(addresses_ptr + n_matrices + matrix)
    error = tl.load(addresses_ptr + 2 * n_matrices + matrix)
    return source, target, error


class Matrix(NamedTuple):
    """The size of one matrix, the rank of its approximation, and the key of its random columns."""

    rows: int
    columns: int
    rank: int
    key: int = 0


class FactorLayout:
    """Where the factors of one side of a bucket lie: every P, or every Q, packed in one flat buffer.

    Each factor begins at a multiple of `ALIGN_NUMEL` elements. BLAS may round by the alignment of
    its operands, so without this alignment the bits of a matrix's result would depend on the
    neighbours of the matrix in the bucket.

    Args:
        ranks: the rank of each matrix.
        lengths: the length of each column of its factor: n for P, m for Q.

    Attributes:
        sizes: the number of elements of each factor.
        offsets: where each factor begins.
        numel: the number of elements of the buffer.
        has_gaps: whether there are elements between the factors. On the wire, they are zeros.
    """

    def __init__(self, ranks: Sequence[int], lengths: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.lengths = list(lengths)
        self.sizes = [rank * length for rank, length in zip(ranks, lengths, strict=True)]
        padded = [-(-size // ALIGN_NUMEL) * ALIGN_NUMEL for size in self.sizes]
        self.offsets = [0, *accumulate(padded)][:-1]
        self.numel = sum(padded)
        self.has_gaps = padded != self.sizes
        self.on_device = UploadCache()

    def __len__(self) -> int:
        return len(self.ranks)

    def packed(self, device: torch.device) -> Tensor:
        """Ranks, lengths and offsets on the device, int64, [3, factors]: what `load_factor` decodes."""
        return self.on_device.get("layout", device, lambda: (self.ranks, self.lengths, self.offsets))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The factor of each matrix, r x length, as a view of the flat ``buffer``."""
        start = buffer.storage_offset()
        return [
            buffer.as_strided((rank, length), (length, 1), start + offset)
            for rank, length, offset in zip(self.ranks, self.lengths, self.offsets, strict=True)
        ]

    def check(self, buffer: Tensor, name: str) -> None:
        """Raise ValueError unless ``buffer`` is a flat buffer of this layout."""
        if buffer.dim() != 1 or buffer.numel() != self.numel or not buffer.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(buffer.shape)}; expected a contiguous 1-D tensor of {self.numel} elements."
            )


class MatrixTable:
    """The layout of a bucket's matrices and of their factors.

    Args:
        matrices: sizes, ranks and keys.
        dtype: of the gradients: fp32, fp16, bf16 or fp64.
        device: of the gradients.
        precision: of the products M Q and M^T P on GPUs at ranks above 8: "tf32" where the GPU has it, or "fp32".

    Attributes:
        compute: the dtype of the arithmetic, of the error memory and of the factors off the wire: fp32, or fp64 for
            fp64 gradients.
        p: the layout of the P factors.
        q: the layout of the Q factors.
        keys: of the matrices' random columns.
        block_rows: the number of rows of each matrix that the CPU paths handle at once: as many as stay in cache.
        plans: what launchers derive from the table, once.

    Raises:
        ValueError: there are no matrices, a matrix is empty, or a rank is not in 1 ... min(rows, columns).
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device, precision: str = "tf32"
    ) -> None:
        if not matrices:
            raise ValueError("A matrix table needs at least one matrix; got an empty list.")
        for i, (rows, columns, rank, _) in enumerate(matrices):
            if not 1 <= rank <= min(rows, columns):
                raise ValueError(
                    f"Matrix {i} is {rows} x {columns} with rank {rank}; expected 1 to min(rows, columns)."
                )
        self.matrices = list(matrices)
        self.dtype = dtype
        self.device = device
        self.precision = precision
        self.compute = compute_dtype(dtype)
        ranks = [matrix.rank for matrix in matrices]
        self.p = FactorLayout(ranks, [matrix.rows for matrix in matrices])
        self.q = FactorLayout(ranks, [matrix.columns for matrix in matrices])
        self.keys = [matrix.key for matrix in matrices]
        self.block_rows = [max(1, min(matrix.rows, CPU_BLOCK_NUMEL // matrix.columns)) for matrix in matrices]
        self.on_device = UploadCache()
        self.plans: dict[object, Any] = {}
        self._addresses: list[int] = []  # as uploaded
        self._uploaded: Upload | None = None
        self._scratch: list[Tensor] = []  # a view for each matrix, all of the same memory

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def limit(self) -> float:
        """The largest finite value of the gradients' dtype."""
        return torch.finfo(self.dtype).max

    @cached_property
    def largest_rank(self) -> int:
        """The largest rank of a matrix."""
        return max(self.p.ranks)

    def packed(self) -> Tensor:
        """Rows, columns, ranks and offsets of P and of Q, on the device: int64, [5, matrices].

        `load_sizes` and `load_offsets` decode it.
        """
        p, q = self.p, self.q
        return self.on_device.get("layout", self.device, lambda: (p.lengths, q.lengths, p.ranks, p.offsets, q.offsets))

    def on_device_addresses(self, addresses: list[int]) -> Tensor:
        """`Operands.addresses` on the device: int64, the same tensor in every call.

        They are uploaded again only after one of them has changed.
        """
        if self._uploaded is None:
            self._uploaded = Upload(addresses, self.device)
        elif self._addresses is not addresses and self._addresses != addresses:
            self._uploaded.replace(addresses)
        self._addresses = addresses
        return self._uploaded.tensor

    def scratch(self, index: int) -> Tensor:
        """An uninitialised block of rows of matrix ``index``, for the CPU paths."""
        if not self._scratch:
            sizes = [(rows, matrix.columns) for rows, matrix in zip(self.block_rows, self.matrices, strict=True)]
            memory = torch.empty(
                max(rows * (columns + ROW_GAP_NUMEL) for rows, columns in sizes), dtype=self.compute, device=self.device
            )
            self._scratch = [memory.as_strided(size, (size[1] + ROW_GAP_NUMEL, 1)) for size in sizes]
        return self._scratch[index]


@dataclass(frozen=True, eq=False)
class Operands:
    """The matrices of a bucket where they lie: what the passes of PowerSGD read and write.

    Every matrix is contiguous, n x m, of ``table.dtype``; those of the error memory are of ``table.compute``.

    Attributes:
        table: the layout.
        source: the gradients G.
        target: where the result goes. May be the source.
        error: the error memory E, or None without error feedback.
        keep: whether `project` stores M = G + E in the target, where the later passes read it. Otherwise they add G
            and E again, as they must where the target is narrower than the arithmetic.
    """

    table: MatrixTable
    source: Sequence[Tensor]
    target: Sequence[Tensor]
    error: Sequence[Tensor] | None
    keep: bool

    @cached_property
    def addresses(self) -> list[int]:
        """The addresses of source, target and error memory, for `load_addresses`."""
        # Without error feedback nothing is read at the third address, but the kernels test its alignment.
        return [each.data_ptr() for part in (self.source, self.target, self.error or self.target) for each in part]

    def check(self) -> None:
        """Raise ValueError unless the matrices fit the table. Those that fit once are not looked at again."""
        _ = self._fits

    @cached_property
    def _fits(self) -> bool:
        if self.keep and (self.error is None or self.table.dtype != self.table.compute):
            raise ValueError(
                f"M can be kept only with error feedback and in {self.table.compute}, not in {self.table.dtype}."
            )
        target = None if self.target is self.source else self.target
        lists = ((self.source, self.table.dtype), (target, self.table.dtype), (self.error, self.table.compute))
        for tensors, dtype in lists:
            if tensors is None:
                continue
            if len(tensors) != len(self.table):
                raise ValueError(f"Got {len(tensors)} matrices for a table of {len(self.table)}.")
            for i, (tensor, matrix) in enumerate(zip(tensors, self.table.matrices, strict=True)):
                shape = (matrix.rows, matrix.columns)
                if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                    raise ValueError(
                        f"Matrix {i} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; expected "
                        f"a contiguous {dtype} {shape}."
                    )
        return True


@dataclass(frozen=True, eq=False)
class Uncompressed:
    """The gradients of a bucket that are sent uncompressed, and their place on the wire.

    Attributes:
        table: their layout.
        source: the gradients.
        target: where the result goes. May be the source.
        wire: 1-D, ``table.numel`` elements of the gradients' dtype.
    """

    table: SegmentTable
    source: Sequence[Tensor]
    target: Sequence[Tensor]
    wire: Tensor

    def check(self) -> None:
        """Raise ValueError unless the tensors fit the table. Those that fit once are not looked at again."""
        _ = self._fits

    @property
    def target_table(self) -> SegmentTable:
        """The layout of the target, with addresses of its own unless the target is the source."""
        return self.table if self.target is self.source else self.table.for_results

    @cached_property
    def _fits(self) -> bool:
        self.table.check(self.source, self.wire)
        if self.target is not self.source:
            self.table.check_tensors(self.target)
        if self.wire.dtype != self.table.dtype:
            raise ValueError(f"The wire is {self.wire.dtype}; expected {self.table.dtype}, as the gradients.")
        return True
