"""The demo's worker: one rank that trains a small network once with each hook.

``gradwire demo`` starts it under torchrun, with the settings and the path for rank 0's results as JSON. It lives no
longer than its standard input.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

from gradwire import DistributedDataParallel
from gradwire.bench.hooks import HOOKS
from gradwire.bench.launch import exit_with_launcher
from gradwire.bench.results import Results, Run, Settings, provenance, save_results
from gradwire.comm.connections import connections_of

GLOBAL_BATCH = 64  # over all ranks; less where they do not divide it
SPLIT_SEED = 0
PLAIN_STEPS = 10  # before low-rank hooks begin to compress


class Digits(NamedTuple):
    """Images as float32 [n, 1, 8, 8] from 0 to 1, labels as int64 [n]; all of it on the training device."""

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


class Training:
    """One network on its way through training with one hook, and what was measured so far."""

    def __init__(self, hook: str, settings: Settings, steps: int, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
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
        self.step_ms: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch and measure it."""
        sent_before = self._payload_bytes()
        start = time.perf_counter()
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # on a GPU, this waits for the whole step
        self.step_ms.append(1e3 * (time.perf_counter() - start))
        self.sent_bytes.append(self._payload_bytes() - sent_before)
        self.schedule.step()

    def _payload_bytes(self) -> int:
        return sum(transport.payload_bytes for transport in self.transports)

    def finish(self, settings: Settings, data: Digits) -> Run:
        """Check the training and sum it up; every rank calls it.

        Raises:
            RuntimeError: the loss is not finite, or the ranks ended with different weights.
        """
        check_equal_weights(self.model)
        losses = mean_over_ranks(self.losses, data.train_labels.device)
        last_epoch = losses[-(len(losses) // settings.epochs) :]
        deciles = statistics.quantiles(self.step_ms, n=10, method="inclusive")
        return Run(
            hook=self.hook,
            description=HOOKS[self.hook].description,
            final_loss=statistics.fmean(last_epoch),
            test_accuracy=accuracy(self.model.module, data),
            bytes_per_step=statistics.fmean(self.sent_bytes),
            step_ms={f"p{10 * i}": round(deciles[i - 1], 3) for i in (2, 5, 8)},
            losses=losses,
            sent_bytes=list(itertools.accumulate(self.sent_bytes)),
        )


def train_all(settings: Settings, data: Digits, device: torch.device) -> list[Run]:
    """One training for each hook. They take turns step by step, so that what else the machine does falls on all."""
    batches = make_batches(len(data.train_labels), settings).to(device)
    trainings = [Training(hook, settings, len(batches), device) for hook in settings.hooks]
    with make_progress() as progress:
        tasks = [progress.add_task(hook, total=len(batches), loss=math.nan) for hook in settings.hooks]
        for batch in batches:
            images, labels = data.train_images[batch], data.train_labels[batch]
            for task, training in zip(tasks, trainings, strict=True):
                training.step(images, labels)
                progress.update(task, advance=1, loss=training.losses[-1])
    return [training.finish(settings, data) for training in trainings]


def make_batches(images: int, settings: Settings) -> Tensor:
    """This rank's share of every batch of all epochs: indices of images, int64 [steps, images of a rank and step]."""
    size = GLOBAL_BATCH // settings.processes * settings.processes
    generator = torch.Generator().manual_seed(settings.seed)
    orders = [torch.randperm(images, generator=generator) for _ in range(settings.epochs)]
    batches = torch.cat([order[: images // size * size] for order in orders]).view(-1, size)
    return batches[:, dist.get_rank() :: settings.processes]


def make_progress() -> Progress:
    """A line of progress for each training, on rank 0 only."""
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
    """Element by element. Raises RuntimeError if one is not finite."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    if not total.isfinite().all():
        raise RuntimeError("The training loss is not finite.")
    mean: list[float] = (total / dist.get_world_size()).tolist()
    return mean


def check_equal_weights(model: nn.Module) -> None:
    """Raise RuntimeError unless all ranks hold the same parameters, bit by bit."""
    bits = nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise RuntimeError("The ranks ended with different weights.")


@torch.no_grad()
def accuracy(network: nn.Module, data: Digits) -> float:
    """The part of the test images that ``network`` gets right."""
    network.eval()
    correct = int((network(data.test_images).argmax(1) == data.test_labels).sum())
    return correct / len(data.test_labels)


def main(settings: Settings, path: Path) -> None:
    """Train with each hook; rank 0 writes the results."""
    exit_with_launcher()
    use_gpus = torch.cuda.device_count() >= max(2, settings.processes)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if use_gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=device if use_gpus else None)
    facts = provenance(device, backend, torch.get_num_threads())
    data = load_data(device)
    runs = train_all(settings, data, device)
    if dist.get_rank() == 0:
        results = Results(
            provenance=facts,
            settings=settings,
            train_images=len(data.train_labels),
            test_images=len(data.test_labels),
            parameters=sum(parameter.numel() for parameter in make_network().parameters()),
            batch_size=GLOBAL_BATCH // settings.processes * settings.processes,
            plain_steps=PLAIN_STEPS,
            runs=runs,
        )
        save_results(results, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    main(path=Path(asked.pop("path")), settings=Settings.of(asked))
