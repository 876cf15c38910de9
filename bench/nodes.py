"""`gradwire bench nodes`: training on nodes of several ranks, over a fast link inside and a slow link between them.

One model trains with DDP, HSDP, `replicate` and FSDP2, each plain and compressed. The nodes are network namespaces:
ranks of one node reach each other over its loopback, and other nodes over a rate-limited interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.bench import launch, namespaces, scale
from gradwire.bench.implementations import GRADWIRE, PYTORCH, TorchDDP
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.scale import FLAT, HIERARCHICAL
from gradwire.bench.tables import Cell, Group, Table, find, format_rate, format_value, groups_of, median_of, pivot
from gradwire.bench.tasks import Batch, Gpt, Text
from gradwire.bench.timing import peak_memory, slowest, time_in_turn
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import CastState, bf16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.planner.hook_registry import FIRST_COMPRESSED
from gradwire.sharded import ReduceScatterOptions

HSDP, REPLICATE, FSDP2 = "hsdp", "replicate", "fsdp2"
UNCOMPRESSED, NOOP = "plain", "noop"
METHODS = (UNCOMPRESSED, "bf16", "int8", "int4", "powersgd-r4")
SEAMS = {
    FLAT: (NOOP, *METHODS),
    HIERARCHICAL: ("bf16", "int8", "int4"),
    HSDP: METHODS,
    REPLICATE: METHODS,
    FSDP2: (UNCOMPRESSED, "bf16", "int8", "int4"),
}
DEFAULT_RATES = ("100mbit", "1gbit")
HOSTS, RANKS_PER_HOST = 2, 2
# Largest relative error of the first compressed gradient; a projection is closer to the mean than zero is.
TOLERANCES = {UNCOMPRESSED: 1e-5, "bf16": 2**-7, "int8": 2**-5, "int4": 0.35, "powersgd-r4": 1.0}


class Bytes(Text):
    """The task "text" with a wider model and short batches: many gradients for little compute."""

    batch = 1
    layers, width = 4, 384

    def make_model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(layers=self.layers, width=self.width, length=self.length)


class NodesCase:
    """The model on one seam with one method."""

    def __init__(self, task: Bytes, seam: str, method: str, hosts: int) -> None:
        self.task = task
        self.seam = seam
        self.method = method
        self.seconds: list[float] = []  # timed steps on the slowest rank
        self.link_bytes: list[int] = []  # that the interface of this rank's host has sent in these steps
        self.model, self.attachment = self._wrapped(task.make_model(), hosts)

    def _wrapped(self, model: Gpt, hosts: int) -> tuple[nn.Module, Any]:
        """The model and what keeps its hook. Every case has process groups, and so messages, of its own."""
        ranks = dist.get_world_size()
        wrapped: nn.Module = model
        if self.seam in (FLAT, HIERARCHICAL):
            ddp = TorchDDP if self.method == UNCOMPRESSED else gradwire.DistributedDataParallel
            wrapped = ddp(model, process_group=dist.new_group())
        elif self.seam == HSDP:
            mesh = init_device_mesh("cpu", (hosts, ranks // hosts), mesh_dim_names=("replicate", "shard"))
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh)
        else:
            wrap, name = (replicate, "replicate") if self.seam == REPLICATE else (fully_shard, "shard")
            mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(name,))
            for module in (*model.layers, model):
                wrap(module, mesh=mesh)
        if self.method == UNCOMPRESSED:
            return wrapped, None
        if self.seam == FSDP2:
            within = self.method if self.method == "bf16" else ReduceScatterOptions(wire=self.method)
            return wrapped, gradwire.attach(wrapped, within=within)
        return wrapped, gradwire.attach(wrapped, *self._hook())

    def _hook(self) -> tuple[Any, ...]:
        if self.method == NOOP:
            return None, noop_hook
        if self.method == "bf16":  # sums of 16 bits, as in PyTorch, where no node adds up its gradients
            accumulate = "fp32" if self.seam in (HIERARCHICAL, REPLICATE) else "wire"
            return CastState(accumulate=accumulate), bf16_compress_hook
        if self.method == "powersgd-r4":
            return (PowerSGDState(None, 4, FIRST_COMPRESSED),)
        return (QuantizationState(None, self.method, local_size=1 if self.seam == FLAT else "auto"),)

    def step(self, batch: Batch) -> float:
        """Seconds of a forward and a backward."""
        self.model.zero_grad()
        start = time.perf_counter()
        self.task.loss(self.model, batch).backward()
        return time.perf_counter() - start

    def check(self, batches: Sequence[Batch], means: Sequence[Tensor]) -> None:
        """Compare the gradients of the last batch with their exact means. Raises RuntimeError if they are wrong."""
        for batch in batches:
            self.step(batch)
        if self.method == NOOP:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        found, mean = (nn.utils.parameters_to_vector(each).double() for each in (whole, means))
        (error,) = slowest([float((found - mean).norm() / mean.norm())])
        if not error < TOLERANCES[self.method]:
            raise RuntimeError(
                f"{self.seam}, {self.method}: the gradients deviate from their mean by {error:.2g} of it; expected "
                f"less than {TOLERANCES[self.method]:.2g}. Nothing is timed."
            )

    def trained(self, batches: Sequence[Batch]) -> float:
        """The validation loss after training on ``batches``."""
        (optimizer,) = self.task.make_optimizers(self.model, "adamw")
        for batch in batches:
            self.step(batch)
            optimizer.step()
        with torch.no_grad():
            return self.task.score_of(self.model)

    def times(self, rate: str) -> list[Record]:
        """Step times and bytes at one rate."""
        metrics: dict[str, Any] = {Metric.STEP_MS: percentiles_ms(self.seconds)}
        if self.link_bytes:
            metrics[Metric.SENT_PER_STEP] = median(self.link_bytes)
        return self.records({"rate": rate}, metrics)

    def records(self, case: dict[str, Any], metrics: dict[str, Any]) -> list[Record]:
        by = PYTORCH if self.method == UNCOMPRESSED else GRADWIRE
        case = case | {"seam": self.seam, "method": self.method}
        return records_of("nodes", case, by, dist.get_world_size(), metrics)


def exact_means(model: nn.Module, task: Text, batch: Batch) -> list[Tensor]:
    """The means over the ranks of the gradients, in fp64, computed without DDP. A collective call."""
    task.loss(model, batch).backward()
    means = [p.grad.double() for p in model.parameters() if p.grad is not None]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return means


def measure(seams: Sequence[str], rates: Sequence[Rate], steps: int, training_steps: int) -> Measured:
    """Loss, step times, bytes and memory of each method on each seam, over links between hosts or over loopback."""
    settings = {"seams": list(seams), "rates": [rate.name for rate in rates], "steps": steps, "threads": 1}
    settings |= {"training_steps": training_steps, "hosts": HOSTS, "ranks_per_host": RANKS_PER_HOST}
    with places_of(HOSTS, rates, RANKS_PER_HOST) as places:
        records = launch.run(__name__, settings, places)
        # One process for each case, whose peak memory is its own.
        cases = [[seam, method] for seam in seams for method in SEAMS[seam] if method != NOOP]
        for case in track([[FLAT, NOOP], *cases], description=f"{'loss and memory':<24}"):
            records += launch.run(__name__, settings | {"trained": case}, places)
    return Measured(settings | {"parameters": sum(p.numel() for p in Bytes().make_model().parameters())}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    if "trained" in settings:
        seam, method = settings["trained"]
        return train(seam, method, settings)
    return time_steps(settings)


def train(seam: str, method: str, settings: dict[str, Any]) -> list[Record]:
    """Train with one method; its peak memory in a forward and a backward, and its validation loss."""
    task, steps = Bytes(), settings["training_steps"]
    case = NodesCase(task, seam, method, settings["hosts"])
    batches = list(islice(task.batches(0, dist.get_rank(), dist.get_world_size()), steps))
    for batch in batches[: FIRST_COMPRESSED + 1]:
        case.step(batch)
    metrics: dict[str, Any] = {Metric.MEMORY: peak_memory(torch.device("cpu"))}
    if method != NOOP:
        metrics[Metric.VALIDATION_LOSS] = round(case.trained(batches), 4)
    return case.records({}, metrics)


def time_steps(settings: dict[str, Any]) -> list[Record]:
    """Check the gradients of all methods, then time interleaved steps. A collective call."""
    task, rates, steps = Bytes(), list(map(Rate.named, settings["rates"])), settings["steps"]
    batches = list(islice(task.batches(0, dist.get_rank(), dist.get_world_size()), max(FIRST_COMPRESSED + 1, steps)))
    first = batches[: FIRST_COMPRESSED + 1]
    means = exact_means(task.make_model(), task, first[-1])
    cases = [NodesCase(task, seam, method, settings["hosts"]) for seam in settings["seams"] for method in SEAMS[seam]]
    for case in cases:
        case.check(first, means)
    records = []
    sent_bytes = None if all(rate.is_loopback for rate in rates) else namespaces.sent_bytes
    for rate in rates:
        if os.environ["LOCAL_RANK"] == "0":
            limit(rate)
        dist.barrier()
        time_in_turn(cases, range(steps), rate.name, batches.__getitem__, sent_bytes)
        records += [record for case in cases for record in case.times(rate.name)]
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """A row for each seam and a column for each method: step times at each rate, bytes, memory, loss; then the model
    of scale with its calibration.
    """
    settings = records[0].provenance["settings"]
    timed, trained = (
        [record for record in records if ("rate" in record.case) is is_timed] for is_timed in (True, False)
    )
    nodes = f"{settings['hosts']} nodes of {settings['ranks_per_host']} ranks"
    result = []
    groups = groups_of(timed, "rate")
    for (rate,), group in groups:
        title = f"{Metric.STEP_MS}, {nodes}, link between nodes: {format_rate(rate)}"
        result.append(_table(title, group, Metric.STEP_MS))
    (rate,), last = groups[-1]
    if find(last, Metric.SENT_PER_STEP):
        result.append(_table(f"Sent per step by a node, at {format_rate(rate)}", last, Metric.SENT_PER_STEP))
    noop = median_of((record for record in trained if record["method"] == NOOP), Metric.MEMORY) or 0
    result.append(_table("Peak memory of a rank, beyond noop_hook on DDP", trained, Metric.MEMORY, noop))
    loss = f"Validation loss after {settings['training_steps']} steps"
    result.append(replace(_table(loss, trained, Metric.VALIDATION_LOSS), notes=_notes(records)))
    return [*result, *scale.calibration(timed), *scale.tables()]


def _table(title: str, records: Sequence[Record], metric: str, base: float = 0) -> Table:
    """A table of medians above ``base``, with the speed-up of a step time."""
    shown = [record for record in records if record.metric == metric and record["method"] in METHODS]

    def cell(method: str) -> Cell:
        def text(group: Group) -> str:
            seam = FLAT if group[0]["seam"] == HIERARCHICAL else group[0]["seam"]
            found = median_of((record for record in group if record["method"] == method), metric)
            plain = median_of((r for r in shown if (r["seam"], r["method"]) == (seam, UNCOMPRESSED)), metric)
            if found is None:
                return "-"
            is_compared = metric == Metric.STEP_MS and method != UNCOMPRESSED
            speed_up = f" ({plain / found:.2g}x)" if is_compared and plain else ""
            return format_value(metric, max(found - base, 0)) + speed_up

        return text

    names = {"gradients of": lambda record: str(record["seam"])}
    return pivot(title, shown, names, [(method, cell(method)) for method in METHODS])


def _notes(records: Sequence[Record]) -> list[str]:
    settings = records[0].provenance["settings"]
    return [
        f"model: GPT with {Bytes.layers} layers of width {Bytes.width}, {settings['parameters']:,} parameters; "
        f"{Bytes.length} bytes of text per rank",
        f"step time: forward and backward on the slowest rank, median of {settings['steps']} interleaved steps",
        "in parentheses: speed-up over plain in the same row; for ddp-hierarchical, over plain ddp-flat",
        "plain: PyTorch without gradwire; bf16: bf16_compress_hook, with sums in fp32 on nodes; -: no such method",
        "sent per step: bytes on the interface of rank 0's node, which both of its ranks share, with headers",
        "peak memory: of a process in a forward and a backward, minus that with noop_hook on gradwire's DDP",
    ]
