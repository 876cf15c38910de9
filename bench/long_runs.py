"""Losses of long trainings: each hook trains for a fixed number of steps, and its losses are compared with no hook's.

``gradwire bench converge --steps``; `gradwire.bench.converge` trains until a target instead. All trainings of a seed
have the same initial weights and batches, so the difference between two losses has less noise than the losses. They run
one after another on ranks of this machine, because nothing is timed. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Measured, Metric, Record, records_of, unique
from gradwire.bench.tables import Cell, Group, Table, count, format_value, gap, groups_of, median_of, pivot
from gradwire.bench.tasks import (
    OPTIMIZERS,
    PLAIN_STEPS,
    TASKS,
    TRAINED_HOOKS,
    Task,
    Training,
    describe,
    implementations_of,
    ramps,
)
from gradwire.exchange.settings import HookSettings
from gradwire.planner.hook_registry import display_name

RANKS = 2
LEAST_STEPS = 8
SAMPLES = 20  # steps of a training that telemetry compares with the exact mean
# By its name in telemetry, where the hook has it.
SAMPLED = {"residual_ratio": Metric.RESIDUAL_RATIO, "gain": Metric.GAIN}


class LongTraining(Training):
    """A training of a fixed number of steps; ``case`` has its ``steps``, ``optimizer``, ``hook`` and ``seed``."""

    def __init__(self, task: Task, case: dict[str, Any], implementation: str) -> None:
        sent_bytes = None if implementation == GRADWIRE else lambda: 0  # PyTorch's DDP does not count
        super().__init__(
            task,
            case["hook"],
            implementation,
            case["seed"],
            PLAIN_STEPS,
            sent_bytes=sent_bytes,
            optimizer=case["optimizer"],
        )
        self.case = case
        self.schedules = ramps(self.optimizers)
        self.checkpoints = checkpoints_of(case["steps"])
        self.validation_losses: list[float] = []  # at the checkpoints
        self.samples: list[Mapping[str, float]] = []  # metrics of measured steps
        if isinstance(self.state, HookSettings):
            # Comparisons send more, so they must be fewer than half of the steps: `records` takes a median.
            every = max(LEAST_STEPS // 2, case["steps"] // SAMPLES)
            self.state.observe(every=every, exact_every=every, report=self.samples.append)

    def run(self, progress: Progress) -> None:
        line = progress.add_task(_name(self.case, self.implementation), total=self.case["steps"])
        batches = self.task.batches(self.case["seed"], dist.get_rank(), dist.get_world_size())
        for step, batch in zip(range(1, self.case["steps"] + 1), batches, strict=False):
            self.step(batch)
            if step in self.checkpoints:
                self.validation_losses.append(self.evaluate(self.task.validation_loss))
            progress.update(line, completed=step)

    def records(self) -> list[Record]:
        """Losses at the checkpoints, and the medians of what telemetry measured in compressed steps.

        A collective call. Raises RuntimeError if a loss is not finite or the ranks hold different weights.
        """
        self.check_weights()
        losses, window = self.mean_losses(), max(1, self.case["steps"] // 10)
        training_losses = [fmean(losses[step - window : step]) for step in self.checkpoints]
        metrics: dict[str, Any] = {
            Metric.VALIDATION_LOSS: {"p50": self.validation_losses[-1], "series": self.validation_losses},
            Metric.TRAINING_LOSS: {"p50": training_losses[-1], "series": training_losses},
        }
        if self.task.rises:  # a falling score is the loss
            metrics[self.task.score] = self.evaluate()
        if self.implementation == GRADWIRE:
            metrics[Metric.SENT_PER_STEP] = median(self.sent_bytes[PLAIN_STEPS:])
        if isinstance(self.state, HookSettings):
            self.state.stop_observing()
        for name, metric in SAMPLED.items():
            values = [sample[name] for sample in self.samples if sample["step"] > PLAIN_STEPS and name in sample]
            if values:
                metrics[metric] = {"p50": median(values), "series": values}
        return records_of("long_runs", self.case, self.implementation, dist.get_world_size(), metrics)


def checkpoints_of(steps: int) -> list[int]:
    """The steps whose losses are compared."""
    return [steps // 4, steps // 2, steps]


def measure(
    task: str, optimizers: Sequence[str], hooks: Sequence[str], steps: int, seeds: int, done: Sequence[Record] = ()
) -> Measured:
    """Train with each hook, optimizer and seed, but for the trainings whose records are ``done``."""
    settings = {"task": task, "optimizers": list(optimizers), "hooks": list(hooks), "steps": steps, "seeds": seeds}
    settings["done"] = [training for training, _ in itertools.groupby(done, lambda r: [r.case, r.implementation])]
    records = launch.run(__name__, settings | {"threads": 1}, RANKS)
    return Measured(describe(TASKS[task]()) | {"plain_steps": PLAIN_STEPS}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task = TASKS[settings["task"]]()
    records: list[Record] = []
    with Progress(disable=dist.get_rank() != 0) as progress:
        for hook in settings["hooks"]:
            # Without a hook, both DDPs train bitwise equally.
            for by in [PYTORCH] if hook == "none" else implementations_of(hook):
                for optimizer in settings["optimizers"]:
                    for seed in range(settings["seeds"]):
                        of = {"task": settings["task"], "steps": settings["steps"]}
                        case = of | {"optimizer": optimizer, "hook": hook, "seed": seed}
                        if [case, by] in settings["done"]:
                            continue
                        training = LongTraining(task, case, by)
                        training.run(progress)
                        records += training.records()
    return records


def _name(case: dict[str, Any], implementation: str) -> str:
    return f"{display_name(case['hook'])}, {implementation}, {OPTIMIZERS[case['optimizer']]}, seed {case['seed']}"


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per task, length and optimizer, with a row per hook and implementation."""
    order = list(TRAINED_HOOKS)
    listed = sorted(records, key=lambda record: order.index(record["hook"]))  # hooks may be added in any order
    return [_table(group) for _, group in groups_of(listed, "task", "steps", "optimizer")]


def _table(records: Sequence[Record]) -> Table:
    first = records[0]
    settings, checkpoints = first.provenance["settings"], checkpoints_of(first["steps"])
    title = (
        f"{settings['task']}, {settings['parameters']:,} parameters, {OPTIMIZERS[first['optimizer']]}, "
        f"{first['steps']:,} steps, {count(first.ranks, 'rank')}"
    )
    names = {"hook": lambda record: display_name(record["hook"]), "": lambda record: record.implementation}
    columns = [
        *(
            (f"validation loss at {step:,}", gap(records, Metric.VALIDATION_LOSS, index))
            for index, step in enumerate(checkpoints)
        ),
        ("training loss", gap(records, Metric.TRAINING_LOSS, -1)),
        (Metric.ACCURACY, gap(records, Metric.ACCURACY)),
        (Metric.RESIDUAL_RATIO, _mean(Metric.RESIDUAL_RATIO)),
        (Metric.GAIN, _mean(Metric.GAIN)),
        ("sent", _sent(settings["parameters"])),
        ("seeds", lambda group: str(len(unique(record["seed"] for record in group)))),
    ]
    notes = [
        "losses (nats) and accuracy: no hook's own, and for each hook the difference to no hook with the same seed; "
        "mean over the seeds (range)",
        f"training loss: mean over the last {max(1, first['steps'] // 10)} steps and the ranks",
        "residual ratio and gain: as in telemetry, medians of compressed steps, mean over the seeds",
        f"sent: payload of a compressed step, relative to gradients in fp32; the first {settings['plain_steps']} steps "
        "of quantized and low-rank hooks are uncompressed",
    ]
    return pivot(title, records, names, columns, notes)


def _mean(metric: str) -> Cell:
    """A cell with the mean of a metric over the seeds."""

    def cell(group: Group) -> str:
        values = [record.p50 for record in group if record.metric == metric and record.p50 is not None]
        return format_value(metric, fmean(values)) if values else ""

    return cell


def _sent(parameters: int) -> Cell:
    def cell(group: Group) -> str:
        sent = median_of(group, Metric.SENT_PER_STEP)
        return "" if sent is None else f"{sent / (4 * parameters):.1%}"

    return cell
