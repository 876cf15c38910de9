"""`gradwire bench nodes`: training on nodes of several ranks, over a fast link inside and a slow link between them.

One model trains with DDP, HSDP, `replicate` and FSDP2, each plain and compressed. The nodes are network namespaces:
ranks of one node reach each other over its loopback, and other nodes over a rate-limited interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.bench import launch, namespaces, scale
from gradwire.bench.implementations import FIRST_COMPRESSED, GRADWIRE, PYTORCH, TorchDDP
from gradwire.bench.models import turns
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, limit_to, places_of
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.tables import Cell, Table, find, format_rate, format_value, groups_of, median_of, pivot
from gradwire.bench.tasks import Batch, Gpt, Text
from gradwire.bench.timing import slowest
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import CastState, bf16_compress_hook
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.planner.compute_probe import tensor_bytes

FLAT, HIERARCHICAL, HSDP, REPLICATE, FSDP2 = "ddp-flat", "ddp-hierarchical", "hsdp", "replicate", "fsdp2"
PLAIN, NOOP = "plain", "noop"
METHODS = (PLAIN, "bf16", "int8", "int4", "powersgd-r4")
SEAMS = {
    FLAT: (NOOP, *METHODS),
    HIERARCHICAL: ("bf16", "int8", "int4"),
    HSDP: METHODS,
    REPLICATE: METHODS,
    FSDP2: (PLAIN, "bf16"),
}
DEFAULT_RATES = ("100mbit", "1gbit")
HOSTS, RANKS_PER_HOST = 2, 2
# Largest relative error of the first compressed gradient; a projection is closer to the mean than zero is.
TOLERANCES = {PLAIN: 1e-5, "bf16": 2**-7, "int8": 2**-5, "int4": 0.35, "powersgd-r4": 1.0}


class Bytes(Text):
    """The task "text" with a wider model and short batches: many gradients for little compute."""

    batch = 1

    def make_model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(layers=4, width=384, length=self.length)


class Case:
    """The model on one seam with one method.

    Attributes:
        memory: bytes of this rank's tensors between two steps: parameters, error memory, factors and messages.
        loss: validation loss after `train`.
        seconds: timed steps on this rank.
        link_bytes: bytes that the interface of this rank's host has sent in these steps.
    """

    def __init__(self, task: Bytes, seam: str, method: str, hosts: int) -> None:
        self.task, self.seam, self.method, self.loss = task, seam, method, 0.0
        self.seconds: list[float] = []
        self.link_bytes: list[int] = []
        before = tensor_bytes()
        self.model, self.attachment = self._wrapped(task.make_model(), hosts)
        self.memory = -before

    def _wrapped(self, model: Gpt, hosts: int) -> tuple[nn.Module, Any]:
        """The model and what keeps its hook. Every case has process groups, and so messages, of its own."""
        ranks = dist.get_world_size()
        wrapped: nn.Module = model
        if self.seam in (FLAT, HIERARCHICAL):
            ddp = TorchDDP if self.method == PLAIN else gradwire.DistributedDataParallel
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
        if self.method == PLAIN:
            return wrapped, None
        if self.seam == FSDP2:
            return wrapped, gradwire.attach(wrapped, within=self.method)
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

    def train(self, batches: Sequence[Batch]) -> None:
        """Train, and validate at the end."""
        optimizer = self.task.make_optimizer(self.model)
        for batch in batches:
            self.step(batch)
            optimizer.step()
        with torch.no_grad():
            self.loss = self.task.score_of(self.model)
        del optimizer
        self.model.zero_grad()
        self.memory += tensor_bytes()

    def time(self, batch: Batch, counts_bytes: bool) -> None:
        """Take a timed step."""
        before = namespaces.sent_bytes() if counts_bytes else 0
        dist.barrier()
        self.seconds.append(self.step(batch))
        dist.barrier()
        if counts_bytes:
            self.link_bytes.append(namespaces.sent_bytes() - before)

    def records(self, rate: str) -> list[Record]:
        """Times, bytes and memory at one rate. A collective call."""
        metrics: dict[str, Any] = {Metric.STEP_MS: percentiles_ms(slowest(self.seconds))}
        if self.link_bytes:
            metrics[Metric.SENT_PER_STEP] = median(self.link_bytes)
        if self.method != NOOP:
            metrics |= {Metric.STATE: self.memory, Metric.VALIDATION_LOSS: round(self.loss, 4)}
        case = {"rate": rate, "seam": self.seam, "method": self.method}
        by = PYTORCH if self.method == PLAIN else GRADWIRE
        self.seconds, self.link_bytes = [], []
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
    """Loss, step times, bytes and memory of each method on each seam, over links between hosts or over `LOOPBACK`."""
    settings = {"seams": list(seams), "rates": [rate.name for rate in rates], "steps": steps, "threads": 1}
    settings |= {"training_steps": training_steps, "hosts": HOSTS, "ranks_per_host": RANKS_PER_HOST}
    with places_of(HOSTS, list(rates) == [LOOPBACK], RANKS_PER_HOST) as places:
        records = launch.run(__name__, settings, places)
    return Measured(settings | {"parameters": sum(p.numel() for p in Bytes().make_model().parameters())}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    task, rates, steps = Bytes(), settings["rates"], settings["steps"]
    batches = list(islice(task.batches(0), max(settings["training_steps"], FIRST_COMPRESSED + 1, steps)))
    first = batches[: FIRST_COMPRESSED + 1]
    means = exact_means(task.make_model(), task, first[-1])
    cases = []
    for seam in settings["seams"]:
        for method in SEAMS[seam]:
            cases.append(Case(task, seam, method, settings["hosts"]))
            cases[-1].check(first, means)
            if method != NOOP:
                cases[-1].train(batches[: settings["training_steps"]])
    records = []
    for rate in rates:
        if os.environ["LOCAL_RANK"] == "0":
            limit_to(rate)
        dist.barrier()
        for step, case in turns(range(steps), cases, rate):
            case.time(batches[step], counts_bytes=rates != [LOOPBACK.name])
        records += [record for case in cases for record in case.records(rate)]
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """A row for each seam and a column for each method: step times at each rate, bytes, memory, loss; then the model
    of scale with its calibration.
    """
    settings = records[0].provenance["settings"]
    nodes = f"{settings['hosts']} nodes of {settings['ranks_per_host']} ranks"
    result = []
    groups = groups_of(records, "rate")
    for (rate,), group in groups:
        link = "loopback" if rate == LOOPBACK.name else f"link between nodes: {format_rate(rate)}"
        result.append(_table(f"{Metric.STEP_MS}, {nodes}, {link}", group, Metric.STEP_MS))
    (rate,), last = groups[-1]
    if find(last, Metric.SENT_PER_STEP):
        result.append(_table(f"Sent per step by a node, at {format_rate(rate)}", last, Metric.SENT_PER_STEP))
    result.append(_table("Memory of a rank between steps", last, Metric.STATE))
    loss = f"Validation loss after {settings['training_steps']} steps"
    result.append(_table(loss, last, Metric.VALIDATION_LOSS, _notes(records)))
    return [*result, *scale.calibration(records), *scale.tables()]


def _table(title: str, records: Sequence[Record], metric: str, notes: Sequence[str] = ()) -> Table:
    shown = [record for record in records if record.metric == metric and record["method"] in METHODS]
    columns = [(method, _cell(metric, method)) for method in METHODS]
    return pivot(title, shown, {"gradients of": lambda record: str(record["seam"])}, columns, notes)


def _cell(metric: str, method: str) -> Cell:
    return lambda group: format_value(metric, median_of((r for r in group if r["method"] == method), metric)) or "-"


def _notes(records: Sequence[Record]) -> list[str]:
    settings = records[0].provenance["settings"]
    return [
        f"model: GPT with 4 layers of width 384, {settings['parameters']:,} parameters; 64 bytes of text per rank",
        f"step time: forward and backward on the slowest rank, median of {settings['steps']} interleaved steps",
        "plain: PyTorch without gradwire; bf16: bf16_compress_hook, with sums in fp32 on nodes; -: no such method",
        "sent per step: bytes on the interface of rank 0's node, which both of its ranks share, with headers",
        "memory: tensors that stay between two steps: parameters, error memory, factors and messages",
    ]
