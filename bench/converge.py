"""Time to a target over a slow network: the same training with each hook, until it is good enough.

A task of `gradwire.bench.tasks`, on hosts that are joined at one rate (see `gradwire.bench.network`). All contenders
live in the same processes and take turns step by step; each counts its own time and bytes, and stops where its score
reaches the target. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradwire import DistributedDataParallel
from gradwire.bench import namespaces
from gradwire.bench.contenders import GRADWIRE, ONE_BUCKET_MB, PYTORCH, is_equal_everywhere
from gradwire.bench.hooks import HOOKS, HookEntry, Peer
from gradwire.bench.launch import exit_with_launcher, leave
from gradwire.bench.measuring import in_turn, slowest
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, link_named, run_on_hosts
from gradwire.bench.report import bench_table, format_bytes, machine_line
from gradwire.bench.tasks import TASKS, Batch, Task, describe, look
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

NO_FEEDBACK = "powersgd-r4-no-feedback"
DEFAULT_HOOKS = ("none", "fp16", "powersgd-r4", "powersgd-r16", NO_FEEDBACK)
RACED = {name: entry for name, entry in HOOKS.items() if name != "noop"} | {
    NO_FEEDBACK: HookEntry(
        description="factors of rank 4, and what they miss is lost",
        make=lambda group, start: (PowerSGDState(group, 4, start, use_error_feedback=False), powerSGD_hook),
        rank=4,
        peer=Peer(
            name="powerSGD_hook",
            make=lambda group, start: (
                torch_powersgd.PowerSGDState(group, 4, start, use_error_feedback=False),
                torch_powersgd.powerSGD_hook,
            ),
            one_bucket=True,
        ),
    )
}
BASELINE = ("none", PYTORCH)
PLAIN_STEPS = 2  # before low-rank hooks begin to compress: the fewest that PyTorch's takes
WARM_UP = 10  # steps until the learning rate has its full size


@dataclass(frozen=True, kw_only=True)
class Race:
    """One training.

    Attributes:
        seed: of the weights and the order of the data.
        hook: its name in `RACED`.
        provider: whose hook, on whose DDP.
        steps: at which the score was looked at.
        seconds: of training until then, on the slower rank of each step; looking is not counted.
        sent_bytes: that rank 0's interface had sent until then; empty on loopback.
        scores: on data that is not trained on.
        reached: the index of the first score that is the target or better; None if there is none.
    """

    seed: int
    hook: str
    provider: str
    steps: list[int]
    seconds: list[float]
    sent_bytes: list[float]
    scores: list[float]
    reached: int | None


@dataclass
class Racer:
    """A network on its way, and what was measured so far."""

    task: Task
    hook: str
    provider: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    counts_bytes: bool
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, task: Task, hook: str, provider: str, seed: int, counts_bytes: bool) -> Racer:
        """The same weights for each contender; a process group for each, as hooks of one share their wire memory."""
        torch.manual_seed(seed)
        group = dist.new_group()
        entry = RACED[hook]
        model: nn.Module
        if provider == GRADWIRE:
            model = DistributedDataParallel(task.make_model(), process_group=group)
            registration = entry.make(group, PLAIN_STEPS)
        else:
            assert entry.peer is not None
            cap = ONE_BUCKET_MB if entry.peer.one_bucket else None
            model = nn.parallel.DistributedDataParallel(task.make_model(), process_group=group, bucket_cap_mb=cap)
            registration = entry.peer.make(group, PLAIN_STEPS)
        if registration is not None:
            model.register_comm_hook(*registration)
        optimizer = task.make_optimizer(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
        return cls(task, hook, provider, model, optimizer, schedule, counts_bytes)

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
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

    def look(self) -> bool:
        """Note the score; returns whether it is the target or better."""
        self.steps.append(len(self.seconds))
        assert isinstance(self.model.module, nn.Module)
        self.scores.append(look(self.task, self.model.module))
        return self.task.is_reached(self.scores[-1])

    def race(self, seed: int) -> Race:
        """What was measured. A collective call.

        Raises:
            RuntimeError: the ranks hold different weights, so that rank 0's score is not that of one training.
        """
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError(
                f"{self.hook}, {self.provider}: the ranks ended with different weights; nothing is reported."
            )
        seconds = list(itertools.accumulate(slowest(self.seconds)))
        sent = list(itertools.accumulate(self.sent_bytes))
        reached = [self.task.is_reached(score) for score in self.scores]
        return Race(
            seed=seed,
            hook=self.hook,
            provider=self.provider,
            steps=self.steps,
            seconds=[round(seconds[step - 1], 4) for step in self.steps],
            sent_bytes=[sent[step - 1] for step in self.steps] if self.counts_bytes else [],
            scores=self.scores,
            reached=reached.index(True) if True in reached else None,
        )


def measure(task: str, hooks: Sequence[str], rate: Rate, seeds: int, count: int) -> dict[str, Any]:
    """Trainings with each hook until the target.

    Args:
        task: its name in `TASKS`.
        hooks: names in `RACED`.
        rate: between the hosts; `LOOPBACK` for ranks that share this machine's loopback.
        seeds: trainings of each contender.
        count: hosts.

    Returns:
        What `race_table` takes and JSON holds: the settings, and a list of `Race` as dictionaries.

    Raises:
        NamespaceError: the system refuses to make hosts.
        LaunchError: a rank failed.
    """
    settings = {"task": task, "hooks": list(hooks), "rate": rate.name, "seeds": seeds}
    return run_on_hosts("gradwire.bench.converge", settings, rate == LOOPBACK, count)


def main(task: Task, hooks: Sequence[str], rate: Rate, seeds: int, path: Path) -> None:
    """One rank."""
    exit_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    if rate != LOOPBACK:
        namespaces.limit(rate)
    contenders = list(itertools.product(hooks, (PYTORCH, GRADWIRE)))
    races: list[Race] = []
    with Progress(disable=dist.get_rank() != 0) as progress:
        for seed in range(seeds):
            racers = [Racer.make(task, hook, provider, seed, rate != LOOPBACK) for hook, provider in contenders]
            line = progress.add_task(f"seed {seed}", total=task.most_steps)
            running = list(racers)
            for step, batch in zip(range(1, task.most_steps + 1), task.batches(seed), strict=False):
                for racer in in_turn(running, step):
                    racer.step(batch)
                if step % task.look_every == 0:
                    running = [racer for racer in running if not racer.look()]
                    waited_for = f"seed {seed}, {len(running)} of {len(racers)} under way"
                    progress.update(line, completed=step, description=waited_for)
                if not running:
                    break
            races += [racer.race(seed) for racer in racers]
    if dist.get_rank() == 0:
        document = describe(task) | {
            "rate": rate.name,
            "hosts": dist.get_world_size(),
            "plain_steps": PLAIN_STEPS,
            "races": [asdict(race) for race in races],
        }
        path.write_text(json.dumps(document))
    dist.destroy_process_group()


def summarize(races: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each contender: medians over the seeds of steps, seconds and bytes to the target; None if one missed it.

    ``step_ms`` is the median of the mean steps from the first look, when all hooks compress, to the target; None if one
    training was there at the first look.
    """
    rows = []
    for (hook, provider), group in itertools.groupby(
        sorted(races, key=_contender_order(races)), key=lambda race: (race["hook"], race["provider"])
    ):
        trainings = list(group)
        reached = [race for race in trainings if race["reached"] is not None]
        is_sure = len(reached) == len(trainings)

        def middle(of: str, reached: Sequence[dict[str, Any]] = reached) -> float | None:
            return median(race[of][race["reached"]] for race in reached) if reached and reached[0][of] else None

        rows.append(
            {
                "hook": hook,
                "provider": provider,
                "reached": f"{len(reached)} of {len(trainings)}",
                "steps": middle("steps") if is_sure else None,
                "seconds": middle("seconds") if is_sure else None,
                "range": [end(race["seconds"][race["reached"]] for race in trainings) for end in (min, max)]
                if is_sure
                else None,
                "step_ms": median(map(_step_ms, trainings)) if all(race["reached"] for race in trainings) else None,
                "sent_bytes": middle("sent_bytes") if is_sure else None,
            }
        )
    baseline = next((row["seconds"] for row in rows if (row["hook"], row["provider"]) == BASELINE), None)
    for row in rows:
        known = baseline is not None and row["seconds"] is not None
        row["times_faster"] = round(baseline / row["seconds"], 2) if known else None
    return rows


def _step_ms(race: dict[str, Any]) -> float:
    last = race["reached"]
    return float(1e3 * (race["seconds"][last] - race["seconds"][0]) / (race["steps"][last] - race["steps"][0]))


def _contender_order(races: Sequence[dict[str, Any]]) -> Any:
    order = list(dict.fromkeys((race["hook"], race["provider"]) for race in races))
    return lambda race: order.index((race["hook"], race["provider"]))


def target_of(measured: dict[str, Any]) -> str:
    """What score ended a training."""
    return f"{measured['score']} {'>=' if measured['rises'] else '<='} {measured['target']:g}"


def race_table(measured: dict[str, Any], facts: dict[str, Any]) -> Table:
    """A row for each contender, with what the numbers mean below."""
    title = (
        f"{measured['task']}, {measured['parameters']:,} parameters\n"
        f"{measured['hosts']} hosts, link: {measured['rate']}; until {target_of(measured)}"
    )
    caption = (
        "steps, seconds, sent: until then, medians over the seeds; looking is not counted\n"
        "faster: than PyTorch's DDP without a hook\n"
        f"sent: by rank 0's interface; PowerSGD sends the first {measured['plain_steps']} steps whole\n"
        f"{machine_line(facts)}"
    )
    table = bench_table(title, caption, ("hook", "reached", "steps", "seconds", "sent", "faster"))
    for row in summarize(measured["races"]):
        table.add_row(
            f"{row['hook']}, {row['provider']}",
            row["reached"],
            f"{row['steps']:g}" if row["steps"] is not None else "-",
            f"{row['seconds']:.2f}" if row["seconds"] is not None else "-",
            format_bytes(row["sent_bytes"]) if row["sent_bytes"] is not None else "-",
            f"{row['times_faster']:.2f}x" if row["times_faster"] is not None else "-",
        )
    return table


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(
        TASKS[given["task"]](),
        given["hooks"],
        link_named(given["rate"]),
        given["seeds"],
        Path(given["path"]),
    )
    leave()
