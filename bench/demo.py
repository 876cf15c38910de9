"""The demo: train a small network on handwritten digits with each hook, over a slow link. `measure` starts the ranks.

All trainings live in the same processes. The next step is always that of the training with the least time so far, so
the progress bars advance as if every hook had the machine and the link to itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional

from gradwire import DistributedDataParallel
from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, is_equal_everywhere
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, limit_to, places_of
from gradwire.bench.record import (
    ACCURACY,
    SENT_PER_STEP,
    STEP_MS,
    TRAINING_LOSS,
    TRAINING_S,
    Measured,
    Record,
    percentiles_ms,
    records_of,
)
from gradwire.bench.tables import Cell, Group, Table, count, format_rate, median_of, pivot, relative, value
from gradwire.comm.connections import connections_of
from gradwire.planner.hook_registry import HOOKS, display_name

GLOBAL_BATCH = 64  # over all ranks; less where they do not divide it
SPLIT_SEED = 0
PLAIN_STEPS = 10  # uncompressed steps of low-rank hooks


class Digits(NamedTuple):
    """Images as float32 [n, 1, 8, 8] from 0 to 1, labels as int64 [n], on the training device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data(device: torch.device) -> Digits:
    """scikit-learn's 1797 handwritten digits, a quarter of them for testing."""
    from sklearn.datasets import load_digits  # only trainings need it
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
        torch.tensor(labels),
        test_size=0.25,
        stratify=labels,
        random_state=SPLIT_SEED,
    )
    return Digits(*(part.to(device) for part in (train_x, train_y, test_x, test_y)))


def make_network() -> nn.Module:
    """A small convolutional network with batch normalization, for 8 x 8 images of ten classes."""
    return nn.Sequential(
        *_block(1, 32),
        *_block(32, 64),
        nn.MaxPool2d(2),
        *_block(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def _block(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]


def batch_size(ranks: int) -> int:
    return GLOBAL_BATCH // ranks * ranks


class Training:
    """One network in training with one hook, and its measurements so far."""

    def __init__(self, hook: str, seed: int, steps: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.hook = hook
        self.model = DistributedDataParallel(make_network().to(device))
        registration = HOOKS[hook].make(self.model.process_group, PLAIN_STEPS)
        if registration is not None:
            self.model.register_comm_hook(*registration)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.02, total_steps=steps)
        connections = connections_of(self.model.process_group)
        self.transports = (connections.executor(device).transport, self.model.reducer.exchange.transport)
        self.losses: list[float] = []
        self.sent_bytes: list[int] = []
        self.seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        sent_before = self._payload_bytes()
        start = time.perf_counter()
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # on a GPU, this waits for the whole step
        self.seconds.append(time.perf_counter() - start)
        self.sent_bytes.append(self._payload_bytes() - sent_before)
        self.schedule.step()

    def _payload_bytes(self) -> int:
        return sum(transport.payload_bytes for transport in self.transports)

    def records(self, epochs: int, data: Digits) -> list[Record]:
        """Check and sum up the training. A collective call. Raises RuntimeError if it diverged or the ranks differ."""
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError("The ranks ended with different weights.")
        losses = mean_over_ranks(self.losses, data.train_labels.device)
        last_epoch = losses[-(len(losses) // epochs) :]
        sent = list(itertools.accumulate(self.sent_bytes))
        metrics: dict[str, Any] = {
            TRAINING_LOSS: {"p50": statistics.fmean(last_epoch), "series": losses},
            ACCURACY: 100 * accuracy(self.model.module, data),
            SENT_PER_STEP: {"p50": statistics.fmean(self.sent_bytes), "series": sent},
            STEP_MS: percentiles_ms(self.seconds),
            TRAINING_S: round(sum(self.seconds), 3),
        }
        return records_of("demo", {"hook": self.hook}, GRADWIRE, dist.get_world_size(), metrics)


def measure(hooks: Sequence[str], rate: Rate, processes: int, epochs: int, seed: int) -> Measured:
    """Train once with each hook."""
    asked = {"hooks": list(hooks), "rate": rate.name, "epochs": epochs, "seed": seed}
    with places_of(processes, is_local=rate == LOOPBACK) as places:
        records = launch.run(__name__, asked, places, demo_device(processes, rate))
    data = load_data(torch.device("cpu"))
    settings = asked | {
        "processes": processes,
        "train_images": len(data.train_labels),
        "test_images": len(data.test_labels),
        "parameters": sum(parameter.numel() for parameter in make_network().parameters()),
        "batch_size": batch_size(processes),
        "plain_steps": PLAIN_STEPS,
    }
    return Measured(settings, records)


def demo_device(processes: int, rate: Rate) -> torch.device:
    """GPUs if every process can have its own and there is no link, else the CPU."""
    has_gpus = torch.cuda.device_count() >= max(2, processes)
    return torch.device("cuda" if has_gpus and rate == LOOPBACK else "cpu")


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    data, hooks, epochs = load_data(device), settings["hooks"], settings["epochs"]
    batches = make_batches(len(data.train_labels), epochs, settings["seed"]).to(device)
    trainings = [Training(hook, settings["seed"], len(batches), device) for hook in hooks]
    limit_to(settings["rate"])
    with make_progress() as progress:
        tasks = [
            progress.add_task(display_name(hook), total=len(batches), loss=math.nan, seconds=0.0) for hook in hooks
        ]
        for _ in range(len(batches) * len(trainings)):
            turn = next_turn([training.seconds for training in trainings], len(batches), device)
            training = trainings[turn]
            batch = batches[len(training.seconds)]
            training.step(data.train_images[batch], data.train_labels[batch])
            progress.update(tasks[turn], advance=1, loss=training.losses[-1], seconds=sum(training.seconds))
    return [record for training in trainings for record in training.records(epochs, data)]


def next_turn(seconds: Sequence[Sequence[float]], steps: int, device: torch.device) -> int:
    """The training that takes the next step: the one with the least time so far, as rank 0 measured it."""
    running = [index for index, durations in enumerate(seconds) if len(durations) < steps]
    choice = torch.tensor(min(running, key=lambda index: sum(seconds[index])), device=device)
    dist.broadcast(choice, 0)
    return int(choice)


def make_batches(images: int, epochs: int, seed: int) -> Tensor:
    """This rank's share of every batch of all epochs: indices of images, int64 [steps, images of a rank and step]."""
    size = batch_size(dist.get_world_size())
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(images, generator=generator) for _ in range(epochs)]
    batches = torch.cat([order[: images // size * size] for order in orders]).view(-1, size)
    return batches[:, dist.get_rank() :: dist.get_world_size()]


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


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The mean of each element over the ranks. Raises RuntimeError if one is not finite."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    if not total.isfinite().all():
        raise RuntimeError("The training loss is not finite.")
    mean: list[float] = (total / dist.get_world_size()).tolist()
    return mean


@torch.no_grad()
def accuracy(network: nn.Module, data: Digits) -> float:
    """Accuracy on the test images, from 0 to 1."""
    network.eval()
    correct = int((network(data.test_images).argmax(1) == data.test_labels).sum())
    return correct / len(data.test_labels)


def title(records: Sequence[Record]) -> str:
    """Task, size, world size and length of the trainings."""
    settings = records[0].provenance["settings"]
    sizes = f"{settings['parameters']:,} parameters, {count(settings['processes'], 'rank')}"
    link = "no limit" if settings["rate"] == LOOPBACK.name else format_rate(settings["rate"])
    return f"Handwritten digits, {sizes}, {count(settings['epochs'], 'epoch')}, link: {link}"


def tables(records: Sequence[Record]) -> list[Table]:
    none = [record for record in records if record["hook"] == "none"]
    columns = [
        ("training loss", value(TRAINING_LOSS)),
        (ACCURACY, value(ACCURACY)),
        ("sent per step", value(SENT_PER_STEP)),
        ("vs. no hook", relative(SENT_PER_STEP, median_of(none, SENT_PER_STEP))),
        (STEP_MS, value(STEP_MS)),
        (TRAINING_S, value(TRAINING_S)),
        ("speed-up", _speed_up(median_of(none, TRAINING_S))),
    ]
    names = {"hook": lambda record: display_name(record["hook"])}
    return [pivot(title(records), records, names, columns, _notes(records))]


def _speed_up(baseline: float | None) -> Cell:
    """A cell with ``baseline`` in units of the training time; a dash without one."""

    def cell(group: Group) -> str:
        seconds = median_of(group, TRAINING_S)
        return f"{baseline / seconds:.2f}x" if baseline and seconds else "-"

    return cell


def verdict(records: Sequence[Record]) -> str:
    """The fastest training compared with the one without a hook, in a sentence; empty if one of them is missing."""
    by_hook = {record["hook"]: record.p50 for record in records if record.metric == TRAINING_S}
    fastest = min(by_hook, key=lambda hook: by_hook[hook] or math.inf)
    plain, best = by_hook.get("none"), by_hook[fastest]
    if not plain or not best or fastest == "none":
        return ""
    link = format_rate(records[0].provenance["settings"]["rate"])
    return f"Over {link}, {fastest} trains in {best:.1f} s, no hook in {plain:.1f} s: {plain / best:.1f} times as fast."


def _notes(records: Sequence[Record]) -> list[str]:
    facts = records[0].provenance
    settings = facts["settings"]
    has_feedback = any(HOOKS[record["hook"]].error_feedback for record in records)
    steps = settings["plain_steps"]
    plain = f"; hooks with error feedback send the first {steps} steps uncompressed" if has_feedback else ""
    if settings["rate"] != LOOPBACK.name:
        link = f"{format_rate(settings['rate'])} between hosts, which are network namespaces of this machine"
    else:
        memory = "memory" if facts["backend"] == "gloo" else "NVLink, PCIe or memory"
        link = f"{memory} of this machine; times over a network differ"
    return [
        f"training loss: mean of the last epoch. Test accuracy: on {settings['test_images']} images",
        f"sent per step: payload that a rank passes to collectives, mean of all steps{plain}",
        "step time: median. Training time: of the hook's own steps. The next step is that of the hook with the least "
        "time so far",
        f"link: {link}",
    ]
