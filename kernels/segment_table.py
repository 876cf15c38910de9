"""Program tables, which tell a kernel's programs what to work on, and segment tables, the tensors of a bucket.

A program table is int64, with one row per field and one column per program, segment or matrix. `load_fields` decodes a
column. Tables are sent from the host without a synchronization.

A segment table tells where the elements of many tensors lie, in memory and in one flat wire buffer.

A kernel reads one packed int64 table per bucket instead of one argument per tensor:

    addresses[S] | lengths[S] | offsets[S] | chunk_segment[C] | chunk_start[C]

for S tensors (segments), cut into C chunks of at most ``CHUNK_NUMEL`` elements. One program handles one chunk, which
`load_chunk` decodes. The table is uploaded once; the addresses are uploaded again only after one of them has changed.
A block table has other rows in place of the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._dynamo import guards

from gradwire.kernels.dispatch import WIRE_DTYPES

# Elements per program. 4096 with 8 warps is 16 elements a thread: four 16-byte loads of fp32 in flight, and 64 KiB of
# fp32 for the 4 programs of a multiprocessor. Smaller programs make no smaller waves: more of them run at once.
CHUNK_NUMEL = 4096
# Elements that the CPU paths handle at once: 1 MiB of fp32 scratch, which stays in cache.
CPU_BLOCK_NUMEL = 1 << 18


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one as real pairs in a new last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def memory_order(tensor: Tensor) -> Tensor:
    """The 1-D real view of a dense tensor's elements in the order of its memory; complex numbers become pairs."""
    tensor = as_real(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def gradient_layout(parameter: Tensor) -> Tensor:
    """A tensor in the layout that autograd gives the gradient: the parameter's own if dense, else row-major."""
    if is_dense(parameter.shape, parameter.stride()):
        return parameter.detach()
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def layout_in_dtype(layout: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the shape, strides and device of ``layout``, in ``dtype``; ``layout`` itself if it has it."""
    if layout.dtype == dtype:
        return layout
    return torch.empty_strided(layout.shape, layout.stride(), dtype=dtype, device=layout.device)


def _lazy_view(index: int) -> str:
    return f"Tensor {index} is a lazy conjugate or negative view. Pass resolve_conj().resolve_neg()."


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that compares as many tensors with ``tensors`` at once, in C++.

    True: each has the shape, strides, dtype, device, memory format and lazy conjugation of its counterpart. False is
    inconclusive: the Python type and ``requires_grad`` are compared, too.

    It is the check by which TorchDynamo decides whether compiled code fits its inputs. It keeps no tensor alive.
    """
    make: Any = guards.TensorGuards  # a private name of PyTorch; the stub lacks the tensors
    return cast("Callable[..., bool]", make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check)


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a CUDA graph on ``device``: work is recorded, and none of it runs yet."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):  # the call asks about the current device
        return torch.cuda.is_current_stream_capturing()


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the host, pinned if ``device`` is a GPU, so that a copy to it needs no synchronization."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the device, sent without a synchronization."""
    return pinned(numbers, device).to(device, non_blocking=True)


class Upload:
    """Integers on a device that keep their address when the first of them are replaced.

    A CUDA graph reads the source of a captured copy again at every replay, long after the host would have freed it.
    The object therefore owns the sources of captured copies. PyTorch itself keeps the sources of other copies alive
    until these are done.

    Attributes:
        numbers: the first of them, as uploaded.
        tensor: all of them, int64, 1-D, on the device.
    """

    def __init__(self, device: torch.device, numbers: Sequence[int], rest: Iterable[int] = ()) -> None:
        self.numbers = numbers
        everything = [*numbers, *rest]
        self.tensor = torch.empty(len(everything), dtype=torch.int64, device=device)
        self._captured_sources: list[Tensor] = []
        self._write(everything)

    def replace(self, numbers: Sequence[int]) -> Tensor:
        """Overwrite the first numbers in stream order, unless they are the same. Returns ``tensor``."""
        if numbers is not self.numbers and numbers != self.numbers:
            self._write(numbers)
        self.numbers = numbers
        return self.tensor

    def _write(self, numbers: Sequence[int]) -> None:
        source = pinned(numbers, self.tensor.device)
        if is_capturing(self.tensor.device):
            self._captured_sources.append(source)
        self.tensor[: len(numbers)].copy_(source, non_blocking=True)


class ProgramTables:
    """Program tables on a device: each is built and uploaded at its first use, then kept."""

    def __init__(self) -> None:
        self._uploads: dict[object, tuple[Upload, Tensor]] = {}

    def get(self, key: object, device: torch.device, columns: Callable[[], Iterable[Sequence[int]]]) -> Tensor:
        """The table ``key``, int64 [fields, columns]. ``columns()``, called at the first use, yields its columns."""
        if (key, device) not in self._uploads:
            rows = list(zip(*columns(), strict=True))
            upload = Upload(device, [number for row in rows for number in row])
            self._uploads[key, device] = upload, upload.tensor.view(len(rows), -1)
        return self._uploads[key, device][1]


class Run(NamedTuple):
    """The elements that a CPU path handles at once: several whole tensors, or a slice of a large one."""

    first: int  # index of the first tensor
    last: int  # one past the index of the last tensor
    start: int  # the first element, or block, of all tensors
    stop: int  # one past the last
    is_slice: bool


def cut_runs(sizes: Sequence[int], room: int) -> list[Run]:
    """Cut tensors, of ``sizes`` elements or blocks, into runs of at most ``room``, in order."""
    runs: list[Run] = []
    for i, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        start = stop - size
        if size > room:
            runs += [Run(i, i + 1, at, min(at + room, stop), True) for at in range(start, stop, room)]
        elif runs and not runs[-1].is_slice and stop - runs[-1].start <= room:
            runs[-1] = runs[-1]._replace(last=i + 1, stop=stop)
        else:
            runs.append(Run(i, i + 1, start, stop, False))
    return runs


class Fitting(tuple[Tensor, ...]):
    """Tensors that are known to fit a table, whose `SegmentTable.check` then skips them.

    Args:
        tensors: tensors with the shapes, strides, dtype and device of the table. Not checked.
        table: the table that they fit.
    """

    table: SegmentTable

    def __new__(cls, tensors: Iterable[Tensor], table: SegmentTable) -> Fitting:
        """A tuple of the tensors, with the table as an attribute."""
        fitting = super().__new__(cls, tensors)
        fitting.table = table
        return fitting


class SegmentTable:
    """The layout of a list of tensors in a flat wire buffer: packed, in list order, each in its own memory order.

    Tensor ``i`` has ``lengths[i]`` real elements (a complex element counts twice) and occupies the wire elements
    ``offsets[i] : offsets[i] + lengths[i]``. The wire has ``numel`` elements and no padding, because the order in which
    a collective sums an element may depend on its offset: equal offsets, equal bits.

    A table serves every list of tensors with the shapes, strides, dtype and device that it was built from, on one
    stream.

    Args:
        tensors: the list to describe. Only their layouts are kept.

    Attributes:
        source_dtype: dtype of the tensors; ``dtype``: dtype of their real elements.
        runs: element ranges that the CPU paths process at once, in wire order.
        n_chunks: number of programs of a kernel.
        fields: rows of the packed table between the addresses and the chunks.

    Raises:
        ValueError: the list is empty; dtypes or devices differ; a tensor is not floating point or complex, is sparse,
            has gaps or overlaps in memory, or is a lazy conjugate or negative view.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            raise ValueError("A segment table needs at least one tensor; got an empty list.")
        first = tensors[0]
        self.device = first.device
        self.source_dtype = first.dtype
        self.is_complex = first.is_complex()
        self.dtype = first.dtype.to_real()
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
        pair = 2 if self.is_complex else 1
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        self.lengths = [tensor.numel() * pair for tensor in tensors]
        self.offsets = [0, *accumulate(self.lengths)][:-1]
        self.numel = sum(self.lengths)
        self.runs = cut_runs(self.lengths, CPU_BLOCK_NUMEL)
        self.n_chunks = sum(-(-length // CHUNK_NUMEL) for length in self.lengths)
        self.fields = [self.lengths, self.offsets]
        self._guard: Callable[..., bool] | None = None  # `layout_guard` of the first list that was checked
        self._packed: Upload | None = None
        self._views: tuple[int, torch.dtype, list[Tensor]] | None = None  # address and dtype of the wire, its views
        self._scratch: Tensor | None = None
        self._scratch_views: list[list[Tensor]] = []  # views of each run; empty for a slice

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, tensors: Sequence[Tensor], wire: Tensor) -> None:
        """Raise ValueError unless ``tensors`` and ``wire`` fit the table, and ``wire`` has a wire dtype."""
        if wire.dtype not in WIRE_DTYPES:
            raise ValueError(f"The wire is {wire.dtype}; expected one of {', '.join(map(str, WIRE_DTYPES))}.")
        if wire.dim() != 1 or wire.numel() != self.numel or not wire.is_contiguous() or wire.device != self.device:
            raise ValueError(
                f"The wire buffer is {tuple(wire.shape)} on {wire.device}; expected a contiguous 1-D tensor of "
                f"{self.numel} elements on {self.device}."
            )
        self.check_tensors(tensors)

    def check_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless ``tensors`` fit the table."""
        if isinstance(tensors, Fitting) and tensors.table is self:
            return
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
            self._packed = Upload(self.device, addresses, chain(*self.fields, chunk_segments, *starts))
        return self._packed.replace(addresses)

    @cached_property
    def for_results(self) -> SegmentTable:
        """A table of the same layout, for results that are not the gradients: it has its own addresses on the device.

        One table for both would be uploaded twice in each step. A CUDA graph would even repeat the upload of old
        addresses.
        """
        table = copy(self)
        table._packed, table._views, table._scratch, table._scratch_views = None, None, None, []
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
        """Views of ``wire`` in the layouts of the tensors, complex ones as in `as_real`. The last result is cached."""
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

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """An uninitialized 1-D buffer in ``dtype``, as long as the longest run. The last result is cached."""
        # Views are made once: for many small tensors they cost more than the copies.
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = torch.empty(max(run.stop - run.start for run in self.runs), dtype=dtype, device=self.device)
            self._scratch_views = [
                [
                    self.view(i, self._scratch, self.offsets[i] - run.start)
                    for i in range(run.first, 0 if run.is_slice else run.last)
                ]
                for run in self.runs
            ]
        return self._scratch

    def run_tensors(self, index: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors, or the slice, of run ``index``, and views of the scratch in the same shapes."""
        run = self.runs[index]
        if not run.is_slice:
            return self.real(tensors[run.first : run.last]), self._scratch_views[index]
        assert self._scratch is not None
        begin, length = run.start - self.offsets[run.first], run.stop - run.start
        return [memory_order(tensors[run.first])[begin : begin + length]], [self._scratch[:length]]


def check_step(step: Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless ``step`` is one number on the device."""
    if step.dtype != torch.int64 or step.numel() != 1 or step.device != device:
        raise ValueError(
            f"{name} is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of torch.int64 on "
            f"{device}. Pass torch.tensor([step], device=...)."
        )
