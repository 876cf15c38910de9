"""`Case`: a kernel on the buckets of a model, beside other implementations; its check and its timings, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import torch
from torch import Tensor

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.shapes import Shape
from gradwire.bench.timing import Timing, in_turn, timed

RANKS = 2  # the gradients are divided by it
WARM_UP = 2

Call = Callable[[int], object]  # takes the index of a bucket


@dataclass(frozen=True)
class Case:
    """A kernel on some buckets of a model.

    Outputs are NaN before, because fresh memory may hold the right result of another case.

    Attributes:
        kernel: its name and options.
        nbytes: bytes that gradwire's kernel reads and writes, for each bucket.
        implementations: by name, gradwire's first.
        check: raises AssertionError if gradwire's result for bucket 0 is wrong; call it after a run on that bucket.
    """

    kernel: str
    nbytes: list[int]
    implementations: dict[str, Call]
    check: Callable[[], None]


def random_gradients(shapes: Sequence[Sequence[Shape]], device: torch.device) -> list[list[Tensor]]:
    """Normal gradients of the shapes of each bucket."""
    return [[torch.randn(shape, device=device) for shape in of_bucket] for of_bucket in shapes]


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
