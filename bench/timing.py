"""Measurements that all benches share: clocks that wait for the device, memory, driver calls, background load."""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def bench_device() -> torch.device:
    """This rank's GPU, which becomes the current one; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """The backend of collectives on ``device``."""
    return "nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """The duration of ``work`` in seconds; on a GPU between two events around it in the current stream."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return 1e-3 * milliseconds


def in_turn(implementations: Sequence[T], turn: int) -> list[T]:
    """The implementations in an order drawn for this turn, the same on all ranks.

    So no implementation always runs after the same other one.
    """
    return random.Random(turn).sample(implementations, len(implementations))


def slowest(seconds: Sequence[float]) -> list[float]:
    """The maximum of each element over the ranks. A collective call."""
    largest = torch.tensor(
        seconds, dtype=torch.float64, device=bench_device() if dist.get_backend() == "nccl" else None
    )
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    values: list[float] = largest.tolist()
    return values


def peak_memory(device: torch.device) -> int:
    """Peak memory so far in bytes: on a GPU of its tensors, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: on Linux a child inherits its parent's.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


class DriverCalls(NamedTuple):
    """Calls of the GPU driver.

    Attributes:
        launches: kernels, copies and fills that were handed to the GPU.
        synchronizations: waits of the host for a stream or an event.
    """

    launches: int
    synchronizations: int

    @classmethod
    def among(cls, names: Iterable[str]) -> DriverCalls:
        """Count the calls among the names of a profile's events."""
        events = list(names)
        return cls(
            launches=sum(name.startswith(_LAUNCHES) for name in events),
            synchronizations=sum(name in _SYNCHRONIZATIONS for name in events),
        )


_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
_SYNCHRONIZATIONS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def driver_calls(work: Callable[[], object], device: torch.device) -> DriverCalls | None:
    """Profile ``work`` and count its driver calls; on a CPU, None, and ``work`` does not run."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    return DriverCalls.among(event.name for event in profile.events())


class BackgroundLoad:
    """How many CPUs other processes and other virtual machines keep busy, from construction on. Linux only."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy_cpus(self) -> float | None:
        """The number of CPUs, on average. Children of this process count as others until it has waited for them."""
        end = self._read()
        if self._start is None or end is None:
            return None
        elapsed, total, own = (after - before for before, after in zip(self._start, end, strict=True))
        return round(max(0.0, total - own) / elapsed, 2) if elapsed > 0 else None

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all processes and virtual machines together, of this process and its children."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        user, nice, system, _, _, _, _, steal = map(int, stat.read_text().split(maxsplit=9)[1:9])
        busy = user + nice + system + steal
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])
