"""Segment tables: where the elements of many tensors lie, in memory and in one flat wire buffer. Moving them there:

    flatten      wire[offsets[i] + j] = cast(clamp(g_i[j] * scale, -limit, limit))
    unflatten    g_i[j] = cast(wire[offsets[i] + j] * scale)
                 absmax = max(absmax, max_ij |g_i[j]|)                   optional; NaN if an element is NaN

Each operation is one launch for the whole bucket. Arithmetic is in fp32, or in fp64 if the
gradients are fp64 (for `unflatten`: if the gradients or the wire are). fp64 is rounded to fp32 on
its way to 16 bits, as in PyTorch.

A finite element saturates at ``limit``, but at the largest finite value of the wire dtype at the latest; inf and NaN
pass through. The maximum needs no float atomics: the bits of non-negative fp32 numbers, read as integers, sort like the
numbers, followed by inf and NaN.

Traffic for N elements, with s bytes per gradient element and w bytes per wire element: (s + w) N bytes each way.

Program tables tell a kernel's programs what to work on. They are int64, with one row per field and one column per
program, segment or matrix. `load_fields` decodes a column. Tables are sent from the host without a synchronization.

A kernel reads one packed int64 table per bucket instead of one argument per tensor:

    addresses[S] | lengths[S] | offsets[S] | chunk_segment[C] | chunk_start[C]

for S tensors (segments), cut into C chunks of at most ``CHUNK_NUMEL`` elements. One program handles one chunk, which
`load_chunk` decodes. The table is uploaded once; the addresses are uploaded again only after one of them has changed.
A block table has other rows in place of the offsets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._dynamo import guards

from gradwire.kernels.dispatch import WIRE_DTYPES, choose, compute_dtype, narrow_reference
from gradwire.kernels.launch import is_recording

# Elements per program. 4096 with 8 warps is 16 elements a thread: four 16-byte loads of fp32 in flight, and 64 KiB of
# fp32 for the 4 programs of a multiprocessor. Smaller programs make no smaller waves: more of them run at once.
CHUNK_NUMEL = 4096
# Elements that the CPU paths handle at once: 1 MiB of fp32 scratch, which stays in cache.
CPU_BLOCK_NUMEL = 1 << 18
LARGEST = {dtype: torch.finfo(dtype).max for dtype in WIRE_DTYPES}


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
    """Whether this thread is capturing a CUDA graph on ``device``, or records launches: later steps repeat its work."""
    if is_recording():
        return True
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):  # the call asks about the current device
        return torch.cuda.is_current_stream_capturing()


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the host, pinned if ``device`` is a GPU, so that a copy to it needs no synchronization."""
    tensor = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    (ctypes.c_int64 * len(numbers)).from_address(tensor.data_ptr())[:] = list(
        numbers
    )  # `torch.tensor` takes 3 times as long
    return tensor


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
        self._first = self.tensor[: len(numbers)]
        self._captured_sources: list[Tensor] = []
        self._write(self.tensor, everything)

    def replace(self, numbers: Sequence[int]) -> Tensor:
        """Overwrite the first numbers in stream order, unless they are the same. Returns ``tensor``."""
        if numbers is not self.numbers and numbers != self.numbers:
            self._write(self._first, numbers)
        self.numbers = numbers
        return self.tensor

    def _write(self, target: Tensor, numbers: Sequence[int]) -> None:
        # The allocator of pinned memory reuses it once the copy is done.
        source = pinned(numbers, target.device)
        if is_capturing(target.device):
            self._captured_sources.append(source)
        target.copy_(source, non_blocking=True)


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


class SegmentKernels(NamedTuple):
    """The operations on one device. They have the arguments of the references, and check nothing."""

    flatten: Callable[..., None]
    unflatten: Callable[..., None]


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
        compute: dtype of the arithmetic of `flatten`.
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
        self._blocks: tuple[torch.dtype | None, list[tuple[Run, Tensor, list[Tensor]]]] = (None, [])  # of `blocks`

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def kernels(self) -> SegmentKernels:
        """The operations on the table's device: Triton, CPU code or references, chosen at the first use."""
        return SegmentKernels(
            choose(self.device, "flatten_triton", flatten_cpu, flatten_reference),
            choose(self.device, "flatten_triton", unflatten_cpu, unflatten_reference),
        )

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
            self._packed = Upload(self.device, addresses, chain(*self.fields, chunk_segments, *starts))
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

    def blocks(self, dtype: torch.dtype) -> list[tuple[Run, Tensor, list[Tensor]]]:
        """For each run with elements, uninitialized scratch in ``dtype``, 1-D, and its views: in the shapes of the
        tensors, or for a slice the scratch itself. The last result is cached.
        """
        # Views are made once: for many small tensors they cost more than the copies.
        if self._blocks[0] != dtype:
            numel = max(run.stop - run.start for run in self.runs)
            scratch, blocks = torch.empty(numel, dtype=dtype, device=self.device), []
            for run in self.runs:
                x = scratch[: run.stop - run.start]
                whole = range(run.first, 0 if run.is_slice else run.last)
                views = [self.view(i, scratch, self.offsets[i] - run.start) for i in whole]
                if x.numel() > 0:
                    blocks.append((run, x, views or [x]))
            self._blocks = (dtype, blocks)
        return self._blocks[1]

    def piece(self, run: Run, tensor: Tensor) -> Tensor:
        """The slice that ``run`` is of its tensor, 1-D."""
        begin = run.start - self.offsets[run.first]
        return memory_order(tensor)[begin : begin + run.stop - run.start]


def check_step(step: Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless ``step`` is one number on the device."""
    if step.dtype != torch.int64 or step.numel() != 1 or step.device != device:
        raise ValueError(
            f"{name} is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of torch.int64 on "
            f"{device}. Pass torch.tensor([step], device=...)."
        )


def flatten_reference(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> None:
    """`flatten` in plain PyTorch, tensor by tensor."""
    limit = min(limit, LARGEST[out.dtype], LARGEST[table.compute])
    for tensor, wire in zip(tensors, torch.split(out, table.lengths), strict=True):
        saturating_cast(memory_order(tensor).to(table.compute), wire, scale, limit, counters)


def unflatten_reference(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    """`unflatten` in plain PyTorch, tensor by tensor."""
    compute = compute_dtype(wire.dtype, table.dtype)
    multiplier = torch.as_tensor(scale, dtype=compute, device=wire.device)
    for tensor, segment in zip(tensors, torch.split(wire, table.lengths), strict=True):
        result = memory_order(tensor)
        result.copy_(narrow_reference(segment.to(compute) * multiplier, table.dtype))
        if absmax is not None and result.numel() > 0:
            absmax.copy_(torch.maximum(absmax, result.abs().max().float()))


def saturating_cast(x: Tensor, out: Tensor, scale: float | Tensor, limit: float, counters: Tensor | None) -> None:
    """``out = cast(clamp(x * scale, -limit, limit))``, where inf and NaN pass through; arguments as in `flatten`."""
    scaled = x * torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    is_finite = x.isfinite()
    clamped = torch.where(is_finite, scaled.clamp(-limit, limit), scaled)
    out.copy_(narrow_reference(clamped, out.dtype))
    if counters is not None:
        counters[0] += (~is_finite).sum()
        counters[1] += (is_finite & (scaled.abs() > limit)).sum()


def flatten_cpu(
    tensors: Sequence[Tensor],
    table: SegmentTable,
    out: Tensor,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> None:
    """`flatten` on a CPU."""
    if table.is_complex:
        tensors = table.real(tensors)
    scale, limit = float(scale), min(limit, LARGEST[out.dtype], LARGEST[table.compute])
    # Finite elements that do not grow, in their own dtype, cannot saturate: no need to look at them.
    if table.dtype == out.dtype and counters is None and abs(scale) <= 1 and limit == LARGEST[out.dtype]:
        _scale(tensors, table, out, scale)
        return
    multiplier = torch.tensor(scale, dtype=table.compute, device=out.device)  # made once, not in each `mul`
    for run, x, views in table.blocks(table.compute):
        members = [table.piece(run, tensors[run.first])] if run.is_slice else list(tensors[run.first : run.last])
        if run.is_slice and table.dtype == table.compute:  # one pass less
            torch.mul(members[0], multiplier, out=x)
        else:
            torch._foreach_copy_(views, members)
            x.mul_(multiplier)
        wire = out[run.start : run.stop]
        # Optimistic: saturation is rare, and its exact treatment takes several more passes.
        if _all_within(x, limit):
            wire.copy_(x if x.dtype == wire.dtype else x.float())
        else:
            torch._foreach_copy_(views, members)
            saturating_cast(x, wire, scale, limit, counters)


def _all_within(x: Tensor, limit: float) -> bool:
    """Whether all of ``x`` is finite and within ``limit``."""
    # The sum of squares bounds the largest magnitude at a third of the cost of finding it, unless squares underflow.
    if limit > 1e-15 and torch.dot(x, x).item() < 0.5 * limit * limit:
        return True
    low, high = torch.aminmax(x)
    return -limit <= low.item() and high.item() <= limit


def _scale(tensors: Sequence[Tensor], table: SegmentTable, out: Tensor, scale: float) -> None:
    """`flatten` to the tensors' own dtype where nothing can saturate: large ones in one pass, small ones together."""
    views = table.views(out)
    for run in table.runs:
        if not run.is_slice:
            torch._foreach_copy_(views[run.first : run.last], list(tensors[run.first : run.last]))
            out[run.start : run.stop].mul_(scale)
        elif run.start == table.offsets[run.first]:  # the first slice: all slices of the tensor at once
            stop = run.start + table.lengths[run.first]
            torch.mul(memory_order(tensors[run.first]), scale, out=out[run.start : stop])


def unflatten_cpu(
    wire: Tensor, tensors: Sequence[Tensor], table: SegmentTable, scale: float | Tensor, absmax: Tensor | None
) -> None:
    """`unflatten` on a CPU."""
    if table.is_complex:
        tensors = table.real(tensors)
    scale = float(scale)
    if scale == 1 and absmax is None:  # a copy casts by itself
        torch._foreach_copy_(list(tensors), table.views(wire))
        return
    for run, x, views in table.blocks(compute_dtype(wire.dtype, table.dtype)):
        x.copy_(wire[run.start : run.stop]).mul_(scale)
        members = [table.piece(run, tensors[run.first])] if run.is_slice else list(tensors[run.first : run.last])
        torch._foreach_copy_(members, views)
        if absmax is not None:
            low, high = torch.aminmax(x)
            # Rounding is monotonic, so this is the maximum of the rounded elements.
            largest = torch.maximum(-low, high).to(table.dtype)
            absmax.copy_(torch.maximum(absmax, largest.float()))


def flatten(
    tensors: Sequence[Tensor],
    out: Tensor,
    *,
    table: SegmentTable | None = None,
    scale: float | Tensor = 1.0,
    limit: float = inf,
    counters: Tensor | None = None,
) -> Tensor:
    """Write ``cast(clamp(tensor * scale, -limit, limit))`` of every tensor into its segment of ``out``.

    A bucket that is flat already is a list of one tensor; ``out`` may then be that tensor itself, scaled in place.
    One launch.

    Args:
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, read as real pairs) on one device.
        out: the wire, 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64. Overwritten.
        table: the layout. Build it once for a list that recurs; by default it is built for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronization.
        limit: the largest magnitude of a finite element on the wire, unless that of the wire dtype is lower.
        counters: int64, [2]: the numbers of non-finite and of saturated elements are added.

    Returns:
        ``out``.

    Raises:
        ValueError: the tensors or ``out`` do not fit the table, or ``out`` has another dtype than those named.
    """
    table = SegmentTable(tensors) if table is None else table
    table.check_wire(out)
    table.check_tensors(tensors)
    table.kernels.flatten(tensors, table, out, scale, limit, counters)
    return out


def unflatten(
    wire: Tensor,
    tensors: Sequence[Tensor],
    *,
    table: SegmentTable | None = None,
    scale: float | Tensor = 1.0,
    absmax: Tensor | None = None,
) -> None:
    """Write ``cast(wire * scale)`` of every segment of ``wire`` into its tensor, in place.

    One launch.

    Args:
        wire: 1-D, contiguous, ``table.numel`` elements of fp32, fp16, bf16 or fp64.
        tensors: dense tensors of one dtype (fp32, fp16, bf16, fp64, or complex, written as real pairs). Overwritten.
        table: the layout. Build it once for a list that recurs; by default it is built for this call.
        scale: a number, or a one-element fp32 tensor on the device, which is read there without a synchronization.
        absmax: fp32, [1]: raised to the largest magnitude written, as stored; NaN if a NaN was written.

    Raises:
        ValueError: the tensors or ``wire`` do not fit the table, or ``wire`` has another dtype than those named.
    """
    table = SegmentTable(tensors) if table is None else table
    table.check_wire(wire)
    table.check_tensors(tensors)
    table.kernels.unflatten(wire, tensors, table, scale, absmax)
