"""Matrix tables: the matrices of a bucket, their ranks, and where their factors stand in flat buffers.

PowerSGD replaces a matrix M of n rows and m columns by factors that are kept *rank-first*: P as r x n, Q as r x m, so
M is about P' Q. All P of a bucket are packed one after another in one flat buffer, all Q in another, in list order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.flattening import compute_dtype
from gradwire.kernels.segments import BLOCK, Upload

# Elements: 64 bytes of fp32, which CPUs and GPUs read at once.
ALIGNMENT = 16
# Elements between the rows of the CPU paths' scratch: a stride of a power of two halves the speed of BLAS.
ROW_GAP = 16
# The highest rank that the kernels take. Beyond it the passes run as plain PyTorch.
MAX_RANK = 64


class Matrix(NamedTuple):
    """The size of one matrix, the rank of its approximation, and the key of its random columns in `warm_start`."""

    rows: int
    columns: int
    rank: int
    key: int = 0


class Factor:
    """One side of the approximations of a bucket: every P, or every Q, packed rank-first in one flat buffer.

    Each begins at a multiple of `ALIGNMENT` elements, because products may round by the alignment of what they read:
    so the bits of a matrix's result do not depend on its neighbours in the bucket.

    Attributes:
        ranks: of each matrix.
        lengths: of each row of its factor: n for P, m for Q.
        sizes: elements of each factor.
        offsets: where each factor begins.
        numel: elements of the buffer.
        has_gaps: whether there are elements between the factors, which nothing writes.
    """

    def __init__(self, ranks: Sequence[int], lengths: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.lengths = list(lengths)
        self.sizes = [rank * length for rank, length in zip(ranks, lengths, strict=True)]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        self.offsets = [0, *accumulate(padded)][:-1]
        self.numel = sum(padded)
        self.has_gaps = padded != self.sizes
        self.on_device = Uploads()

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


class Uploads:
    """Tables of integers that kernels read, each made once and kept on the device."""

    def __init__(self) -> None:
        self._uploads: dict[object, Upload] = {}

    def get(self, key: object, device: torch.device, make: Callable[[], Sequence[Sequence[int]]]) -> Tensor:
        """The table ``key``, int64, one row for each sequence of ``make()``, which is called the first time."""
        if (key, device) not in self._uploads:
            rows = make()
            upload = Upload([number for row in rows for number in row], device)
            upload.tensor = upload.tensor.view(len(rows), -1)
            self._uploads[key, device] = upload
        return self._uploads[key, device].tensor


class MatrixTable:
    """The layout of a bucket's matrices and of their factors.

    Attributes:
        matrices: sizes and ranks.
        dtype: of the gradients: fp32, fp16, bf16 or fp64.
        device: where they are.
        compute: the dtype of the arithmetic, of the error memory and of the factors off the wire: fp32, or fp64 for
            fp64 gradients.
        p: the layout of the P factors.
        q: the layout of the Q factors.

    Raises:
        ValueError: there are no matrices, a matrix is empty, or a rank is not in 1 ... min(rows, columns).
    """

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> None:
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
        self.compute = compute_dtype(dtype)
        ranks = [matrix.rank for matrix in matrices]
        self.p = Factor(ranks, [matrix.rows for matrix in matrices])
        self.q = Factor(ranks, [matrix.columns for matrix in matrices])
        self.keys = [matrix.key for matrix in matrices]
        self.on_device = Uploads()
        self._addresses: list[int] = []
        self._pointers: Upload | None = None
        # Rows that the CPU paths handle at once: as many as stay in cache.
        self.block_rows = [max(1, min(matrix.rows, BLOCK // matrix.columns)) for matrix in matrices]
        self._scratch: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def limit(self) -> float:
        """The largest magnitude of the result: of the gradients' dtype, and representable in that of the arithmetic."""
        return torch.finfo(self.dtype).max

    @property
    def largest_rank(self) -> int:
        """Of all matrices."""
        return max(self.p.ranks)

    def layout(self) -> Tensor:
        """Rows, columns, ranks, and offsets of P and of Q, on the device: int64, 5 x matrices."""
        columns = ([m.rows for m in self.matrices], [m.columns for m in self.matrices], self.p.ranks)
        return self.on_device.get("layout", self.device, lambda: (*columns, self.p.offsets, self.q.offsets))

    def pointers(self, *tensors: Sequence[Tensor]) -> Tensor:
        """The addresses of the matrices of several lists, on the device; uploaded again only when one has changed.

        Every call takes as many lists, and returns the same tensor.
        """
        addresses = [tensor.data_ptr() for of_list in tensors for tensor in of_list]
        if self._pointers is None:
            self._pointers = Upload(addresses, self.device)
        elif self._addresses != addresses:
            self._pointers.replace(addresses)
        self._addresses = addresses
        return self._pointers.tensor

    def scratch(self, index: int) -> Tensor:
        """One block of rows of matrix ``index``, not initialised, of the CPU paths."""
        if not self._scratch:
            sizes = [(rows, m.columns) for rows, m in zip(self.block_rows, self.matrices, strict=True)]
            memory = torch.empty(
                max(rows * (columns + ROW_GAP) for rows, columns in sizes), dtype=self.compute, device=self.device
            )
            self._scratch = [memory.as_strided(size, (size[1] + ROW_GAP, 1)) for size in sizes]
        return self._scratch[index]


class Operands(NamedTuple):
    """The matrices of a bucket where they lie: what the passes of PowerSGD read and write.

    Every matrix is contiguous, n x m, of ``table.dtype``; the error memory is of ``table.compute``.

    Attributes:
        table: the layout.
        source: the gradients G.
        target: where the result goes; may be the source.
        error: the error memory E, or None without error feedback.
        keep: whether `project` leaves M = G + E in the target, where the later passes read it. Else they add again,
            as they must where the target is narrower than the arithmetic.
    """

    table: MatrixTable
    source: Sequence[Tensor]
    target: Sequence[Tensor]
    error: Sequence[Tensor] | None
    keep: bool

    def check(self) -> None:
        """Raise ValueError unless the matrices fit the table."""
        if self.keep and (self.error is None or self.table.dtype != self.table.compute):
            raise ValueError(
                f"M can be kept only with error feedback and in {self.table.compute}, not in {self.table.dtype}."
            )
        dtypes = ((self.source, self.table.dtype), (self.target, self.table.dtype), (self.error, self.table.compute))
        for tensors, dtype in dtypes:
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
