"""Segment tables: where the elements of many tensors lie, in memory and in one flat wire buffer.

A kernel reads one packed int64 table per bucket instead of one argument per tensor:

    addresses[S] | lengths[S] | offsets[S] | chunk_segment[C] | chunk_start[C]

for S tensors (segments), cut into C chunks of at most ``CHUNK_NUMEL`` elements. One program handles one chunk, which
`load_chunk` decodes. The table is uploaded once; the addresses are uploaded again only after one of them has changed.
A block table has other rows in place of the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.layouts import WIRE_DTYPES, compute_dtype, is_dense, layout_guard, real_numel
from gradwire.kernels.uploads import Upload

# Elements per program. 4096 with 8 warps is 16 elements a thread: four 16-byte loads of fp32 in flight, and 64 KiB of
# fp32 for the 4 programs of a multiprocessor. Smaller chunks do not shorten the last wave: more
# programs are resident at once.
CHUNK_NUMEL = 4096
# Elements that the CPU paths handle at once: 1 MiB of fp32 scratch, which stays in cache.
CPU_BLOCK_NUMEL = 1 << 18


class Run(NamedTuple):
    """The elements that a CPU path handles at once: several whole tensors, or a slice of a large one."""

    first: int  # index of the first tensor
    last: int  # one past the index of the last tensor
    start: int  # the first element, or block, of all tensors
    stop: int  # one past the last
    is_slice: bool


def cut_runs(sizes: Sequence[int], room: int) -> list[Run]:
    """Cut tensors, of ``sizes`` elements or blocks, into runs of 1 to ``room``, in order; empty tensors start none."""
    runs: list[Run] = []
    for i, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        start = stop - size
        if size > room:
            runs += [Run(i, i + 1, at, min(at + room, stop), True) for at in range(start, stop, room)]
        elif runs and not runs[-1].is_slice and stop - runs[-1].start <= room:
            runs[-1] = runs[-1]._replace(last=i + 1, stop=stop)
        elif size > 0:
            runs.append(Run(i, i + 1, start, stop, False))
    return runs


class SegmentTable:
    """The layout of a list of tensors in a flat wire buffer: packed, in list order, each in its own memory order.

    Tensor ``i`` has ``lengths[i]`` real elements (a complex element counts twice) and occupies the wire elements
    ``offsets[i] : offsets[i] + lengths[i]``. The wire has ``numel`` elements and no padding, because the order in which
    a collective sums an element may depend on its offset: equal offsets, equal bits.

    A table serves every list of tensors with the shapes, strides, dtype and device that it was built from, on one
    stream.

    Args:
        tensors: the list to describe. Only their layouts are kept.
        fields: rows of the packed table between the lengths and the chunks; None: the offsets.

    Attributes:
        source_dtype: dtype of the tensors; ``dtype``: dtype of their real elements.
        compute: dtype of the arithmetic of `flatten`.
        runs: element ranges that the CPU paths process at once, in wire order.
        n_chunks: number of programs of a kernel.
        kernels: the operations on its device, which `gradwire.kernels.flatten_kernels` chooses.
        scratch: memory of the CPU paths in one dtype, run by run, which `gradwire.kernels.flatten` makes.

    Raises:
        ValueError: the list is empty; dtypes or devices differ; a tensor is not floating point or complex, is sparse,
            has gaps or overlaps in memory, or is a lazy conjugate or negative view.
    """

    def __init__(self, tensors: Sequence[Tensor], fields: Sequence[Sequence[int]] | None = None) -> None:
        if not tensors:
            raise ValueError("A segment table needs at least one tensor; got an empty list.")
        first = tensors[0]
        self.device = first.device
        self.source_dtype = first.dtype
        self.is_complex = first.is_complex()
        self.dtype = first.dtype.to_real()
        self.compute = compute_dtype(self.dtype)
        for i, tensor in enumerate(tensors):
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise ValueError(
                    f"Tensor {i} is {tensor.dtype} on {tensor.device}, tensor 0 is {first.dtype} on {first.device}; "
                    "one table takes one dtype and one device. Use a table for each."
                )
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(f"Tensor {i} is {tensor.dtype}; expected a floating-point or complex dtype.")
            if tensor.layout != torch.strided or not is_dense(tensor.shape, tensor.stride()):
                raise ValueError(
                    f"Tensor {i} of shape {tuple(tensor.shape)} is {tensor.layout} or has gaps or overlaps in memory; "
                    "expected a dense strided tensor. Pass tensor.contiguous()."
                )
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError(_lazy_view(i))
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        self.lengths = list(map(real_numel, tensors))
        self.offsets = [0, *accumulate(self.lengths)][:-1]
        self.numel = sum(self.lengths)
        self.runs = cut_runs(self.lengths, CPU_BLOCK_NUMEL)
        self.n_chunks = sum(-(-length // CHUNK_NUMEL) for length in self.lengths)
        self._fields = [self.offsets] if fields is None else fields
        self._guard: Callable[..., bool] | None = None  # `layout_guard` of the first list that was checked
        self._packed: Upload | None = None
        self._views: tuple[int, torch.dtype, list[Tensor]] | None = None  # address and dtype of the wire, its views
        self.kernels: Any = None
        self.scratch: tuple[torch.dtype | None, list[tuple[Run, Tensor, list[Tensor]]]] = (None, [])

    def __len__(self) -> int:
        return len(self.lengths)

    def check_wire(self, wire: Tensor) -> None:
        """Raise ValueError unless ``wire`` fits the table, and has a wire dtype."""
        if wire.dtype not in WIRE_DTYPES:
            raise ValueError(f"The wire is {wire.dtype}; expected one of {', '.join(map(str, WIRE_DTYPES))}.")
        if wire.dim() != 1 or wire.numel() != self.numel or not wire.is_contiguous() or wire.device != self.device:
            raise ValueError(
                f"The wire buffer is {tuple(wire.shape)} on {wire.device}; expected a contiguous 1-D tensor of "
                f"{self.numel} elements on {self.device}."
            )

    def check_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless ``tensors`` fit the table."""
        if len(tensors) != len(self.lengths):
            raise ValueError(f"Got {len(tensors)} tensors for a table of {len(self)}.")
        if self._guard is not None and self._guard(*tensors):  # 0.05 us a tensor; the loop below takes 0.25
            return
        for i, tensor in enumerate(tensors):
            if tensor.shape != self.shapes[i] or tensor.dtype != self.source_dtype or tensor.device != self.device:
                raise ValueError(
                    f"Tensor {i} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; its table was built for "
                    f"{self.source_dtype} {tuple(self.shapes[i])} on {self.device}. Build a new table."
                )
            if tensor.stride() != self.strides[i] and tensor.numel() > 0:
                raise ValueError(
                    f"Tensor {i} has strides {tensor.stride()}; its table was built for {self.strides[i]}. "
                    "Copy it into that layout, or build a new table."
                )
            if tensor.is_conj() or tensor.is_neg():
                raise ValueError(_lazy_view(i))
        self._guard = self._guard or layout_guard(tensors)

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """The packed int64 table on the device, with the addresses of ``tensors``, which must fit."""
        addresses = list(map(Tensor.data_ptr, tensors))
        if self._packed is None:
            starts = [range(0, length, CHUNK_NUMEL) for length in self.lengths]
            chunk_segments = [i for i, segment_starts in enumerate(starts) for _ in segment_starts]
            self._packed = Upload(self.device, addresses, chain(self.lengths, *self._fields, chunk_segments, *starts))
        return self._packed.replace(addresses)

    @cached_property
    def for_results(self) -> SegmentTable:
        """A table of the same layout, for results that are not the gradients: it has its own addresses on the device.

        One table for both would be uploaded twice in each step. A CUDA graph would even repeat the upload of old
        addresses.
        """
        table = copy(self)
        table._packed, table._views = None, None
        return table

    def packed_results(self, tensors: Sequence[Tensor]) -> Tensor:
        """`packed` for the results of a step: the same table if they are its gradients, else that of `for_results`."""
        if self._packed is not None and self._packed.numbers == list(map(Tensor.data_ptr, tensors)):
            return self._packed.tensor
        return self.for_results.packed(tensors)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the packed tables, if they are freed, until the work now on ``stream`` has read them."""
        for table in (self, self.for_results):
            if table._packed is not None:
                table._packed.tensor.record_stream(stream)

    def views(self, wire: Tensor) -> list[Tensor]:
        """Views of ``wire`` in the layouts of the tensors, complex ones as in `as_real`.

        The last result is cached, unless there is one tensor: its wire may be the buffer of a model.
        """
        if len(self.offsets) == 1:
            return [self.view(0, wire, 0)]
        if self._views is None or self._views[:2] != (wire.data_ptr(), wire.dtype):
            views = [self.view(i, wire, offset) for i, offset in enumerate(self.offsets)]
            self._views = (wire.data_ptr(), wire.dtype, views)
        return self._views[2]

    def view(self, index: int, flat: Tensor, start: int) -> Tensor:
        """The elements of ``flat`` from ``start`` on, in the layout of one tensor, a complex one as in `as_real`."""
        shape, stride = tuple(self.shapes[index]), self.strides[index]
        if self.is_complex:
            shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
        return flat[start : start + self.lengths[index]].as_strided(shape, stride)

    def real(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`as_real` of each tensor."""
        return [torch.view_as_real(tensor) for tensor in tensors] if self.is_complex else list(tensors)


def _lazy_view(index: int) -> str:
    return f"Tensor {index} is a lazy conjugate or negative view. Pass resolve_conj().resolve_neg()."
