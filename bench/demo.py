"""The demo: train a small network on handwritten digits once with each hook. `measure` starts the ranks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

from gradwire import DistributedDataParallel
from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, is_equal_everywhere
from gradwire.bench.record import ACCURACY, SENT_PER_STEP, STEP_MS, TRAINING_LOSS, Measured, Record, percentiles_ms
from gradwire.bench.tables import Table, count, median_of, pivot, relative, spread, value
from gradwire.comm.connections import connections_of
from gradwire.planner.hook_registry import HOOKS, label

GLOBAL_BATCH = 64  # over all ranks; less where they do not divide it
SPLIT_SEED = 0
PLAIN_STEPS = 10  # before low-rank hooks begin to compress


class Digits(NamedTuple):
    """Images as float32 [n, 1, 8, 8] from 0 to 1, labels as int64 [n], on the training device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data(device: torch.device) -> Digits:
    """scikit-learn's 1797 handwritten digits, a quarter of them for testing."""
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
    """A small convolutional network with batch normalisation, for 8 x 8 images of ten classes."""
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
    """Number of images in a step, over all ranks."""
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
        self.transports = (connections.executor(device).transport, self.model.reducer.transport)
        self.losses: list[float] = []
        self.sent_bytes: list[int] = []
        self.seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch and measure it."""
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
        """Check the training and sum it up; every rank calls it.

        Raises:
            RuntimeError: the loss is not finite, or the ranks ended with different weights.
        """
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError("The ranks ended with different weights.")
        losses = mean_over_ranks(self.losses, data.train_labels.device)
        last_epoch = losses[-(len(losses) // epochs) :]
        sent = list(itertools.accumulate(self.sent_bytes))
        metrics: dict[str, dict[str, Any]] = {
            TRAINING_LOSS: {"p50": statistics.fmean(last_epoch), "series": losses},
            ACCURACY: {"p50": 100 * accuracy(self.model.module, data)},
            SENT_PER_STEP: {"p50": statistics.fmean(self.sent_bytes), "series": sent},
            STEP_MS: percentiles_ms(self.seconds),
        }
        case, ranks = {"hook": self.hook}, dist.get_world_size()
        return [
            Record(bench="demo", case=case, implementation=GRADWIRE, ranks=ranks, metric=metric, **numbers)
            for metric, numbers in metrics.items()
        ]


def measure(hooks: Sequence[str], processes: int, epochs: int, seed: int) -> Measured:
    """Train once with each hook.

    Args:
        hooks: names in `HOOKS`.
        processes: world size; on GPUs if there is one for each, else on the CPU.
        epochs: passes over the training images.
        seed: of the initial weights and the order of the data; the split is always the same.

    Raises:
        LaunchError: a rank failed.
    """
    asked = {"hooks": list(hooks), "epochs": epochs, "seed": seed}
    records = launch.run("gradwire.bench.demo", asked, processes, demo_device(processes))
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


def demo_device(processes: int) -> torch.device:
    """GPUs if every process can have its own, else the CPU."""
    return torch.device("cuda" if torch.cuda.device_count() >= max(2, processes) else "cpu")


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """One rank: the trainings take turns step by step, so that background load falls on all of them."""
    data, hooks, epochs = load_data(device), settings["hooks"], settings["epochs"]
    batches = make_batches(len(data.train_labels), epochs, settings["seed"]).to(device)
    trainings = [Training(hook, settings["seed"], len(batches), device) for hook in hooks]
    with make_progress() as progress:
        tasks = [progress.add_task(hook, total=len(batches), loss=math.nan) for hook in hooks]
        for batch in batches:
            images, labels = data.train_images[batch], data.train_labels[batch]
            for task, training in zip(tasks, trainings, strict=True):
                training.step(images, labels)
                progress.update(task, advance=1, loss=training.losses[-1])
    return [record for training in trainings for record in training.records(epochs, data)]


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
        TimeElapsedColumn(),
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
    return f"Handwritten digits, {sizes}, {count(settings['epochs'], 'epoch')}"


def tables(records: Sequence[Record]) -> list[Table]:
    """A row per hook."""
    none = [record for record in records if record["hook"] == "none"]
    columns = [
        ("training loss", value(TRAINING_LOSS)),
        (ACCURACY, value(ACCURACY)),
        ("sent per step", value(SENT_PER_STEP)),
        ("vs. no hook", relative(SENT_PER_STEP, median_of(none, SENT_PER_STEP))),
        (STEP_MS, spread(STEP_MS)),
        ("vs. no hook", relative(STEP_MS, median_of(none, STEP_MS))),
    ]
    names = {"hook": lambda record: label(record["hook"]).removesuffix(" *")}
    return [pivot(title(records), records, names, columns, _notes(records))]


def _notes(records: Sequence[Record]) -> list[str]:
    facts = records[0].provenance
    settings = facts["settings"]
    has_feedback = any(HOOKS[record["hook"]].error_feedback for record in records)
    steps = settings["plain_steps"]
    plain = f"; hooks with error feedback send the first {steps} steps uncompressed" if has_feedback else ""
    link = "memory" if facts["backend"] == "gloo" else "NVLink, PCIe or memory"
    return [
        f"training loss: mean of the last epoch. Test accuracy: on {settings['test_images']} images",
        f"sent per step: payload that a rank passes to collectives, mean of all steps{plain}",
        f"step time: median (20th-80th percentile), in turns. All ranks ran on one machine, where the link is {link}: "
        "a network gives other times",
    ]


if __name__ == "__main__":
    launch.work(main)
