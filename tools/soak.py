"""Thousands of steps with pauses, errors, checkpoints, new wrappers and new process groups, and what they leave behind.

Two ranks train on loopback with one hook after another. At random, a rank pauses, or raises an error in the forward,
in its hook or at the end of the backward; all ranks then resume with ``resynchronize()``. In one of ten
backwards, the ranks compare their parameters. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from gradwire import DistributedDataParallel
from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.record import Measured, Record, records_of
from gradwire.bench.tables import Table, count, format_number
from gradwire.planner.hook_registry import HOOKS, display_name

NAMES = ("none", "bf16", "scaled-fp16", "int8", "int4", "powersgd-r4", "powersgd-r8-int8")
STEPS_PER_WRAPPER = 50  # then come the next hook and the next process group
STEPS_PER_CHECKPOINT = 25
STEPS_PER_READING = 500
PAUSE, FAULT = 0.02, 0.02  # their probabilities in a step
LONGEST_PAUSE_S = 0.02
TIMEOUT = timedelta(seconds=30)  # after which gloo ends the threads of a failed exchange
PLACES = ("forward", "hook", "end of the backward")
COUNTS = ("faults", "other errors", "wrappers", "checkpoints")


class Fault(Exception):
    """An error that the soak injects."""


class Events(NamedTuple):
    """What happens in a step, equal on all ranks."""

    pausing: int | None  # the rank
    failing: int | None  # the rank
    place: str


def events(step: int, ranks: int) -> Events:
    """The events of a step, which follow from its number.

    No rank fails shortly before a checkpoint or a new wrapper: a peer that is one step ahead would wait there.
    """
    draw = random.Random(step)
    pausing = draw.randrange(ranks) if draw.random() < PAUSE else None
    fails = draw.random() < FAULT and step % STEPS_PER_CHECKPOINT < STEPS_PER_CHECKPOINT - 3
    return Events(pausing, draw.randrange(ranks) if fails else None, draw.choice(PLACES))


def readings() -> dict[str, float]:
    """What this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return {
        "memory (MiB)": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(status["Threads"]),
        "open files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


class SoakTraining:
    """A model in a new wrapper on a new process group, with a hook, and its optimizer."""

    def __init__(self, hook: str, weights: Mapping[str, Tensor] | None) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
        if weights is not None:
            module.load_state_dict(weights)
        self.group = dist.new_group(timeout=TIMEOUT)
        self.ddp = DistributedDataParallel(module, process_group=self.group, bucket_cap_mb=0.1, check_every=10)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.parts: dict[str, Any] = {"model": module, "optimizer": self.optimizer}
        if (registration := HOOKS[hook].make(self.group, 2)) is not None:
            self.ddp.register_comm_hook(*registration)
            if isinstance(registration[0], Stateful):
                self.parts["hook"] = registration[0]

    def end(self) -> Mapping[str, Tensor]:
        """Destroy the process group; returns the weights."""
        dist.barrier()
        dist.destroy_process_group(self.group)
        weights: Mapping[str, Tensor] = self.ddp.module.state_dict()
        return weights

    def step(self, step: int) -> None:
        """One step, with its events."""
        rank = dist.get_rank()
        happens = events(step, dist.get_world_size())
        if happens.pausing == rank:
            time.sleep(random.Random(step).random() * LONGEST_PAUSE_S)
        place = happens.place if happens.failing == rank else None
        reducer = self.ddp.reducer
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        if place == "forward":
            with mock.patch.object(self.ddp.module, "forward", _fail):
                self.ddp(inputs)
        loss = self.ddp(inputs).square().mean()
        if place == "hook":
            with mock.patch.object(reducer, "hook", reducer.hook._replace(function=_fail)):
                loss.backward()
        if place == "end of the backward":
            with mock.patch.object(reducer, "_finish", _fail):
                loss.backward()
        loss.backward()
        self.optimizer.step()


def _fail(*_: Any, **__: Any) -> Any:
    raise Fault("injected")


def measure(rounds: int, ranks: int = 2) -> Measured:
    """Readings after each of ``rounds`` rounds of `STEPS_PER_READING` steps."""
    settings = {"steps": rounds * STEPS_PER_READING, "threads": 1, "timeout_s": 60}
    # glibc gives threads arenas of their own, 16 here, and keeps what is freed in them. With one, only leaks grow.
    with mock.patch.dict(os.environ, MALLOC_ARENA_MAX="1"):
        return Measured(settings, launch.run(__name__, settings, ranks))


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """A rank: train, and return the largest readings of any rank."""
    steps, ranks, counts = settings["steps"], dist.get_world_size(), dict.fromkeys(COUNTS, 0)
    seen: list[dict[str, float]] = []
    folder = Path(settings["path"]).parent / "checkpoint"
    training, step = SoakTraining(NAMES[0], None), 0
    with Progress(disable=dist.get_rank() > 0) as progress:
        task = progress.add_task("soak", total=steps)
        while step < steps:
            try:
                training.step(step)
                step += 1
            except (Fault, RuntimeError):
                # An injected error is of this step, or of the step before, for a peer that is one behind.
                is_injected = any(events(each, ranks).failing is not None for each in (step, step - 1))
                counts["faults" if is_injected else "other errors"] += 1
                training.optimizer.zero_grad()
                _resynchronize(training.ddp)
                step = _largest({"step": step})["step"] + 1
            if step % STEPS_PER_CHECKPOINT == 0:
                save(training.parts, checkpoint_id=folder)
                load(training.parts, checkpoint_id=folder)
                if dist.get_rank() == 0:
                    shutil.rmtree(folder)
                counts["checkpoints"] += 1
            if step % STEPS_PER_WRAPPER == 0:
                training = SoakTraining(NAMES[step // STEPS_PER_WRAPPER % len(NAMES)], training.end())
                counts["wrappers"] += 1
            if step % STEPS_PER_READING == 0:
                seen.append(_largest(readings()))
            progress.update(task, completed=step)
    records = records_of("soak", {}, GRADWIRE, ranks, counts)
    for name in seen[0]:
        series = [each[name] for each in seen]
        records += records_of("soak", {}, GRADWIRE, ranks, {name: {"p50": series[-1], "series": series}})
    return records


def _resynchronize(ddp: DistributedDataParallel) -> None:
    try:
        ddp.resynchronize()
    except RuntimeError as error:
        if "The parameters differ" not in str(error):
            raise
        ddp.resynchronize(from_rank=0)  # some ranks have applied the failed step


def _largest(values: Mapping[str, float]) -> dict[str, Any]:
    """The largest value of each kind on any rank."""
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {name: type(value)(number) for (name, value), number in zip(values.items(), numbers.tolist(), strict=True)}


def tables(records: Sequence[Record]) -> list[Table]:
    """What the processes hold in the course of the training."""
    settings = records[0].provenance["settings"]
    series = {record.metric: record.series for record in records if record.series}
    numbers = {record.metric: round(record.p50 or 0) for record in records if not record.series}
    n = settings["steps"] // STEPS_PER_READING
    shown = sorted({1, *(-(-n * part // 4) for part in (1, 2, 3, 4))})
    rows = [
        [f"{number * STEPS_PER_READING:,}", *(format_number(values[number - 1]) for values in series.values())]
        for number in shown
    ]
    notes = [
        f"{count(records[0].ranks, 'rank')}; {', '.join(display_name(name) for name in NAMES)} in turn, each in a new "
        "wrapper on a new process group",
        ", ".join(f"{number:,} {name}" for name, number in numbers.items()),
        "largest value on any rank; MALLOC_ARENA_MAX=1",
    ]
    return [Table(title="Soak", headers=["steps", *series], rows=rows, notes=notes)]
