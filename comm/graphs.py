"""`PiecewiseGraphs`: CUDA graphs of an algorithm's kernels, one for each part between two collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gradwire.comm.transport import Algorithm, Collective, Driver

# Eager steps before a capture. Kernels are then compiled, tables uploaded, and the workspace, which shrinks after
# `Workspace.STEPS_BEFORE_SHRINKING` smaller steps, has the size that it keeps.
WARM_UP_STEPS = 5


Part = tuple[torch.cuda.CUDAGraph, Collective | None]  # kernels, and the collective after them


class PiecewiseGraphs:
    """CUDA graphs of algorithms that use one workspace: a part takes one launch, instead of one per kernel.

    An algorithm's first `WARM_UP_STEPS` steps run eagerly. The next one is captured, part by part, and replayed
    at once, because a capture runs nothing. Later steps replay the graphs and await the collectives of the captured
    step.

    A graph repeats its launches with the addresses and numbers of the capture: it serves one workspace, one owner of
    the memory and one variant of the algorithm. Numbers that change must lie in device memory, where ``refresh``
    replaces them.

    Graphs are dropped when their owner is freed, and by `reset`. They share one memory pool: they run one after another
    on one stream, and no temporary tensor outlives its part.
    """

    def __init__(self) -> None:
        # By owner and variant.
        self._recordings: WeakKeyDictionary[object, dict[Hashable, _Recording]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of captured graphs."""
        return len(self._parts())

    def _parts(self) -> list[Part]:
        return [part for variants in self._recordings.values() for each in variants.values() for part in each.parts]

    async def run(
        self, owner: object, variant: Hashable, start: Callable[[], Algorithm[None]], refresh: Callable[[], None]
    ) -> None:
        """Run one step of an algorithm in the current stream, always the same one, and not the default one.

        While the user captures the whole step, it runs eagerly and becomes part of the user's graph.

        Args:
            owner: the object with the algorithm's memory. Compared by identity, referenced weakly.
            variant: the decisions of the host about the step, such as its parity.
            start: creates the coroutine of the algorithm, in eager and captured steps.
            refresh: replaces the numbers in device memory that differ between steps, before a capture and before
                replays.
        """
        if torch.cuda.is_current_stream_capturing():
            await start()
            return
        recording = self._recordings.setdefault(owner, {}).setdefault(variant, _Recording())
        if recording.eager_steps < WARM_UP_STEPS:
            await start()
            recording.eager_steps += 1
            return
        refresh()
        if not recording.parts:
            recording.parts = await self._record(start())
            return
        for graph, collective in recording.parts:
            graph.replay()
            if collective is not None:
                await collective

    async def _record(self, algorithm: Algorithm[None]) -> list[Part]:
        """Capture every part of a step and run it."""
        parts: list[Part] = []
        alive = self._parts()
        # PyTorch cannot capture into the memory pool of graphs that were all freed.
        pool = alive[0][0].pool() if alive else torch.cuda.graph_pool_handle()
        try:
            driver = Driver(algorithm)
            while True:
                graph, collective = self._capture(driver, pool)
                graph.replay()
                parts.append((graph, collective))
                if collective is None:
                    return parts
                await collective
        finally:
            algorithm.close()

    def _capture(self, driver: Driver[None], pool: Any) -> Part:
        """Capture the kernels up to the next collective, or to the end.

        ``torch.cuda.graph`` would synchronize with the device and free cached memory in the middle of a backward.
        """
        graph = torch.cuda.CUDAGraph()
        # During the capture, other threads may allocate memory, and NCCL's watchdog may query events.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            collective = driver.advance()
            graph.capture_end()
        except BaseException as error:
            with suppress(RuntimeError):  # the capture is void
                graph.capture_end()
            if isinstance(error, Exception):
                message = f"A step could not be captured in CUDA graphs: {error}\nPass cuda_graphs=False."
                raise RuntimeError(message) from error
            raise
        return graph, collective

    def reset(self) -> None:
        """Drop all graphs. A later step starts with a new warm-up."""
        for variants in self._recordings.values():
            for recording in variants.values():
                for graph, _ in recording.parts:
                    graph.reset()
        self._recordings.clear()


class _Recording:
    """One variant of an owner's steps."""

    def __init__(self) -> None:
        self.eager_steps = 0  # number of warm-up steps so far
        self.parts: list[Part] = []  # empty before the capture
