"""Time to a target over a slow network: the same training with each hook, until it is good enough.

The digits network of the demo, on hosts that are joined at one rate (see `gradwire.bench.network`). All contenders live
in the same processes and take turns step by step; each counts its own time and bytes, and stops where its accuracy on
the test images reaches the target. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn import functional

from gradwire import DistributedDataParallel
from gradwire.bench import namespaces
from gradwire.bench.contenders import GRADWIRE, ONE_BUCKET_MB, PYTORCH
from gradwire.bench.demo import GLOBAL_BATCH, Digits, accuracy, load_data, make_network
from gradwire.bench.hooks import HOOKS, HookEntry, Peer
from gradwire.bench.launch import exit_with_launcher
from gradwire.bench.measuring import slowest
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, link_named, run_on_hosts
from gradwire.bench.report import bench_table, format_bytes, machine_line
from gradwire.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

NO_FEEDBACK = "powersgd-r4-no-feedback"
DEFAULT_HOOKS = ("none", "fp16", "powersgd-r4", NO_FEEDBACK)
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
TARGET = 0.975
EVALUATE_EVERY = 5
MOST_EPOCHS = 12
PLAIN_STEPS = 10  # before low-rank hooks begin to compress
LEARNING_RATE = 0.02
WARM_UP = 10  # steps until the learning rate has its full size
_DEVICE = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Race:
    """One training.

    Attributes:
        seed: of the weights and the order of the data.
        hook: its name in `RACED`.
        provider: whose hook, on whose DDP.
        steps: at which the accuracy was looked at.
        seconds: of training until then, on the slower rank of each step; looking is not counted.
        sent_bytes: that rank 0's interface had sent until then; empty on loopback.
        accuracies: of the test images.
        reached: the index of the first accuracy that is the target or more; None if there is none.
    """

    seed: int
    hook: str
    provider: str
    steps: list[int]
    seconds: list[float]
    sent_bytes: list[float]
    accuracies: list[float]
    reached: int | None


@dataclass
class Racer:
    """A network on its way, and what was measured so far."""

    hook: str
    provider: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    counts_bytes: bool
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, hook: str, provider: str, seed: int, counts_bytes: bool) -> Racer:
        """The same weights for each contender; a process group for each, as hooks of one share their wire memory."""
        torch.manual_seed(seed)
        group = dist.new_group()
        entry = RACED[hook]
        model: nn.Module
        if provider == GRADWIRE:
            model = DistributedDataParallel(make_network(), process_group=group)
            registration = entry.make(group, PLAIN_STEPS)
        else:
            assert entry.peer is not None
            cap = ONE_BUCKET_MB if entry.peer.one_bucket else None
            model = nn.parallel.DistributedDataParallel(make_network(), process_group=group, bucket_cap_mb=cap)
            registration = entry.peer.make(group, PLAIN_STEPS)
        if registration is not None:
            model.register_comm_hook(*registration)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
        return cls(hook, provider, model, optimizer, schedule, counts_bytes)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch."""
        self.model.train()
        sent_before = self._interface_bytes()
        dist.barrier()
        start = time.perf_counter()
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()
        dist.barrier()
        self.sent_bytes.append(self._interface_bytes() - sent_before)

    def _interface_bytes(self) -> int:
        return namespaces.sent_bytes() if self.counts_bytes else 0

    def look(self, data: Digits) -> bool:
        """Note the accuracy of rank 0, whose batch statistics differ; returns whether it is the target or more."""
        self.steps.append(len(self.seconds))
        assert isinstance(self.model.module, nn.Module)
        right = torch.tensor(accuracy(self.model.module, data), dtype=torch.float64)
        dist.broadcast(right, 0)
        self.accuracies.append(right.item())
        return self.accuracies[-1] >= TARGET

    def race(self, seed: int) -> Race:
        """What was measured. A collective call."""
        seconds = list(itertools.accumulate(slowest(self.seconds)))
        sent = list(itertools.accumulate(self.sent_bytes))
        reached = [accuracy >= TARGET for accuracy in self.accuracies]
        return Race(
            seed=seed,
            hook=self.hook,
            provider=self.provider,
            steps=self.steps,
            seconds=[round(seconds[step - 1], 4) for step in self.steps],
            sent_bytes=[sent[step - 1] for step in self.steps] if self.counts_bytes else [],
            accuracies=self.accuracies,
            reached=reached.index(True) if True in reached else None,
        )


def measure(hooks: Sequence[str], rate: Rate, seeds: int, count: int) -> dict[str, Any]:
    """Trainings with each hook until the target.

    Args:
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
    settings = {"hooks": list(hooks), "rate": rate.name, "seeds": seeds}
    return run_on_hosts("gradwire.bench.converge", settings, rate == LOOPBACK, count)


def main(hooks: Sequence[str], rate: Rate, seeds: int, path: Path) -> None:
    """One rank."""
    exit_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    if rate != LOOPBACK:
        namespaces.limit(rate)
    data = load_data(_DEVICE)
    contenders = list(itertools.product(hooks, (PYTORCH, GRADWIRE)))
    races: list[Race] = []
    with Progress(disable=dist.get_rank() != 0) as progress:
        for seed in range(seeds):
            racers = [Racer.make(hook, provider, seed, rate != LOOPBACK) for hook, provider in contenders]
            task = progress.add_task(f"seed {seed}", total=len(racers))
            running = list(racers)
            for batch in batches(len(data.train_labels), seed):
                for racer in running:
                    racer.step(data.train_images[batch], data.train_labels[batch])
                if len(running[0].seconds) % EVALUATE_EVERY == 0:
                    running = [racer for racer in running if not racer.look(data)]
                    progress.update(task, completed=len(racers) - len(running))
                if not running:
                    break
            races += [racer.race(seed) for racer in racers]
    if dist.get_rank() == 0:
        document = {
            "task": "8 x 8 digits, convolutional network",
            "parameters": sum(parameter.numel() for parameter in make_network().parameters()),
            "target": TARGET,
            "rate": rate.name,
            "hosts": dist.get_world_size(),
            "plain_steps": PLAIN_STEPS,
            "races": [asdict(race) for race in races],
        }
        path.write_text(json.dumps(document))
    dist.destroy_process_group()


def batches(images: int, seed: int) -> Iterator[Tensor]:
    """This rank's share of every batch: indices of images."""
    ranks = dist.get_world_size()
    size = GLOBAL_BATCH // ranks * ranks
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MOST_EPOCHS):
        order = torch.randperm(images, generator=generator)
        for start in range(0, images - size + 1, size):
            yield order[start + dist.get_rank() : start + size : ranks]


def summarize(races: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each contender: medians over the seeds of steps, seconds and bytes to the target; None if one missed it."""
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
                "sent_bytes": middle("sent_bytes") if is_sure else None,
            }
        )
    baseline = next((row["seconds"] for row in rows if (row["hook"], row["provider"]) == BASELINE), None)
    for row in rows:
        known = baseline is not None and row["seconds"] is not None
        row["times_faster"] = round(baseline / row["seconds"], 2) if known else None
    return rows


def _contender_order(races: Sequence[dict[str, Any]]) -> Any:
    order = list(dict.fromkeys((race["hook"], race["provider"]) for race in races))
    return lambda race: order.index((race["hook"], race["provider"]))


def race_table(measured: dict[str, Any], facts: dict[str, Any]) -> Table:
    """A row for each contender, with what the numbers mean below."""
    title = (
        f"{measured['task']}, {measured['parameters']:,} parameters\n"
        f"{measured['hosts']} hosts, link: {measured['rate']}; until {100 * measured['target']:.1f} % of the test "
        "images are right"
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
        given["hooks"],
        link_named(given["rate"]),
        given["seeds"],
        Path(given["path"]),
    )
