"""Gradients of real trainings, as several ranks compute them at chosen steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.bench.tasks import TASKS

RANKS = 4
STEPS = (1, 100, 1000)
TRAININGS = [(task, optimizer) for task in ("digits", "text") for optimizer in TASKS[task].optimizers]


def recorded(name: str, optimizer: str) -> Iterator[tuple[int, list[list[Tensor]]]]:
    """Each of `STEPS`, with the gradients there: for every rank those of all matrices and convolution kernels.

    Vectors are left out, because hooks do not compress them. The ranks are simulated one after another, and only at
    these steps: between them, the model trains on the batches of rank 0.
    """
    torch.manual_seed(0)
    task = TASKS[name]()
    model = task.make_model()
    optimizers = task.make_optimizers(model, optimizer)
    batches = [task.batches(0, rank, RANKS) for rank in range(RANKS)]
    parameters = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    for step in range(1, max(STEPS) + 1):
        ranks = []
        for rank in reversed(range(RANKS if step in STEPS else 1)):
            model.zero_grad()
            task.loss(model, next(batches[rank])).backward()
            ranks.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        if step in STEPS:
            yield step, ranks
        for each in optimizers:  # with the gradients of rank 0, which are the last
            each.step()
