"""Two small training tasks with a target, on data that every machine has, and their training with a hook."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn import functional
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from gradwire.bench.gradient_checks import is_equal_everywhere
from gradwire.bench.implementations import GRADWIRE, ONE_BUCKET_MB, PYTORCH, TorchDDP, maker_of, needs_one_bucket, wrap
from gradwire.comm.connections import connections_of
from gradwire.hooks.by_name import hook_named
from gradwire.planner.hook_registry import COMPARABLE, HookEntry, PyTorchHook
from gradwire.reducer import DistributedDataParallel

Batch = tuple[Tensor, Tensor]  # inputs and labels
CPU = torch.device("cpu")
PLAIN_STEPS = 2  # uncompressed steps of quantized and low-rank hooks: the fewest that PyTorch's powerSGD_hook accepts
RAMP_STEPS = 10  # steps until the learning rate has its full size
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}
NO_FEEDBACK = "powersgd-r4-no-feedback"
_NO_FEEDBACK = hook_named(NO_FEEDBACK)
TRAINED_HOOKS = COMPARABLE | {
    NO_FEEDBACK: HookEntry(
        description="factors of rank 4, without error feedback",
        make=lambda group, start: (_NO_FEEDBACK.state(group, start_powerSGD_iter=start), _NO_FEEDBACK.hook),
        pytorch=PyTorchHook(
            make=lambda group, start: (
                torch_powersgd.PowerSGDState(group, 4, start, use_error_feedback=False),
                torch_powersgd.powerSGD_hook,
            ),
            one_bucket=True,
        ),
    )
}


class Task(ABC):
    title: str  # title of tables and plots
    score: str  # name of the validation metric, with its unit
    target: float  # the score that ends a training
    rises: bool  # whether a higher score is better
    evaluate_every: int  # steps between evaluations
    max_steps: int  # length of a training that misses the target
    optimizers: tuple[str, ...]  # names of optimizers; the first is the default

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A model with weights from PyTorch's generator."""

    @abstractmethod
    def make_optimizers(self, model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
        """The optimizers that update a model together, by a name of `optimizers`."""

    @abstractmethod
    def batches(self, seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        """A rank's share of every batch, endless."""

    @abstractmethod
    def score_of(self, model: nn.Module) -> float:
        """The score on data that the model was not trained on."""

    @abstractmethod
    def validation_loss(self, model: nn.Module) -> float:
        """Mean cross entropy in nats, on as much of that data as a training can afford at a few steps."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy, in nats."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def is_reached(self, score: float) -> bool:
        return score >= self.target if self.rises else score <= self.target


class Digits(Task):
    """scikit-learn's 1797 handwritten digits, float32 [n, 1, 8, 8] from 0 to 1; a quarter of them are for testing."""

    title = "Convolutional network on 8 x 8 digits"
    score = "test accuracy (%)"
    target = 97.5
    rises = True
    evaluate_every = 5
    max_steps = 250
    optimizers = ("sgd", "adamw")

    def __init__(self, device: torch.device = CPU) -> None:
        from sklearn.datasets import load_digits  # only trainings need it
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
        parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
        self.train_images, self.test_images, self.train_labels, self.test_labels = (part.to(device) for part in parts)

    def make_model(self) -> nn.Module:
        """A small convolutional network with batch normalization."""

        def block(channels_in: int, channels_out: int) -> list[nn.Module]:
            convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]

        return nn.Sequential(
            *block(1, 32),
            *block(32, 64),
            nn.MaxPool2d(2),
            *block(64, 128),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def make_optimizers(self, model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
        if name == "adamw":
            return [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)]
        return [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)]

    @staticmethod
    def batch_size(ranks: int) -> int:
        """Images of a step: 64 over all ranks, or fewer if the ranks do not divide 64."""
        return 64 // ranks * ranks

    def batches(self, seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        images, size = len(self.train_labels), self.batch_size(ranks)
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(images, generator=generator)
            for start in range(0, images - size + 1, size):
                mine = order[start + rank : start + size : ranks]
                yield self.train_images[mine], self.train_labels[mine]

    def score_of(self, model: nn.Module) -> float:
        correct = int((model(self.test_images).argmax(1) == self.test_labels).sum())
        return 100 * correct / len(self.test_labels)

    def validation_loss(self, model: nn.Module) -> float:
        return self.loss(model, (self.test_images, self.test_labels)).item()


class Text(Task):
    """A small GPT that predicts the next byte of the Python standard library's sources; every tenth file validates.

    A unigram model of bytes has a loss of 3.2 nats, a bigram model 2.56.
    """

    title = "GPT on the bytes of Python's standard library"
    score = "validation loss (nats per byte)"
    target = 2.5
    rises = False
    evaluate_every = 5
    max_steps = 600
    optimizers = ("adamw", "muon", "sgd")
    length, batch = 64, 4  # bytes of a sequence, sequences of a rank in a step
    scored_sequences, validation_sequences = 32, 1024  # of a score and of a validation loss

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        if len(files) < 20:
            raise ValueError(
                f"{Path(os.__file__).parent} has {len(files)} Python files; expected the standard library's sources. "
                "Run this with a Python that has them, or choose the task digits."
            )
        texts = [file.read_bytes() for file in files]
        self._train, validation = (
            torch.tensor(list(b"".join(part)))
            for part in ([text for i, text in enumerate(texts) if i % 10], texts[::10])
        )
        self._scored, self._validation = (
            self._cut(validation, torch.linspace(0, len(validation) - self.length - 1, sequences).long())
            for sequences in (self.scored_sequences, self.validation_sequences)
        )

    def make_model(self) -> nn.Module:
        return Gpt(layers=5, width=192, length=self.length)

    def make_optimizers(self, model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
        """With Muon, AdamW updates every parameter that is not a matrix of a layer."""
        if name == "sgd":
            return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
        hidden: list[Tensor] = []
        others: list[Tensor] = []
        for full_name, parameter in model.named_parameters():
            is_hidden = name == "muon" and "layers." in full_name and parameter.ndim == 2
            (hidden if is_hidden else others).append(parameter)
        adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        # Its updates have the root mean square of AdamW's, so both take one learning rate.
        muon = [torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw")] if hidden else []
        return [adamw, *muon]

    def batches(self, seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(ranks * seed + rank)
        while True:
            yield self._cut(
                self._train, torch.randint(len(self._train) - self.length, (self.batch,), generator=generator)
            )

    def score_of(self, model: nn.Module) -> float:
        return self.loss(model, self._scored).item()

    def validation_loss(self, model: nn.Module) -> float:
        return self.loss(model, self._validation).item()

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        """Sequences of bytes, and the byte that follows each."""
        places = starts[:, None] + torch.arange(self.length + 1)
        return text[places[:, :-1]], text[places[:, 1:]]


class SmallText(Text):
    """The task with a smaller model, for long trainings."""

    title = "Small GPT on the bytes of Python's standard library"

    def make_model(self) -> nn.Module:
        return Gpt(layers=3, width=128, length=self.length)


class Gpt(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        # Not a buffer: every step would broadcast it.
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


TASKS: dict[str, type[Task]] = {"digits": Digits, "text": Text, "small-text": SmallText}


class Training:
    """A model in training on a task with one hook, and its measurements so far.

    It has the weights of ``seed``, and compresses from step ``start`` on. ``sent_bytes`` returns the bytes sent so far;
    by default the payload that the model's collectives were passed. ``optimizer`` is a name of the task's.
    """

    def __init__(
        self,
        task: Task,
        hook: str,
        implementation: str,
        seed: int,
        start: int,
        device: torch.device = CPU,
        sent_bytes: Callable[[], int] | None = None,
        optimizer: str | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.task = task
        self.hook = hook
        self.implementation = implementation
        entry = TRAINED_HOOKS[hook]
        one_bucket = needs_one_bucket(entry, implementation, device)
        self.model, self.state = wrap(
            task.make_model().to(device),
            maker_of(entry, implementation),
            DistributedDataParallel if implementation == GRADWIRE else TorchDDP,
            start,
            bucket_cap_mb=ONE_BUCKET_MB if one_bucket else None,
        )
        self.optimizers = task.make_optimizers(self.model, optimizer or task.optimizers[0])
        self.schedules: list[LRScheduler] = []
        self._sent_so_far = sent_bytes or self._payload_bytes
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.sent_bytes: list[int] = []

    def step(self, batch: Batch) -> None:
        sent_before = self._sent_so_far()
        dist.barrier()
        start = time.perf_counter()
        loss = self.task.loss(self.model, batch)
        self.model.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append(loss.item())  # on a GPU, this waits for the whole step
        self.seconds.append(time.perf_counter() - start)
        for schedule in self.schedules:
            schedule.step()
        dist.barrier()
        self.sent_bytes.append(self._sent_so_far() - sent_before)

    def _payload_bytes(self) -> int:
        assert isinstance(self.model, DistributedDataParallel)
        device = next(self.model.parameters()).device
        executor = connections_of(self.model.process_group).executor(device)
        return executor.transport.payload_bytes + self.model.reducer.exchange.transport.payload_bytes

    def mean_losses(self) -> list[float]:
        """The training loss of each step, the mean over the ranks. Raises RuntimeError if one is not finite."""
        losses = torch.tensor(self.losses, dtype=torch.float64, device=next(self.model.parameters()).device)
        dist.all_reduce(losses)
        if not losses.isfinite().all():
            raise RuntimeError("The training loss is not finite.")
        mean: list[float] = (losses / dist.get_world_size()).tolist()
        return mean

    def evaluate(self, score_of: Callable[[nn.Module], float] | None = None) -> float:
        """A score of rank 0's model, by default the task's, on every rank: batch statistics differ between ranks."""
        score_of = score_of or self.task.score_of
        module = self.model.module
        module.eval()
        with torch.no_grad():
            score = score_of(module) if dist.get_rank() == 0 else 0.0
        module.train()
        shared = torch.tensor(score, dtype=torch.float64, device=next(module.parameters()).device)
        dist.broadcast(shared, 0)
        return shared.item()

    def check_weights(self) -> None:
        """Raise RuntimeError if the ranks hold different weights. A collective call."""
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError(
                f"{self.hook}, {self.implementation}: the ranks ended with different weights; nothing is reported."
            )


def implementations_of(hook: str) -> list[str]:
    """The implementations that train with a hook: PyTorch only if it has the hook; its closest is another row."""
    return [PYTORCH, GRADWIRE] if TRAINED_HOOKS[hook].pytorch.is_same else [GRADWIRE]


def ramps(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Schedules that raise the learning rates to their full size in `RAMP_STEPS`."""
    return [LinearLR(each, 1 / RAMP_STEPS, total_iters=RAMP_STEPS) for each in optimizers]


def describe(task: Task) -> dict[str, Any]:
    """Settings of a task for the provenance."""
    return {
        "task": task.title,
        "parameters": sum(parameter.numel() for parameter in task.make_model().parameters()),
        "score": task.score,
        "target": task.target,
        "rises": task.rises,
    }
