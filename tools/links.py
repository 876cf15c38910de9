"""Trainings of a benchmark model with several hooks, on hosts joined by a link whose rate changes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gradwire.bench import launch
from gradwire.bench.implementations import wrap
from gradwire.bench.namespaces import Rate, places_of
from gradwire.bench.record import Measured
from gradwire.bench.timing import slowest, turns
from gradwire.planner.hook_registry import Make
from gradwire.planner.jobs import Job


def measure_on_links(
    module: str,
    models: Sequence[str],
    rates: Sequence[Rate],
    hosts: int,
    settings: dict[str, Any],
    delay_ms: float = 0.0,
) -> Measured:
    """Run ``main`` of a module for each model, with a rank on each host; it sets the rates of the link."""
    settings = settings | {"rates": [rate.name for rate in rates], "hosts": hosts, "delay_ms": delay_ms}
    settings["threads"] = 1
    with places_of(hosts, rates, delay_ms=delay_ms) as places:
        records = [r for model in models for r in launch.run(module, settings | {"model": model}, places)]
    return Measured(settings | {"models": list(models)}, records)


STEPS_IN_A_ROW = 5


class Training:
    """A job's model in gradwire's DDP, with a hook; ``make`` returns its registration."""

    def __init__(self, job: Job, make: Make) -> None:
        self.seconds: list[float] = []
        self._loss = job.loss
        self._ddp, self.state = wrap(job.model, make)

    def step(self) -> float:
        """Seconds of a forward and a backward, until every gradient is final; all ranks begin together."""
        self._ddp.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        self._loss(self._ddp).backward()
        return time.perf_counter() - start


def time_in_rows(trainings: Mapping[str, Training], rounds: int, title: str) -> dict[str, list[float]]:
    """Seconds of steps on the slowest rank: in each round, `STEPS_IN_A_ROW` of each training. A collective call.

    A row is as a training with one hook, which finds its memory in the caches.
    """
    for training in trainings.values():
        training.seconds = []
    for _, training in turns(range(rounds), list(trainings.values()), title):
        training.step()  # warms the caches
        training.seconds += [training.step() for _ in range(STEPS_IN_A_ROW)]
    return {name: slowest(training.seconds) for name, training in trainings.items()}
