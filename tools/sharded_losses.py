"""Losses of trainings whose gradients are reduced by a quantized reduce-scatter, as in FSDP2, with each error memory.

The ranks are simulated in one process: rank r's gradient g of a matrix arrives as Q(g / n + E_r), is added in fp32, and
the optimizer steps on the sum. Nothing is sent back, so there is one rounding. gradwire's int4 is compared with

* ``averaged``: LoCo's memory (Xie et al., IEEE TPAMI 2025, algorithm 1), the moving average
  E = 0.8 E + 0.2 (x - Q(x)), kept in int8, with the factor of DeepSpeed's example. LoCo empties it every 1,024 steps;
* ``int4-128``: the groups of SDP4Bit, without memory and without its rotation.

Both are re-implemented from the papers, with the scales of `tools.formats`; their own code was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from gradwire.bench.record import Measured, Metric, Record, records_of
from gradwire.bench.tables import Table, count, gap, pivot
from gradwire.bench.tasks import PLAIN_STEPS, TASKS, describe, ramps
from gradwire.kernels.wire_formats import round_to_bf16
from tools.formats import GRADWIRE, PUBLISHED, Rounding

TASK = "small-text"
RANKS, STEPS, SEEDS = 4, 600, 2
BETA = 0.8
WINDOW = 60  # last steps of the training loss
PLAIN = "fp32"

Keep = Callable[[Tensor, Tensor], Tensor]  # what a memory holds, from an error and what it held


def _bf16(error: Tensor, _: Tensor) -> Tensor:
    return round_to_bf16(error, torch.randint(1 << 24, error.shape)).float()  # stochastically, as gradwire does


def _averaged(error: Tensor, memory: Tensor) -> Tensor:
    return GRADWIRE["int8"].rounded(BETA * memory + (1 - BETA) * error)


class Method(NamedTuple):
    """A format and an error memory."""

    name: str
    bits: float  # that are sent per element
    rounded: Rounding
    memory: str = "none"  # with its bytes per element of the unsharded model
    keep: Keep = lambda error, memory: memory  # which stays 0


def _gradwire(name: str, *memory: Any) -> Method:
    return Method(name, GRADWIRE[name].bits, GRADWIRE[name].rounded, *memory)


_INT4_128 = PUBLISHED["int4-128"]
METHODS = (
    Method(PLAIN, 32, lambda x: x),
    _gradwire("int8"),
    _gradwire("int6"),
    _gradwire("int4", "fp32, 4 B", lambda error, _: error),
    _gradwire("int4", "bf16, 2 B", _bf16),
    _gradwire("int4", "averaged, int8, 1 B", _averaged),
    _gradwire("int4"),
    Method(_INT4_128.name, _INT4_128.bits, _INT4_128.rounded),
)


def measure() -> Measured:
    """Train with every method and seed."""
    records: list[Record] = []
    for method in track(METHODS, description="trainings"):
        for seed in range(SEEDS):
            case = {"wire": method.name, "memory": method.memory, "seed": seed, "bits": method.bits}
            records += records_of("sharded_losses", case, "simulated", RANKS, trained(method, seed))
    return Measured(describe(TASKS[TASK]()) | {"steps": STEPS, "plain_steps": PLAIN_STEPS}, records)


def trained(method: Method, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """The losses of a training."""
    torch.manual_seed(seed)
    task = TASKS[TASK]()
    model = task.make_model()
    optimizers = task.make_optimizers(model, task.optimizers[0])
    schedules = ramps(optimizers)
    batches = [task.batches(seed, rank, RANKS) for rank in range(RANKS)]
    parameters = list(model.parameters())
    memories = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(RANKS)]
    losses = []
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for rank_batches, errors in zip(batches, memories, strict=True):
            loss = task.loss(model, next(rank_batches))
            losses.append(loss.item())
            for i, gradient in enumerate(torch.autograd.grad(loss, parameters)):
                x = gradient / RANKS
                if step >= PLAIN_STEPS and gradient.ndim > 1:
                    x = x + errors[i]
                    sent = method.rounded(x)
                    errors[i], x = method.keep(x - sent, errors[i]), sent
                sums[i] += x
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    model.eval()
    with torch.no_grad():
        return {
            Metric.VALIDATION_LOSS: task.validation_loss(model),
            Metric.TRAINING_LOSS: fmean(losses[-WINDOW * RANKS :]),
        }


def tables(records: Sequence[Record]) -> list[Table]:
    """A row per format and memory."""
    settings = records[0].provenance["settings"]
    names = {"wire": lambda record: record["wire"], "error memory": lambda record: record["memory"]}
    columns = [
        ("bits per element", lambda group: f"{group[0]['bits']:g}"),
        ("training loss", gap(records, Metric.TRAINING_LOSS, name="wire", plain=PLAIN)),
        ("validation loss", gap(records, Metric.VALIDATION_LOSS, name="wire", plain=PLAIN)),
    ]
    title = (
        f"quantized reduce-scatter, {count(records[0].ranks, 'simulated rank')}: {settings['task']}, "
        f"{settings['parameters']:,} parameters, AdamW, {settings['steps']} steps"
    )
    notes = [
        f"losses in nats: {PLAIN}'s own, and for the others the difference to it with the same seed; mean of {SEEDS} "
        "seeds (range)",
        f"training loss: mean over the last {WINDOW} steps and the ranks; validation loss after the last step",
        "averaged: the memory of LoCo; int4-128: groups of 128, as in SDP4Bit without its rotation; re-implemented",
        "error memory: bytes per element of the unsharded model, on every rank",
    ]
    return [pivot(title, records, names, columns, notes)]
