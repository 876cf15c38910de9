"""`gradwire bench anywhere`: training loops without gradwire's DDP, plain and with `gradwire.collectives`.

The loops of `gradwire.bench.loops` train one model on two hosts of one and of two ranks, joined by a rate-limited link.
All of them live in the same processes and take turns step by step. The hosts are network namespaces.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.bench import launch, namespaces
from gradwire.bench.gradient_checks import is_equal_everywhere
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.loops import LOOPS
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.nodes import TOLERANCES, UNCOMPRESSED, Bytes, exact_means
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.tables import Cell, Group, Table, count, format_rate, format_value, groups_of, median_of, pivot
from gradwire.bench.tasks import Batch
from gradwire.bench.timing import slowest, time_in_turn, turns

METHODS = (UNCOMPRESSED, "int8", "int4")
CASES = {"each": METHODS, "all": METHODS, "muon": METHODS, "zero": METHODS[:2]}
TITLES = {
    "each": "AdamW, all-reduce of each p.grad",
    "all": "AdamW, one all-reduce of all p.grad",
    "muon": "Muon, reduce-scatter",
    "zero": "ZeroRedundancyOptimizer, DDP",
}
TRAINED = ("all", "muon", "zero")  # "each" has the means of "all"
DEFAULT_RATES = ("100mbit", "1gbit")
HOSTS, RANKS_PER_HOST = 2, (1, 2)


class SmallBytes(Bytes):
    """The task of `gradwire.bench.nodes` with a smaller model."""

    layers, width = 4, 192
    validation_sequences = 128


class AnywhereCase:
    """The model in one loop with one method."""

    def __init__(self, task: Bytes, loop: str, method: str) -> None:
        self.task = task
        self.loop = loop
        self.method = method
        self.model = task.make_model()
        self._loop = LOOPS[loop](self.model, None if method == UNCOMPRESSED else method)
        self.seconds: list[float] = []  # timed steps on the slowest rank
        self.link_bytes: list[int] = []  # that the interface of this rank's host has sent in these steps

    def step(self, batch: Batch) -> float:
        """Seconds of a training step."""
        start = time.perf_counter()
        self._loop.step(lambda model: self.task.loss(model, batch))
        return time.perf_counter() - start

    def check(self, batch: Batch, means: dict[str, Tensor]) -> None:
        """Take a first step; compare its gradients with their exact means, and the parameters of all ranks.

        Raises RuntimeError if they are wrong.
        """
        self.step(batch)
        used = self._loop.means()
        found = nn.utils.parameters_to_vector(used.values()).double()
        mean = nn.utils.parameters_to_vector(means[name] for name in used)
        (error,) = slowest([float((found - mean).norm() / mean.norm())])
        if not error < TOLERANCES[self.method]:
            raise RuntimeError(
                f"{TITLES[self.loop]}, {self.method}: the gradients deviate from their mean by {error:.2g} of it; "
                f"expected less than {TOLERANCES[self.method]:.2g}. Nothing is timed."
            )
        self.check_parameters()

    def check_parameters(self) -> None:
        """Raise RuntimeError if the ranks hold different parameters. A collective call."""
        if not is_equal_everywhere(nn.utils.parameters_to_vector(self.model.parameters()).detach()):
            raise RuntimeError(f"{TITLES[self.loop]}, {self.method}: the parameters differ between ranks.")

    def times(self, rate: str) -> list[Record]:
        """Step times and bytes at one rate."""
        metrics: dict[str, Any] = {Metric.STEP_MS: percentiles_ms(self.seconds)}
        if self.link_bytes:
            metrics[Metric.SENT_PER_STEP] = median(self.link_bytes)
        return self._records({"rate": rate}, metrics)

    def loss(self) -> list[Record]:
        """The validation loss, after a training."""
        self.check_parameters()
        with torch.no_grad():
            return self._records({}, {Metric.VALIDATION_LOSS: round(self.task.validation_loss(self.model), 4)})

    def _records(self, case: dict[str, Any], metrics: dict[str, Any]) -> list[Record]:
        by = PYTORCH if self.method == UNCOMPRESSED else GRADWIRE
        return records_of(
            "anywhere", case | {"loop": self.loop, "method": self.method}, by, dist.get_world_size(), metrics
        )


def measure(rates: Sequence[Rate], steps: int, training_steps: int) -> Measured:
    """Step times and bytes of every loop over links between hosts or over loopback; losses after trainings."""
    settings = {"rates": [rate.name for rate in rates], "steps": steps, "training_steps": training_steps, "threads": 1}
    records = []
    for ranks in RANKS_PER_HOST:
        with places_of(HOSTS, rates, ranks) as places:
            records += launch.run(__name__, settings, places)
    records += launch.run(__name__, settings | {"is_training": True}, HOSTS)
    parameters = sum(p.numel() for p in SmallBytes().make_model().parameters())
    return Measured(settings | {"hosts": HOSTS, "parameters": parameters}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task = SmallBytes()
    batches = task.batches(0, dist.get_rank(), dist.get_world_size())
    if "is_training" in settings:
        return train(task, list(islice(batches, settings["training_steps"])))
    return time_steps(task, list(map(Rate.named, settings["rates"])), list(islice(batches, settings["steps"])))


def make_cases(task: Bytes, loops: Iterable[str]) -> list[AnywhereCase]:
    return [AnywhereCase(task, loop, method) for loop in loops for method in CASES[loop]]


def time_steps(task: Bytes, rates: Sequence[Rate], batches: Sequence[Batch]) -> list[Record]:
    """Check the first steps of all loops, then time interleaved ones. A collective call."""
    cases, model = make_cases(task, CASES), task.make_model()
    means = dict(zip(dict(model.named_parameters()), exact_means(model, task, batches[0]), strict=True))
    for case in cases:
        case.check(batches[0], means)
    sent_bytes = None if all(rate.is_loopback for rate in rates) else namespaces.sent_bytes
    records = []
    for rate in rates:
        if os.environ["LOCAL_RANK"] == "0":
            limit(rate)
        dist.barrier()
        time_in_turn(cases, range(len(batches)), rate.name, batches.__getitem__, sent_bytes)
        records += [record for case in cases for record in case.times(rate.name)]
    return records


def train(task: Bytes, batches: Sequence[Batch]) -> list[Record]:
    """Train with every loop but "each"; the validation losses. A collective call."""
    cases = make_cases(task, TRAINED)
    for step, case in turns(range(len(batches)), cases, "training"):
        case.step(batches[step])
    return [record for case in cases for record in case.loss()]


def tables(records: Sequence[Record]) -> list[Table]:
    """A row for each loop and number of ranks, a column for each method: step times at each rate, bytes, loss."""
    settings = records[0].provenance["settings"]
    result = []
    timed = [record for record in records if "rate" in record.case]
    groups = groups_of(timed, "rate")
    for (rate,), group in groups:
        result.append(_table(f"{Metric.STEP_MS}, link between hosts: {format_rate(rate)}", group, Metric.STEP_MS))
    (rate,), last = groups[-1]
    if median_of(last, Metric.SENT_PER_STEP) is not None:
        result.append(_table(f"Sent per step by a host, at {format_rate(rate)}", last, Metric.SENT_PER_STEP))
    trained = [record for record in records if record.metric == Metric.VALIDATION_LOSS]
    title = f"Validation loss after {settings['training_steps']} steps"
    return [*result, _table(title, trained, Metric.VALIDATION_LOSS, _notes(settings))]


def _table(title: str, records: Sequence[Record], metric: str, notes: Sequence[str] = ()) -> Table:
    shown = [record for record in records if record.metric == metric]
    names = {"loop": lambda record: TITLES[record["loop"]], "ranks": lambda record: str(record.ranks)}
    return pivot(title, shown, names, [(method, _cell(method, metric)) for method in METHODS], notes)


def _cell(method: str, metric: str) -> Cell:
    """A cell with the median of a method, and the speed-up of a step time over the plain loop."""

    def text(group: Group) -> str:
        plain, found = (
            median_of((record for record in group if record["method"] == each), metric)
            for each in (UNCOMPRESSED, method)
        )
        if found is None:
            return "-"
        is_compared = metric == Metric.STEP_MS and method != UNCOMPRESSED
        return format_value(metric, found) + (f" ({plain / found:.2g}x)" if is_compared and plain else "")

    return text


def _notes(settings: dict[str, Any]) -> list[str]:
    return [
        f"model: GPT with {SmallBytes.layers} layers of width {SmallBytes.width}, {settings['parameters']:,} "
        f"parameters; {SmallBytes.length} bytes of text per rank",
        f"step time: forward, backward and optimizer on the slowest rank, median of {settings['steps']} interleaved "
        "steps",
        "in parentheses: speed-up over the plain loop, which calls torch.distributed",
        "int8 and int4: the same loop with gradwire.collectives; int4 with Memory; -: a process group has none",
        f"{count(settings['hosts'], 'host')}, with one or two ranks each; sent: bytes on the interface of rank 0's "
        "host, with headers",
        f"losses: trained on {count(settings['hosts'], 'rank')} without a limited link, with one seed",
    ]
