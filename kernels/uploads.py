"""Uploads: integers that kernels read on the device, such as tables of addresses, sent without a synchronization."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.launch import is_recording


def is_capturing(device: torch.device) -> bool:
    """Whether this thread captures a CUDA graph on ``device``, or records launches: later steps repeat its work."""
    if is_recording():
        return True
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):
        return captures_graph(device)


def captures_graph(device: torch.device) -> bool:
    """Whether this thread captures a CUDA graph. ``device`` is the current one."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the host, pinned if ``device`` is a GPU, so that a copy to it needs no synchronization."""
    tensor = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    # `torch.tensor` takes the host twice as long.
    (ctypes.c_int64 * len(numbers)).from_address(tensor.data_ptr())[:] = list(numbers)
    return tensor


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the device, sent without a synchronization."""
    return pinned(numbers, device).to(device, non_blocking=True)


class Upload:
    """Integers on a device that keep their address when the first of them are replaced.

    Steps with other numbers may run before each replay of a CUDA graph, so each graph has its own copy of the numbers
    that its kernels read. It reads the source of that copy again at every replay, long after the host would have freed
    it. The object therefore owns the sources of captured copies. PyTorch itself keeps the sources of other copies alive
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
        """Overwrite the first numbers in stream order, unless the device has them. Returns ``tensor``.

        The device is the current one. Each step passes a list of its own, to all its kernels or to each.
        """
        if numbers is self.numbers:
            return self.tensor
        # Each graph copies them itself. From then on, a replay overwrites them without the host's knowledge; but before
        # a step is recorded, whose launches must not include a copy, they were replaced.
        may_differ = not is_recording() if self._captured_sources else captures_graph(self.tensor.device)
        if may_differ or numbers != self.numbers:
            self._write(self._first, numbers)
        self.numbers = numbers
        return self.tensor

    def _write(self, target: Tensor, numbers: Sequence[int]) -> None:
        source = pinned(numbers, target.device)
        if captures_graph(target.device):
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
