"""The demo: train a small network on handwritten digits with each hook, over a slow link. `measure` starts the ranks.

All trainings live in the same processes. The next step is always that of the training with the least time so far, so
the progress bars advance as if every hook had the machine and the link to itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.optim.lr_scheduler import OneCycleLR

from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.tables import Cell, Group, Table, count, format_link, median_of, pivot, relative, value
from gradwire.bench.tasks import Digits, Training, describe
from gradwire.planner.hook_registry import HOOKS, display_name

DEMO_PLAIN_STEPS = 10  # uncompressed steps of quantized and low-rank hooks


def records_of_training(training: Training, epochs: int) -> list[Record]:
    """Check and sum up a training. A collective call. Raises RuntimeError if it diverged or the ranks differ."""
    training.check_weights()
    losses = training.mean_losses()
    last_epoch = losses[-(len(losses) // epochs) :]
    sent = list(itertools.accumulate(training.sent_bytes))
    metrics: dict[str, Any] = {
        Metric.TRAINING_LOSS: {"p50": statistics.fmean(last_epoch), "series": losses},
        Metric.ACCURACY: training.evaluate(),
        Metric.SENT_PER_STEP: {"p50": statistics.fmean(training.sent_bytes), "series": sent},
        Metric.STEP_MS: percentiles_ms(training.seconds),
        Metric.TRAINING_S: round(sum(training.seconds), 3),
    }
    return records_of("demo", {"hook": training.hook}, GRADWIRE, dist.get_world_size(), metrics)


def measure(
    hooks: Sequence[str], rate: Rate, processes: int, epochs: int, seed: int, delay_ms: float = 0.0
) -> Measured:
    """Train once with each hook."""
    asked = {"hooks": list(hooks), "rate": rate.name, "delay_ms": delay_ms, "epochs": epochs, "seed": seed}
    with places_of(processes, [rate], delay_ms=delay_ms) as places:
        records = launch.run(__name__, asked, places, demo_device(processes, rate))
    task = Digits()
    settings = asked | {
        "processes": processes,
        "train_images": len(task.train_labels),
        "test_images": len(task.test_labels),
        "parameters": describe(task)["parameters"],
        "batch_size": task.batch_size(processes),
        "plain_steps": DEMO_PLAIN_STEPS,
    }
    return Measured(settings, records)


def demo_device(processes: int, rate: Rate) -> torch.device:
    """GPUs if every process can have its own and there is no link, else the CPU."""
    has_gpus = torch.cuda.device_count() >= max(2, processes)
    return torch.device("cuda" if has_gpus and rate.is_loopback else "cpu")


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task, hooks, epochs = Digits(device), settings["hooks"], settings["epochs"]
    steps = epochs * (len(task.train_labels) // task.batch_size(dist.get_world_size()))
    trainings = [Training(task, hook, GRADWIRE, settings["seed"], DEMO_PLAIN_STEPS, device) for hook in hooks]
    for training in trainings:
        training.schedules = [OneCycleLR(each, max_lr=0.02, total_steps=steps) for each in training.optimizers]
    batches = [task.batches(settings["seed"], dist.get_rank(), dist.get_world_size()) for _ in hooks]
    limit(Rate.named(settings["rate"]))
    with make_progress() as progress:
        bars = [progress.add_task(display_name(hook), total=steps, loss=math.nan, seconds=0.0) for hook in hooks]
        for _ in range(steps * len(hooks)):
            turn = next_turn([training.seconds for training in trainings], steps, device)
            training = trainings[turn]
            training.step(next(batches[turn]))
            progress.update(bars[turn], advance=1, loss=training.losses[-1], seconds=sum(training.seconds))
    return [record for training in trainings for record in records_of_training(training, epochs)]


def next_turn(seconds: Sequence[Sequence[float]], steps: int, device: torch.device) -> int:
    """The training that takes the next step: the one with the least time so far, as rank 0 measured it."""
    running = [index for index, durations in enumerate(seconds) if len(durations) < steps]
    choice = torch.tensor(min(running, key=lambda index: sum(seconds[index])), device=device)
    dist.broadcast(choice, 0)
    return int(choice)


def make_progress() -> Progress:
    """A progress bar for each training, on rank 0 only."""
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps  loss {task.fields[loss]:.4f} "),
        TextColumn("{task.fields[seconds]:5.1f} s"),
        refresh_per_second=4,
        disable=dist.get_rank() != 0,
    )


def title(records: Sequence[Record]) -> str:
    """Task, size, world size and length of the trainings."""
    settings = records[0].provenance["settings"]
    sizes = f"{settings['parameters']:,} parameters, {count(settings['processes'], 'rank')}"
    link = f"link: {format_link(settings['rate'], settings)}"
    return f"Handwritten digits, {sizes}, {count(settings['epochs'], 'epoch')}, {link}"


def tables(records: Sequence[Record]) -> list[Table]:
    none = [record for record in records if record["hook"] == "none"]
    columns = [
        ("training loss", value(Metric.TRAINING_LOSS)),
        (Metric.ACCURACY, value(Metric.ACCURACY)),
        ("sent per step", value(Metric.SENT_PER_STEP)),
        ("vs. no hook", relative(Metric.SENT_PER_STEP, median_of(none, Metric.SENT_PER_STEP))),
        (Metric.STEP_MS, value(Metric.STEP_MS)),
        (Metric.TRAINING_S, value(Metric.TRAINING_S)),
        ("speed-up", _speed_up(median_of(none, Metric.TRAINING_S))),
    ]
    names = {"hook": lambda record: display_name(record["hook"])}
    return [pivot(title(records), records, names, columns, _notes(records))]


def _speed_up(baseline: float | None) -> Cell:
    """A cell with ``baseline`` in units of the training time; a dash without one."""

    def cell(group: Group) -> str:
        seconds = median_of(group, Metric.TRAINING_S)
        return f"{baseline / seconds:.2f}x" if baseline and seconds else "-"

    return cell


def verdict(records: Sequence[Record]) -> str:
    """The fastest training compared with the one without a hook, in a sentence; empty if one of them is missing."""
    by_hook = {record["hook"]: record.p50 for record in records if record.metric == Metric.TRAINING_S}
    fastest = min(by_hook, key=lambda hook: by_hook[hook] or math.inf)
    plain, best = by_hook.get("none"), by_hook[fastest]
    if not plain or not best or fastest == "none":
        return ""
    settings = records[0].provenance["settings"]
    link = format_link(settings["rate"], settings)
    return f"Over {link}, {fastest} trains in {best:.1f} s, no hook in {plain:.1f} s: {plain / best:.1f} times as fast."


def _notes(records: Sequence[Record]) -> list[str]:
    facts = records[0].provenance
    settings = facts["settings"]
    has_narrow = any(HOOKS[record["hook"]].below_16_bits for record in records)
    steps = settings["plain_steps"]
    plain = f"; hooks of fewer than 16 bits send the first {steps} steps uncompressed" if has_narrow else ""
    if Rate.named(settings["rate"]).is_loopback:
        memory = "memory" if facts["backend"] == "gloo" else "NVLink, PCIe or memory"
        link = f"{memory} of this machine; times over a network differ"
    else:
        link = f"{format_link(settings['rate'], settings)} between hosts, which are network namespaces of this machine"
    return [
        f"training loss: mean of the last epoch. Test accuracy: on {settings['test_images']} images",
        f"sent per step: payload that a rank passes to collectives, mean of all steps{plain}",
        "step time: median. Training time: total time of the hook's steps. The next step goes to the hook with the "
        "least time so far",
        f"link: {link}",
    ]
