"""Time to a target over a slow network: the same training with each hook, until its score reaches the target.

A task of `gradwire.bench.tasks`, on hosts joined by a link of one rate (see `gradwire.bench.network`). All trainings of
a seed live in the same processes and take turns step by step; each counts its own time and bytes, and stops at the
target. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

from gradwire.bench import launch, namespaces
from gradwire.bench.implementations import PYTORCH
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.record import Measured, Metric, Record, records_of, unique
from gradwire.bench.tables import Cell, Group, Table, count, format_link, format_value, pivot
from gradwire.bench.tasks import (
    NO_FEEDBACK,
    OPTIMIZERS,
    PLAIN_STEPS,
    TASKS,
    Task,
    Training,
    describe,
    implementations_of,
    ramps,
)
from gradwire.bench.timing import in_turn, slowest
from gradwire.planner.hook_registry import display_name

DEFAULT_HOOKS = (
    *("none", "fp16", "int8", "int4", "int2", "sign", "powersgd-r4", "powersgd-r16"),
    *("powersgd-r8-int8", "powersgd-r16-int8", "powersgd-r32-int8", NO_FEEDBACK),
)


class Trial(Training):
    """A training until the score reaches the target."""

    def __init__(
        self, task: Task, optimizer: str, hook: str, implementation: str, seed: int, counts_bytes: bool
    ) -> None:
        sent_bytes = namespaces.sent_bytes if counts_bytes else lambda: 0
        super().__init__(task, hook, implementation, seed, PLAIN_STEPS, sent_bytes=sent_bytes, optimizer=optimizer)
        self.case, self.counts_bytes = {"optimizer": optimizer, "hook": hook, "seed": seed}, counts_bytes
        self.schedules = ramps(self.optimizers)
        self.steps: list[int] = []  # at which the model was evaluated
        self.scores: list[float] = []

    def is_over(self) -> bool:
        """Append the score; returns whether it reaches the target."""
        self.steps.append(len(self.seconds))
        self.scores.append(self.evaluate())
        return self.task.is_reached(self.scores[-1])

    def records(self) -> list[Record]:
        """Curves over the evaluations. A collective call. Raises RuntimeError if the ranks hold different weights."""
        self.check_weights()
        seconds = list(itertools.accumulate(slowest(self.seconds)))
        sent = list(itertools.accumulate(self.sent_bytes))
        curves: dict[str, list[Any]] = {
            Metric.STEPS: self.steps,
            Metric.TARGET_S: [round(seconds[step - 1], 4) for step in self.steps],
            Metric.SENT: [sent[step - 1] for step in self.steps] if self.counts_bytes else [],
            self.task.score: self.scores,
        }
        is_reached = self.task.is_reached(self.scores[-1])
        metrics = {
            m: {"p50": curve[-1] if is_reached else None, "series": curve} for m, curve in curves.items() if curve
        }
        return records_of("converge", self.case, self.implementation, dist.get_world_size(), metrics)


def measure(
    task: str,
    optimizers: Sequence[str],
    hooks: Sequence[str],
    rate: Rate,
    seeds: int,
    hosts: int,
    delay_ms: float = 0.0,
) -> Measured:
    settings: dict[str, Any] = {"task": task, "optimizers": list(optimizers), "hooks": list(hooks)}
    settings |= {"rate": rate.name, "seeds": seeds, "threads": 1}
    with places_of(hosts, [rate], delay_ms=delay_ms) as places:
        records = launch.run(__name__, settings, places)
    described = describe(TASKS[task]()) | {"rate": rate.name, "delay_ms": delay_ms, "hosts": hosts}
    described["plain_steps"] = PLAIN_STEPS
    return Measured(described, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task = TASKS[settings["task"]]()
    seeds, rate = settings["seeds"], Rate.named(settings["rate"])
    limit(rate)
    names = [
        (optimizer, hook, by)
        for hook in settings["hooks"]
        for by in implementations_of(hook)
        for optimizer in settings["optimizers"]
    ]
    records: list[Record] = []
    with Progress(disable=dist.get_rank() != 0) as progress:
        for seed in range(seeds):
            trials = [Trial(task, *each, seed, counts_bytes=not rate.is_loopback) for each in names]
            line = progress.add_task(f"seed {seed}", total=task.max_steps)
            running = list(trials)
            batches = task.batches(seed, dist.get_rank(), dist.get_world_size())
            for step, batch in zip(range(1, task.max_steps + 1), batches, strict=False):
                for trial in in_turn(running, step):
                    trial.step(batch)
                if step % task.evaluate_every == 0:
                    running = [trial for trial in running if not trial.is_over()]
                    waiting = f"seed {seed}, {len(running)} of {len(trials)} running"
                    progress.update(line, completed=step, description=waiting)
                if not running:
                    break
            records += [record for trial in trials for record in trial.records()]
    of = {"task": settings["task"], "rate": settings["rate"]}
    return [replace(record, case=of | record.case) for record in records]


def to_target(records: Iterable[Record], metric: str) -> list[float] | None:
    """The values of a metric at the target, one per seed; None if a training missed it."""
    found = [record.p50 for record in records if record.metric == metric]
    reached = [number for number in found if number is not None]
    return reached if found and len(reached) == len(found) else None


def compressed_step_ms(records: Sequence[Record]) -> float | None:
    """Median over the seeds of the mean step time from the first evaluation on, when all hooks compress."""
    means = []
    for steps, seconds in zip(
        (record.series for record in records if record.metric == Metric.STEPS),
        (record.series for record in records if record.metric == Metric.TARGET_S),
        strict=True,
    ):
        if to_target(records, Metric.STEPS) is None or len(steps) < 2:
            return None
        means.append(1e3 * (seconds[-1] - seconds[0]) / (steps[-1] - steps[0]))
    return median(means)


def target_of(settings: dict[str, Any]) -> str:
    return f"{settings['score']} {'>=' if settings['rises'] else '<='} {settings['target']:g}"


def _at_target(metric: str) -> Cell:
    def cell(group: Group) -> str:
        values = to_target(group, metric)
        return "" if values is None else format_value(metric, median(values))

    return cell


def _missed(group: Group) -> str:
    """How many trainings reached the target, if some did not."""
    found = [record.p50 for record in group if record.metric == Metric.STEPS]
    reached = [number for number in found if number is not None]
    return f"{len(reached)} of {len(found)} reach it" if len(reached) < len(found) else ""


def _time_to_target(group: Group) -> str:
    reached = to_target(group, Metric.TARGET_S)
    if reached is None:
        return _missed(group)
    digits = 0 if median(reached) >= 10 else 2
    return f"{median(reached):.{digits}f} ({min(reached):.{digits}f}-{max(reached):.{digits}f})"


def _step_ms(group: Group) -> str:
    milliseconds = compressed_step_ms(group)
    return "" if milliseconds is None else f"{milliseconds:.0f}"


def _speed_up(records: Sequence[Record]) -> Cell:
    """A cell with the speed-up of the time to target over PyTorch's DDP without a hook."""
    baseline = [record for record in records if (record["hook"], record.implementation) == ("none", PYTORCH)]
    seconds = to_target(baseline, Metric.TARGET_S)

    def cell(group: Group) -> str:
        values = to_target(group, Metric.TARGET_S)
        return f"{median(seconds) / median(values):.2f}x" if seconds and values else ""

    return cell


def _steps_with(records: Sequence[Record], optimizer: str) -> Cell:
    """A cell with the steps to the target with one optimizer, and in units of those without a hook."""
    trained = [record for record in records if record["optimizer"] == optimizer]
    plain = to_target([record for record in trained if record["hook"] == "none"], Metric.STEPS)

    def cell(group: Group) -> str:
        own = [record for record in group if record["optimizer"] == optimizer]
        steps = to_target(own, Metric.STEPS)
        if steps is None:
            return _missed(own)
        return format_value(Metric.STEPS, median(steps)) + (f" ({median(steps) / median(plain):.2f}x)" if plain else "")

    return cell


def tables(records: Sequence[Record]) -> list[Table]:
    """One table, a row per hook: times and bytes with one optimizer, or the steps with each of several."""
    settings = records[0].provenance["settings"]
    optimizers = unique(record.case.get("optimizer") for record in records)
    trained_by = f", {OPTIMIZERS[optimizers[0]]}" if len(optimizers) == 1 and optimizers[0] else ""
    title = (
        f"{settings['task']}, {settings['parameters']:,} parameters{trained_by}, {count(settings['hosts'], 'host')}, "
        f"link: {format_link(settings['rate'], settings)}; target: {target_of(settings)}"
    )
    names = {"hook": lambda record: display_name(record["hook"]), "": lambda record: record.implementation}
    seeds = len(unique(record["seed"] for record in records))
    if len(optimizers) > 1:
        columns = [(OPTIMIZERS[name], _steps_with(records, name)) for name in optimizers]
        notes = [f"steps to target: median of {count(seeds, 'seed')}; in brackets: relative to no hook"]
        return [pivot(f"steps to target by optimizer: {title}", records, names, columns, notes)]
    columns = [
        (Metric.STEPS, _at_target(Metric.STEPS)),
        (Metric.TARGET_S, _time_to_target),
        (Metric.STEP_MS, _step_ms),
        ("sent", _at_target(Metric.SENT)),
        ("speed-up", _speed_up(records)),
    ]
    notes = [
        f"time to target: median of {count(seeds, 'seed')} (range), evaluations not counted",
        "step time: mean from the first evaluation on, when all hooks compress",
        "sent: bytes on rank 0's interface; quantized and low-rank hooks send the first "
        f"{settings['plain_steps']} steps uncompressed",
        "speed-up: time to target of PyTorch's DDP without a hook, divided by that of the hook",
    ]
    return [pivot(title, records, names, columns, notes)]
