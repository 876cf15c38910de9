"""Tasks of `gradwire bench converge`: two small trainings with a target, on data that every machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from gradwire.bench.demo import GLOBAL_BATCH, accuracy, load_data, make_network

Batch = tuple[Tensor, Tensor]  # inputs and labels


class Task:
    title: str  # title of tables and plots
    score: str  # name of the validation metric, with its unit
    target: float  # the score that ends a training
    rises: bool  # whether a higher score is better
    evaluate_every: int  # steps between evaluations
    max_steps: int  # length of a training that misses the target

    make_model: Callable[[], nn.Module]  # with weights from PyTorch's generator
    # its learning rate rises to its value in the first `WARM_UP` steps and stays there
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int], Iterator[Batch]]  # from a seed: this rank's share of every batch, endless
    score_of: Callable[[nn.Module], float]  # on data that the model was not trained on

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy, in nats."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def is_reached(self, score: float) -> bool:
        return score >= self.target if self.rises else score <= self.target


class Digits(Task):
    title = "Convolutional network on 8 x 8 digits"
    score = "test accuracy (%)"
    target = 97.5
    rises = True
    evaluate_every = 5
    max_steps = 250

    def __init__(self) -> None:
        self._data = load_data(torch.device("cpu"))

    def make_model(self) -> nn.Module:
        return make_network()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def batches(self, seed: int) -> Iterator[Batch]:
        images, ranks = len(self._data.train_labels), dist.get_world_size()
        size = GLOBAL_BATCH // ranks * ranks
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(images, generator=generator)
            for start in range(0, images - size + 1, size):
                mine = order[start + dist.get_rank() : start + size : ranks]
                yield self._data.train_images[mine], self._data.train_labels[mine]

    def score_of(self, model: nn.Module) -> float:
        return 100 * accuracy(model, self._data)


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
    length, batch = 64, 4  # bytes of a sequence, sequences of a rank in a step
    validation_sequences = 32

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
        starts = torch.linspace(0, len(validation) - self.length - 1, self.validation_sequences).long()
        self._validation = self._cut(validation, starts)

    def make_model(self) -> nn.Module:
        return Gpt(layers=5, width=192, length=self.length)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(dist.get_world_size() * seed + dist.get_rank())
        while True:
            yield self._cut(
                self._train, torch.randint(len(self._train) - self.length, (self.batch,), generator=generator)
            )

    def score_of(self, model: nn.Module) -> float:
        return self.loss(model, self._validation).item()

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        """Sequences of bytes, and the byte that follows each."""
        places = starts[:, None] + torch.arange(self.length + 1)
        return text[places[:, :-1]], text[places[:, 1:]]


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


TASKS: dict[str, type[Task]] = {"digits": Digits, "text": Text}


def parameters_of(task: Task) -> int:
    return sum(parameter.numel() for parameter in task.make_model().parameters())


def evaluate(task: Task, model: nn.Module) -> float:
    """The score of rank 0's model on every rank: batch statistics differ between ranks."""
    model.eval()
    score = torch.tensor(task.score_of(model) if dist.get_rank() == 0 else 0.0, dtype=torch.float64)
    dist.broadcast(score, 0)
    model.train()
    return score.item()


def describe(task: Task) -> dict[str, Any]:
    """Settings of a task for the provenance."""
    return {
        "task": task.title,
        "parameters": parameters_of(task),
        "score": task.score,
        "target": task.target,
        "rises": task.rises,
    }
