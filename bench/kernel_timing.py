"""Timings of a kernel's implementations, in turns over the buckets of a model, and the bandwidth of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, median

import torch

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import Case
from gradwire.bench.timing import Timing, in_turn, timed

WARM_UP = 2


def copy_bandwidth(device: torch.device, numel: int = 16 << 20) -> float:
    """GB/s of ``copy_``, reads and writes counted, of ``numel`` fp32 elements that no cache holds."""
    pairs = [torch.ones(2, numel, device=device) for _ in range(4)]
    seconds = [timed(partial(pair[1].copy_, pair[0]), device).seconds for _ in range(5) for pair in pairs]
    return 1e-9 * pairs[0].nbytes / median(seconds[len(pairs) :])


def checked(case: Case, model: str) -> Case:
    """The case, after a call of gradwire's implementation and a check of its result.

    Raises:
        RuntimeError: the result is wrong.
    """
    case.implementations[GRADWIRE](0)
    try:
        case.check()
    except AssertionError as error:
        raise RuntimeError(f"{case.kernel} of {model} is wrong; nothing is timed.") from error
    return case


def time_case(case: Case, rounds: int, device: torch.device) -> dict[str, list[Timing]]:
    """Timings by implementation: for each round, the mean over the buckets of the case, which differ in size."""
    timings: dict[str, list[Timing]] = {name: [] for name in case.implementations}
    buckets = range(len(case.nbytes))
    for turn in range(WARM_UP + rounds):
        for name, implementation in in_turn(list(case.implementations.items()), turn):
            of_round = [timed(partial(implementation, bucket), device) for bucket in buckets]
            if turn >= WARM_UP:
                timings[name].append(_mean(of_round))
    return timings


def _mean(timings: Sequence[Timing]) -> Timing:
    host = [timing.host_seconds for timing in timings if timing.host_seconds is not None]
    return Timing(
        mean(timing.seconds for timing in timings),
        mean(host) if host else None,
        any(timing.includes_host for timing in timings),
    )
