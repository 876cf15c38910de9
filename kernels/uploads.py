"""Uploads: integers that kernels read on the device, sent from the host without a synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a CUDA graph on ``device``: work is recorded, and none of it runs yet."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # the call asks about the current device
        return torch.cuda.is_current_stream_capturing()


def pinned(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the host, pinned if ``device`` is a GPU, so that a copy to it needs no synchronisation."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on the device, sent without a synchronisation."""
    return pinned(numbers, device).to(device, non_blocking=True)


class Upload:
    """Integers on a device that keep their address when their values are replaced.

    A CUDA graph reads the source of a captured copy again at every replay, long after the host would have freed it.
    The object therefore owns the sources of captured copies. PyTorch itself keeps the sources of other copies alive
    until these are done.

    Args:
        numbers: the first values.
        device: where they go.

    Attributes:
        tensor: int64, 1-D, on the device.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self.tensor = torch.empty(len(numbers), dtype=torch.int64, device=device)
        self._captured_sources: list[Tensor] = []
        self.replace(numbers)

    def replace(self, numbers: Sequence[int]) -> None:
        """Overwrite the first ``len(numbers)`` values, in stream order."""
        source = pinned(numbers, self.tensor.device)
        if is_capturing(self.tensor.device):
            self._captured_sources.append(source)
        self.tensor[: len(numbers)].copy_(source, non_blocking=True)


class UploadCache:
    """Tables of integers on a device: each is built and uploaded at its first use, then kept."""

    def __init__(self) -> None:
        self._uploads: dict[object, Upload] = {}

    def get(self, key: object, device: torch.device, make_rows: Callable[[], Sequence[Sequence[int]]]) -> Tensor:
        """The table ``key``: int64, one row for each sequence of ``make_rows()``, which is called at the first use."""
        if (key, device) not in self._uploads:
            rows = make_rows()
            table = Upload([number for row in rows for number in row], device)
            table.tensor = table.tensor.view(len(rows), -1)
            self._uploads[key, device] = table
        return self._uploads[key, device].tensor
