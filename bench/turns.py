"""Interleaved steps: every implementation takes each step, in an order that changes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from rich.progress import track

from gradwire.bench.timing import in_turn, slowest

T = TypeVar("T")


def turns(steps: range, implementations: Sequence[T], title: str) -> Iterator[tuple[int, T]]:
    """Every implementation in every step, with a progress bar on rank 0."""
    for step in track(steps, description=f"{title:<24}", disable=dist.get_rank() != 0):
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
    title: str,
    batch_of: Callable[[int], object],
    sent_bytes: Callable[[], int] | None = None,
    untimed: Timed | None = None,
) -> None:
    """Set the ``seconds`` of each implementation to those of interleaved steps on the slowest rank. A collective call.

    ``batch_of`` returns this rank's batch of a step. ``sent_bytes`` counts the bytes of its interface so far, for
    ``link_bytes``; barriers are included. A step of ``untimed`` precedes each timed one, so that all of them find equal
    caches.
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
