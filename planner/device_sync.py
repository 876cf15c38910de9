"""Waiting for a device, and keeping it busy while the host enqueues."""

from __future__ import annotations

import torch

# Before small kernels are timed, the GPU spins for a few milliseconds while the host enqueues them. So the times
# contain no gaps in which the GPU waits for the host.
SPIN_CYCLES = 1 << 24


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spin(device: torch.device) -> None:
    """Make a GPU spin before the work that is enqueued next; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(SPIN_CYCLES)
