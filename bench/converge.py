"""Time to a target over a slow network: the same training with each hook, until its score reaches the target.

A task of `gradwire.bench.tasks`, on hosts joined by a link of one rate (see `gradwire.bench.network`). All trainings of
a seed live in the same processes and take turns step by step; each counts its own time and bytes, and stops at the
target. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradwire.bench import launch, namespaces
from gradwire.bench.implementations import GRADWIRE, ONE_BUCKET_MB, PYTORCH, TorchDDP, is_equal_everywhere, wrap
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, limit_to, places_of
from gradwire.bench.record import SENT, STEPS, TARGET_S, Measured, Record, records_of, unique
from gradwire.bench.tables import Cell, Group, Table, count, format_rate, format_value, pivot
from gradwire.bench.tasks import TASKS, Batch, Task, describe, evaluate
from gradwire.bench.timing import in_turn, slowest
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradwire.planner.hook_registry import HOOKS, HookEntry, PyTorchHook, display_name

NO_FEEDBACK = "powersgd-r4-no-feedback"
DEFAULT_HOOKS = ("none", "fp16", "int8", "int4", "int2", "powersgd-r4", "powersgd-r16", NO_FEEDBACK)
TRAINED_HOOKS = {name: entry for name, entry in HOOKS.items() if name != "noop"} | {
    NO_FEEDBACK: HookEntry(
        description="factors of rank 4, without error feedback",
        make=lambda group, start: (PowerSGDState(group, 4, start, use_error_feedback=False), powerSGD_hook),
        error_feedback=False,
        pytorch=PyTorchHook(
            make=lambda group, start: (
                torch_powersgd.PowerSGDState(group, 4, start, use_error_feedback=False),
                torch_powersgd.powerSGD_hook,
            ),
            one_bucket=True,
        ),
    )
}
PLAIN_STEPS = 2  # uncompressed steps of low-rank hooks: the fewest that PyTorch's hook accepts
WARM_UP = 10  # steps until the learning rate has its full size


class Training:
    """A model in training with one hook, and its measurements so far.

    It has the weights of ``seed``.
    """

    def __init__(self, task: Task, hook: str, implementation: str, seed: int, counts_bytes: bool) -> None:
        self.task, self.hook, self.implementation, self.counts_bytes = task, hook, implementation, counts_bytes
        self.seconds: list[float] = []
        self.sent_bytes: list[int] = []
        self.steps: list[int] = []  # at which the model was evaluated
        self.scores: list[float] = []
        torch.manual_seed(seed)
        entry = TRAINED_HOOKS[hook]
        if implementation == GRADWIRE:
            self.model, _ = wrap(task.make_model(), entry.make, start=PLAIN_STEPS)
        else:
            assert entry.pytorch is not None
            cap = ONE_BUCKET_MB if entry.pytorch.one_bucket else None
            self.model, _ = wrap(task.make_model(), entry.pytorch.make, TorchDDP, PLAIN_STEPS, bucket_cap_mb=cap)
        self.optimizer = task.make_optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / WARM_UP, total_iters=WARM_UP)

    def step(self, batch: Batch) -> None:
        sent_before = self._interface_bytes()
        dist.barrier()
        start = time.perf_counter()
        loss = self.task.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()
        dist.barrier()
        self.sent_bytes.append(self._interface_bytes() - sent_before)

    def _interface_bytes(self) -> int:
        return namespaces.sent_bytes() if self.counts_bytes else 0

    def evaluate(self) -> bool:
        """Append the score; returns whether it reaches the target."""
        self.steps.append(len(self.seconds))
        assert isinstance(self.model.module, nn.Module)
        self.scores.append(evaluate(self.task, self.model.module))
        return self.task.is_reached(self.scores[-1])

    def records(self, seed: int) -> list[Record]:
        """Curves over the evaluations. A collective call. Raises RuntimeError if the ranks hold different weights."""
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError(
                f"{self.hook}, {self.implementation}: the ranks ended with different weights; nothing is reported."
            )
        seconds = list(itertools.accumulate(slowest(self.seconds)))
        sent = list(itertools.accumulate(self.sent_bytes))
        curves: dict[str, list[Any]] = {
            STEPS: self.steps,
            TARGET_S: [round(seconds[step - 1], 4) for step in self.steps],
            SENT: [sent[step - 1] for step in self.steps] if self.counts_bytes else [],
            self.task.score: self.scores,
        }
        is_reached = self.task.is_reached(self.scores[-1])
        metrics = {
            m: {"p50": curve[-1] if is_reached else None, "series": curve} for m, curve in curves.items() if curve
        }
        case = {"hook": self.hook, "seed": seed}
        return records_of("converge", case, self.implementation, dist.get_world_size(), metrics)


def measure(task: str, hooks: Sequence[str], rate: Rate, seeds: int, hosts: int) -> Measured:
    settings = {"task": task, "hooks": list(hooks), "rate": rate.name, "seeds": seeds, "threads": 1}
    with places_of(hosts, is_local=rate == LOOPBACK) as places:
        records = launch.run(__name__, settings, places)
    described = describe(TASKS[task]()) | {"rate": rate.name, "hosts": hosts, "plain_steps": PLAIN_STEPS}
    return Measured(described, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task = TASKS[settings["task"]]()
    seeds, counts_bytes = settings["seeds"], settings["rate"] != LOOPBACK.name
    limit_to(settings["rate"])
    pairs = [(hook, by) for hook in settings["hooks"] for by in implementations_of(hook)]
    records: list[Record] = []
    with Progress(disable=dist.get_rank() != 0) as progress:
        for seed in range(seeds):
            trainings = [Training(task, hook, by, seed, counts_bytes) for hook, by in pairs]
            line = progress.add_task(f"seed {seed}", total=task.max_steps)
            running = list(trainings)
            for step, batch in zip(range(1, task.max_steps + 1), task.batches(seed), strict=False):
                for training in in_turn(running, step):
                    training.step(batch)
                if step % task.evaluate_every == 0:
                    running = [training for training in running if not training.evaluate()]
                    waiting = f"seed {seed}, {len(running)} of {len(trainings)} running"
                    progress.update(line, completed=step, description=waiting)
                if not running:
                    break
            records += [record for training in trainings for record in training.records(seed)]
    of = {"task": settings["task"], "rate": settings["rate"]}
    return [replace(record, case=of | record.case) for record in records]


def implementations_of(hook: str) -> list[str]:
    """The implementations that train with a hook: PyTorch only if it has the hook; its closest is another row."""
    pytorch = TRAINED_HOOKS[hook].pytorch
    return [PYTORCH, GRADWIRE] if pytorch is not None and pytorch.is_same else [GRADWIRE]


def to_target(records: Iterable[Record], metric: str) -> list[float] | None:
    """The values of a metric at the target, one per seed; None if a training missed it."""
    found = [record.p50 for record in records if record.metric == metric]
    reached = [number for number in found if number is not None]
    return reached if found and len(reached) == len(found) else None


def compressed_step_ms(records: Sequence[Record]) -> float | None:
    """Median over the seeds of the mean step time from the first evaluation on, when all hooks compress."""
    means = []
    for steps, seconds in zip(
        (record.series for record in records if record.metric == STEPS),
        (record.series for record in records if record.metric == TARGET_S),
        strict=True,
    ):
        if to_target(records, STEPS) is None or len(steps) < 2:
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


def _time_to_target(group: Group) -> str:
    found = [record.p50 for record in group if record.metric == TARGET_S]
    reached = [number for number in found if number is not None]
    if len(reached) < len(found):
        return f"{len(reached)} of {len(found)} reach it"
    digits = 0 if median(reached) >= 10 else 2
    return f"{median(reached):.{digits}f} ({min(reached):.{digits}f}-{max(reached):.{digits}f})"


def _step_ms(group: Group) -> str:
    milliseconds = compressed_step_ms(group)
    return "" if milliseconds is None else f"{milliseconds:.0f}"


def _speed_up(records: Sequence[Record]) -> Cell:
    """A cell with the speed-up of the time to target over PyTorch's DDP without a hook."""
    baseline = [record for record in records if (record["hook"], record.implementation) == ("none", PYTORCH)]
    seconds = to_target(baseline, TARGET_S)

    def cell(group: Group) -> str:
        values = to_target(group, TARGET_S)
        return f"{median(seconds) / median(values):.2f}x" if seconds and values else ""

    return cell


def tables(records: Sequence[Record]) -> list[Table]:
    settings = records[0].provenance["settings"]
    title = (
        f"{settings['task']}, {settings['parameters']:,} parameters, {count(settings['hosts'], 'host')}, "
        f"link: {format_rate(settings['rate'])}; target: {target_of(settings)}"
    )
    names = {"hook": lambda record: display_name(record["hook"]), "": lambda record: record.implementation}
    columns = [
        (STEPS, _at_target(STEPS)),
        (TARGET_S, _time_to_target),
        ("step time (ms)", _step_ms),
        ("sent", _at_target(SENT)),
        ("speed-up", _speed_up(records)),
    ]
    seeds = len(unique(record["seed"] for record in records))
    notes = [
        f"time to target: median of {count(seeds, 'seed')} (range), evaluations not counted",
        "step time: mean from the first evaluation on, when all hooks compress",
        "sent: bytes on rank 0's interface; quantized and low-rank hooks send the first "
        f"{settings['plain_steps']} steps uncompressed",
        "speed-up: time to target of PyTorch's DDP without a hook, over that of the hook",
    ]
    return [pivot(title, records, names, columns, notes)]
