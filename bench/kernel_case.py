"""`KernelCase`: a kernel and other implementations on one bucket of a model; its check, and interleaved timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import torch

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.shapes import Shape
from gradwire.bench.timing import Timing, in_turn, timed

WARM_UP = 2


@dataclass(frozen=True)
class KernelCase:
    """A kernel on one bucket. Outputs hold NaN at first, because fresh memory may hold another case's right result."""

    kernel: str  # name and options of the kernel
    nbytes: float  # bytes that gradwire's kernel reads and writes
    implementations: dict[str, Callable[[], object]]  # calls by name, gradwire's first
    check: Callable[[], None]  # raises AssertionError if gradwire's result is wrong; call it after a run


Maker = Callable[[Sequence[Shape], torch.device], KernelCase]


def copy_bandwidth(device: torch.device, numel: int = 16 << 20) -> float:
    """GB/s of ``copy_``, reads and writes counted, of ``numel`` fp32 elements that no cache holds."""
    pairs = [torch.ones(2, numel, device=device) for _ in range(4)]
    seconds = [timed(partial(pair[1].copy_, pair[0]), device).seconds for _ in range(5) for pair in pairs]
    return 1e-9 * pairs[0].nbytes / median(seconds[len(pairs) :])


def check(case: KernelCase, model: str) -> None:
    """Run gradwire's implementation. Raises RuntimeError if its result is wrong."""
    case.implementations[GRADWIRE]()
    try:
        case.check()
    except AssertionError as error:
        raise RuntimeError(f"{case.kernel} of {model} is wrong; nothing is timed.") from error


def time_cases(cases: Sequence[KernelCase], rounds: int, device: torch.device) -> dict[str, list[Timing]]:
    """Timings by implementation: for each round, the mean over the buckets, which differ in size."""
    timings: dict[str, list[Timing]] = {name: [] for name in cases[0].implementations}
    for turn in range(WARM_UP + rounds):
        for name in in_turn(list(timings), turn):
            round_timings = [timed(case.implementations[name], device) for case in cases]
            if turn >= WARM_UP:
                timings[name].append(_mean(round_timings))
    return timings


def _mean(timings: Sequence[Timing]) -> Timing:
    host = [timing.host_seconds for timing in timings if timing.host_seconds is not None]
    return Timing(
        mean(timing.seconds for timing in timings),
        mean(host) if host else None,
        any(timing.includes_host for timing in timings),
    )
