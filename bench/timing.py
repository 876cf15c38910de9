"""Measurements that all benches share: clocks that wait for the device, turns, memory, driver calls, other load."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

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


class Timing(NamedTuple):
    """The duration of a piece of work."""

    seconds: float  # device time, on which the work runs without a gap; on a CPU, time of the call
    host_seconds: float | None = None  # time until the call returned, with all work enqueued; None on a CPU
    # True on a GPU if the call waits for the device or enqueues more than the device's queue holds. ``seconds``
    # then include the time of the host.
    includes_host: bool = False


# Cycles for which the device spins before the work, about 1 to 64 ms, while the host enqueues the work.
SPIN_CYCLES = tuple(1 << exponent for exponent in range(21, 28))


def has_events(device: torch.device) -> bool:
    """Whether work on the device is timed between two events, and its driver calls are counted."""
    return device.type == "cuda"


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """The duration of ``work``, which is called once on a CPU, and on a GPU once or several times.

    On a GPU, two events around the call would time the host, which enqueues small kernels more slowly than they run.
    So the device first spins, and the host enqueues all work in the meantime. If the spin ends too early, the timing
    is repeated after a spin of twice the length.
    """
    if not has_events(device):
        start = time.perf_counter()
        work()
        return Timing(time.perf_counter() - start)
    for cycles in SPIN_CYCLES:
        timing = _timed_behind(cycles, work)
        if not timing.includes_host:
            return timing
    return _timed_behind(0, work)


def _timed_behind(cycles: int, work: Callable[[], object]) -> Timing:
    """The duration of ``work`` in the current stream after a spin of ``cycles``; 0 for none."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if cycles > 0:
        torch.cuda._sleep(cycles)
    begin.record()
    start = time.perf_counter()
    work()
    host_seconds = time.perf_counter() - start
    end.record()
    has_spin_ended = begin.query()
    end.synchronize()
    return Timing(1e-3 * begin.elapsed_time(end), host_seconds, has_spin_ended)


def timed_replays(work: Callable[[], object], device: torch.device, count: int) -> list[Timing]:
    """Durations of replays of ``work``, captured once in a CUDA graph; call it after a warm-up of ``work``."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # fills what is cached by stream
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    graph.replay()
    timings = [timed(graph.replay, device) for _ in range(count)]
    torch.cuda.synchronize()
    graph.reset()
    return timings


def in_turn(implementations: Sequence[T], turn: int) -> list[T]:
    """The implementations in an order drawn for this turn, the same on all ranks.

    So no implementation always runs after the same other one.
    """
    return random.Random(turn).sample(implementations, len(implementations))


def turns(steps: range, implementations: Sequence[T], title: str | None = None) -> Iterator[tuple[int, T]]:
    """Every implementation in every step, in the order of `in_turn`; with a title, a progress bar on rank 0."""
    shown: Iterable[int] = steps
    if title is not None and dist.get_rank() == 0:
        from rich.progress import track  # the GPU lane runs without rich

        shown = track(steps, description=f"{title:<24}")
    for step in shown:
        for implementation in in_turn(implementations, step):
            yield step, implementation


class Timed(Protocol):
    """A model that takes steps."""

    seconds: list[float]
    link_bytes: list[int]

    def step(self, batch: Any) -> float: ...


def time_in_turn(
    implementations: Sequence[Timed],
    steps: range,
    title: str | None,
    batch_of: Callable[[int], object],
    sent_bytes: Callable[[], int] | None = None,
    untimed: Timed | None = None,
) -> None:
    """Set the ``seconds`` of each implementation to those of interleaved steps on the slowest rank. A collective call.

    ``batch_of`` returns this rank's batch of a step. ``sent_bytes`` counts the bytes of its interface so far, for
    ``link_bytes``; barriers are included. A step of ``untimed`` precedes each timed one, so that all of them find equal
    caches. ``title`` is that of `turns`.
    """
    for implementation in implementations:
        implementation.seconds, implementation.link_bytes = [], []
    for step, implementation in turns(steps, implementations, title):
        batch = batch_of(step)
        if untimed is not None:
            untimed.step(batch)
        sent_before = sent_bytes() if sent_bytes is not None else 0
        dist.barrier()
        implementation.seconds.append(implementation.step(batch))
        dist.barrier()
        if sent_bytes is not None:
            implementation.link_bytes.append(sent_bytes() - sent_before)
    for implementation in implementations:
        implementation.seconds = slowest(implementation.seconds)


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
        import resource  # Windows has no such module

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: on Linux a child inherits its parent's.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


class DriverCalls(NamedTuple):
    launches: int  # kernels, copies and fills that were handed to the GPU
    synchronizations: int  # waits of the host for the device, a stream or an event

    @classmethod
    def among(cls, names: Iterable[str]) -> DriverCalls:
        """Count the calls among the names of a profile's events."""
        events = list(names)
        return cls(
            launches=sum(name.startswith(_LAUNCHES) for name in events),
            synchronizations=sum(name in _SYNCHRONIZATIONS for name in events),
        )


_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
_SYNCHRONIZATIONS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
_COUNTED = "gradwire: driver calls"


def driver_calls(work: Callable[[], object], device: torch.device) -> DriverCalls | None:
    """Profile ``work`` and count its driver calls; on a CPU, None, and ``work`` does not run."""
    if not has_events(device):
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(_COUNTED):
            work()
        torch.cuda.synchronize()
    # The profiler synchronizes too, outside the marked range.
    events = list(profile.events())
    marked = next(event.time_range for event in events if event.name == _COUNTED)
    counted = (event for event in events if marked.start <= event.time_range.start < marked.end)
    return DriverCalls.among(event.name for event in counted)


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
