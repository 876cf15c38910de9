"""Program tables: the integers that kernels read on the device, sent from the host without a synchronization.

A table is int64, with one row per field and one column per program, segment or matrix. `load_fields` decodes a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import jit, tl


@jit
def load_fields(
    table_ptr,  # [fields, n] int64
    n,
    column,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):
    """The fields ``FIRST`` to ``LAST - 1`` of one column, as a tuple.

    Addresses are returned as integers, not pointers: `tl.multiple_of` marks the operation that creates a pointer. A
    pointer returned from a call loses that mark, and its accesses are no longer vectorized.

    A kernel that needs fields again after a long loop loads them again, VOLATILE: the compiler cannot merge these loads
    with those before the loop, so the fields, and masks made of them, occupy no registers in the loop.
    """
    fields = tl.tuple(())
    for field in tl.static_range(FIRST, LAST):
        fields += (tl.load(table_ptr + field * n + column, volatile=VOLATILE),)
    return fields


@jit
def load_chunk(
    table_ptr,  # [FIELDS S + 2 C] int64: `SegmentTable.packed`
    n_segments,
    n_chunks,
    chunk,
    FIELDS: tl.constexpr,
):
    """The fields of a chunk's segment, the address first, and the chunk's start within it."""
    segment, start = load_fields(table_ptr + FIELDS * n_segments, n_chunks, chunk, 0, 2)
    return load_fields(table_ptr, n_segments, segment, 0, FIELDS) + (start,)  # noqa: RUF005 (Triton's tuples)


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


def check_step(step: Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless ``step`` is one number on the device."""
    if step.dtype != torch.int64 or step.numel() != 1 or step.device != device:
        raise ValueError(
            f"{name} is {step.dtype} {tuple(step.shape)} on {step.device}; expected one element of torch.int64 on "
            f"{device}. Pass torch.tensor([step], device=...)."
        )
