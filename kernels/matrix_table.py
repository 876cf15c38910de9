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
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import use_triton
from gradwire.kernels.layouts import compute_dtype, next_power_of_2
from gradwire.kernels.segment_table import CPU_BLOCK_NUMEL, SegmentTable
from gradwire.kernels.uploads import ProgramTables, Upload

# Each factor begins at a multiple of this many elements: 64 bytes of fp32, which CPUs and GPUs read at once. Quantized
# factors begin at a multiple of their block size.
ALIGN_NUMEL = 16
# Padding of each row of the CPU paths' scratch, in elements: a row stride of a power of two halves the speed of BLAS.
ROW_GAP_NUMEL = 16
# The highest rank that the Triton kernels accept. Above it, the passes run in plain PyTorch.
MAX_RANK = 64
# The Triton kernels address the elements of a tile of up to 32 rows by 32-bit offsets.
MAX_COLUMNS = 1 << 26
# Lookups after which a `FactorLayout` lets go of the views of buffers that were not among them.
CACHED_LOOKUPS = 32

# Up to this rank, padded, products are formed element by element in fp32 registers; above, by `tl.dot`.
ELEMENTWISE_RANK = 8


class Tiling(NamedTuple):
    """How the kernels cut matrices into tiles and strips. Lengths of strips are approximate."""

    rows: int  # of a tile of M
    columns: int  # of a tile of M
    strip_rows: int  # that a program for Q sums over
    strip_columns: int  # that a program for P, or for the result, works through


# 8 elements of a tile per thread: 16 would lower the occupancy of `project` from 20 to 12 warps per SM. Rows stay below
# the thread count, so Triton reads factors from L1 instead of shared memory.
ELEMENTWISE = Tiling(rows=16, columns=64, strip_rows=128, strip_columns=512)
# Two tiles in fp32 and one of a factor are in flight three times over, within 64 KiB of shared memory.
DOT = Tiling(rows=32, columns=32, strip_rows=512, strip_columns=512)
# Maximum partial sums per factor; beyond it, strips grow.
MAX_STRIPS = 128
# Elements of a factor whose partial sums one program adds up.
SUM_NUMEL = 256


class Matrix(NamedTuple):
    """The size of one matrix, the rank of its approximation, and the key of its random columns."""

    rows: int
    columns: int
    rank: int
    key: int = 0


class FactorLayout:
    """The layout of the factors of one side of a bucket: every P, or every Q, packed in one flat buffer.

    Each factor begins at a multiple of ``align`` elements. BLAS may round by the alignment of
    its operands, so without this alignment the bits of a matrix's result would depend on the
    neighbors of the matrix in the bucket.

    Args:
        ranks: the rank of each matrix.
        lengths: the length of each column of its factor: n for P, m for Q.
        align: a multiple of `ALIGN_NUMEL`.

    Attributes:
        sizes: the number of elements of each factor.
        by_rank: the indices of the factors of each rank.
        offsets: where each factor begins.
        numel: the number of elements of the buffer.
        has_gaps: whether there are elements between the factors. On the wire, they are zeros.
    """

    def __init__(self, ranks: Sequence[int], lengths: Sequence[int], align: int = ALIGN_NUMEL) -> None:
        self.align = align
        self.ranks = list(ranks)
        self.lengths = list(lengths)
        self.by_rank = [[i for i, each in enumerate(ranks) if each == rank] for rank in sorted(set(ranks))]
        self.sizes = [rank * length for rank, length in zip(ranks, lengths, strict=True)]
        padded = [-(-size // align) * align for size in self.sizes]
        self.offsets = [0, *accumulate(padded)][:-1]
        self.numel = sum(padded)
        self.has_gaps = padded != self.sizes
        self.on_device = ProgramTables()
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._earlier_views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lookups = 0

    def __len__(self) -> int:
        return len(self.ranks)

    def packed(self, device: torch.device) -> Tensor:
        """Ranks, lengths and offsets on the device: int64 [3, factors]."""
        return self.on_device.get("layout", device, lambda: zip(self.ranks, self.lengths, self.offsets, strict=True))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The factor of each matrix, r x length, as a view of the flat ``buffer``."""
        start = buffer.storage_offset()
        return [
            buffer.as_strided((rank, length), (length, 1), start + offset)
            for rank, length, offset in zip(self.ranks, self.lengths, self.offsets, strict=True)
        ]

    def cached_views(self, buffer: Tensor) -> list[Tensor]:
        """`views` of a buffer that steps use again and again; kept until they no longer do."""
        key = (buffer.data_ptr(), buffer.dtype)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._earlier_views.get(key) or self.views(buffer)
        self._lookups += 1
        if self._lookups % CACHED_LOOKUPS == 0:
            self._earlier_views, self._views = self._views, {}
        return views


class MatrixTable:
    """The layout of a bucket's matrices and of their factors.

    Args:
        matrices: sizes, ranks and keys.
        dtype: dtype of the gradients: fp32, fp16, bf16 or fp64.
        device: device of the gradients.
        precision: precision of M Q and M^T P on GPUs at ranks above 8: "tf32" where the GPU has it, or "fp32".
        align: each factor begins at a multiple of this many elements.

    Attributes:
        compute: dtype of the arithmetic, of the error memory and of the factors off the wire: fp32, or fp64 for fp64
            gradients.
        limit: largest finite value of the gradients' dtype.
        p: layout of the P factors.
        q: layout of the Q factors.
        largest_rank: largest rank of a matrix.
        padded_rank: rank that the kernels are compiled for; beyond `ELEMENTWISE_RANK` at least 16, as `tl.dot` demands.
        tiling: how the kernels cut the matrices.
        keys: keys of the matrices' random columns.
        block_rows: rows of each matrix that the CPU paths handle at once: as many as stay in cache.

    Raises:
        ValueError: there are no matrices, a matrix is empty, or a rank is not in 1 ... min(rows, columns).
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        device: torch.device,
        precision: str = "tf32",
        align: int = ALIGN_NUMEL,
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
        self.limit = torch.finfo(dtype).max
        ranks = [matrix.rank for matrix in matrices]
        self.p = FactorLayout(ranks, [matrix.rows for matrix in matrices], align)
        self.q = FactorLayout(ranks, [matrix.columns for matrix in matrices], align)
        self.largest_rank = max(ranks)
        self.padded_rank = next_power_of_2(self.largest_rank)
        self.tiling = ELEMENTWISE if self.padded_rank <= ELEMENTWISE_RANK else DOT
        self.keys = [matrix.key for matrix in matrices]
        self.block_rows = [max(1, min(matrix.rows, CPU_BLOCK_NUMEL // matrix.columns)) for matrix in matrices]
        self.on_device = ProgramTables()
        self._uploaded: Upload | None = None
        is_in_range = self.largest_rank <= MAX_RANK and max(self.q.lengths) <= MAX_COLUMNS
        self._fits_triton = is_in_range and self.compute == torch.float32

    def __len__(self) -> int:
        return len(self.matrices)

    def can_use_triton(self) -> bool:
        """Whether the Triton kernels run. They read addresses on the device, so CUDA graphs of a step can be reused."""
        return self._fits_triton and use_triton(self.device)

    def can_keep(self) -> bool:
        """Whether `project` should store M in the target: where the target can hold it, and where that saves a read.

        On a CPU it saves no read: the CPU paths copy M into their scratch in any case, and add there at no cost.
        """
        return self.dtype == self.compute and self.can_use_triton()

    @cached_property
    def products(self) -> dict[bool, Product]:
        """How the kernels form P (True) and Q (False)."""
        return {to_p: _product(self, to_p) for to_p in (True, False)}

    def packed(self) -> Tensor:
        """Rows, columns, ranks and offsets of P and of Q, on the device: int64 [5, matrices]."""
        p, q = self.p, self.q
        fields = (p.lengths, q.lengths, p.ranks, p.offsets, q.offsets)
        return self.on_device.get("layout", self.device, lambda: zip(*fields, strict=True))

    def on_device_addresses(self, addresses: list[int]) -> Tensor:
        """`Operands.addresses` on the device: int64, the same tensor in every call."""
        if self._uploaded is None:
            self._uploaded = Upload(self.device, addresses)
        return self._uploaded.replace(addresses)

    @cached_property
    def scratch(self) -> list[Tensor]:
        """An uninitialized block of rows of each matrix, for the CPU paths. All share their memory."""
        sizes = [(rows, matrix.columns) for rows, matrix in zip(self.block_rows, self.matrices, strict=True)]
        numel = max(rows * (columns + ROW_GAP_NUMEL) for rows, columns in sizes)
        memory = torch.empty(numel, dtype=self.compute, device=self.device)
        return [memory.as_strided(size, (size[1] + ROW_GAP_NUMEL, 1)) for size in sizes]


class Product(NamedTuple):
    """The programs of a product, for P or for Q. Each strip of a matrix gives a partial sum of the factor.

    Attributes:
        strips: those that form partial sums; `reconstruct` has those of P. Fields: matrix; first row for P, or column
            for Q; first and last column of the strip for P, or row for Q; start of the partial sum.
        chunks: those that add up `SUM_NUMEL` elements of them. Fields: start of the chunk in its factor, size of the
            factor, number of strips, start of the factor's partial sums, offset of the factor in the packed result.
        numel: elements of all partial sums.
    """

    strips: list[tuple[int, int, int, int, int]]
    chunks: list[tuple[int, int, int, int, int]]
    numel: int


def _product(table: MatrixTable, to_p: bool) -> Product:
    cut, strips, chunks, start = table.tiling, [], [], 0
    tile, wanted = (cut.columns, cut.strip_columns) if to_p else (cut.rows, cut.strip_rows)
    block, offsets = (cut.rows, table.p.offsets) if to_p else (cut.columns, table.q.offsets)
    for i, m in enumerate(table.matrices):
        # A strip cuts the length that the product sums over, into whole tiles, as nearly equal as these allow.
        along, across = (m.rows, m.columns) if to_p else (m.columns, m.rows)
        strip = -(-across // (min(-(-across // wanted), MAX_STRIPS) * tile)) * tile
        size, begins = m.rank * along, range(0, across, strip)
        strips += [
            (i, first, begin, min(begin + strip, across), start + k * size)
            for first in range(0, along, block)
            for k, begin in enumerate(begins)
        ]
        chunks += [(first, size, len(begins), start, offsets[i]) for first in range(0, size, SUM_NUMEL)]
        start += len(begins) * size
    return Product(strips, chunks, start)


class Uncompressed(NamedTuple):
    """The gradients of a bucket that are sent uncompressed, next to the factors."""

    table: SegmentTable  # layout of the gradients
    source: Sequence[Tensor]  # the gradients
    target: Sequence[Tensor]  # where the mean goes; may be ``source``
    wire: Tensor  # 1-D, ``table.numel`` elements of the gradients' dtype
    sent_with: FactorLayout  # the factors in the same message, P or Q: their product also writes ``wire``

    @property
    def target_table(self) -> SegmentTable:
        """The layout of the target, with addresses of its own unless the target is the source."""
        return self.table if self.target is self.source else self.table.for_results


class OwnFactor(NamedTuple):
    """This rank's summand of the factors that the last exchange of a step sums up: P or Q, called F below.

    F_own = world_size (sent - residual) is the factor of this rank's own M. Its mean over the ranks is the F that all
    of them receive.
    """

    layout: FactorLayout
    sent: Tensor  # packed, of any dtype: what the product writes on the wire. `reconstruct` subtracts the residual
    residual: Tensor | None  # packed, fp32, like ``sent``: what quantization loses of it; None: nothing
    world_size: int


class Renewal(NamedTuple):
    """The factors, P or Q, that `reconstruct` renews for the next step."""

    layout: FactorLayout
    following: Tensor  # packed factors of the next step. Overwritten
    step: Tensor  # int64, one element, on the device: number of the step, for the random columns. Modified
    advance_to: int | None  # new value of ``step``; None adds 1, as a CUDA graph must, which repeats numbers


@dataclass(eq=False)
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
        uncompressed: other gradients of the bucket, which move in the same launches; None: there are none.
        renewal: the factors to renew for the next step; None: none.
        own: what this rank adds to the last exchange; None: it is the only rank, or there is no error memory. With a
            residual, ``renewal`` is that of the same factors.
    """

    table: MatrixTable
    source: Sequence[Tensor]
    target: Sequence[Tensor]
    error: Sequence[Tensor] | None
    keep: bool
    uncompressed: Uncompressed | None = None
    renewal: Renewal | None = None
    own: OwnFactor | None = None

    @cached_property
    def addresses(self) -> list[int]:
        """The addresses of source, target and error memory: [3, matrices]."""
        # Without error feedback nothing is read at the third address, but the kernels test its alignment.
        return [each.data_ptr() for part in (self.source, self.target, self.error or self.target) for each in part]
