"""Profiler ranges: what `torch.profiler` and NVTX show of gradwire.

A range costs 0.2 us while no profiler runs. `torch.profiler` records a CPU's worker thread only with
``experimental_config=_ExperimentalConfig(profile_all_threads=True)``; `torch.autograd.profiler.emit_nvtx` turns all
ranges into NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Generator
from types import coroutine
from typing import TypeVar

from gradwire.comm.collectives import Collective
from gradwire.comm.torch_internals import profiler_range
from gradwire.comm.transport import Steps

T = TypeVar("T")


@coroutine
def in_ranges(steps: Steps[T], name: str) -> Generator[Collective, None, T]:
    """Run an algorithm with each of its stretches between collectives in a profiler range: "NAME, part 1", ...

    Args:
        steps: the algorithm; await the result instead.
        name: of the ranges.
    """
    part = 0
    try:
        while True:
            part += 1
            with profiler_range(f"{name}, part {part}"):
                try:
                    collective = steps.send(None)
                except StopIteration as end:
                    result: T = end.value
                    return result
            yield collective
    finally:
        steps.close()
