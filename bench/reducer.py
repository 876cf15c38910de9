"""The own cost of a reducer: backwards with and without it, on models of few and of many parameters.

gradwire's and PyTorch's reducer live in the same processes and take turns step by step, so that background load falls
on both. With one rank, every autograd hook, copy and collective runs, while communication takes next to no time: the
rest is the cost of the reducer. `measure` starts the ranks; each runs `main`. Peak memory is measured in one process
per reducer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn

from gradwire import DistributedDataParallel
from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, PYTORCH, TorchDDP, maker_of, wrap
from gradwire.bench.models import MODELS
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of, unique
from gradwire.bench.tables import (
    Cell,
    Table,
    beyond,
    count,
    format_number,
    groups_of,
    median_of,
    pivot,
    speed_up,
    value,
)
from gradwire.bench.timing import bench_device, peak_memory, slowest, turns
from gradwire.planner.device_sync import synchronize
from gradwire.planner.hook_registry import HOOKS, label

WARM_UP = 5  # the first steps build and rebuild buckets
MEMORY_MODEL = "mlp"  # the model of the memory measurement
NO_REDUCER = "no reducer"

WRAPPERS: dict[str, type[TorchDDP]] = {PYTORCH: TorchDDP, GRADWIRE: DistributedDataParallel}
REDUCERS = (("none", NO_REDUCER), *itertools.product(("none", "noop", "fp16"), WRAPPERS))  # (hook, implementation)


class ReducedModel:
    """One model in one reducer, equal on all ranks, this rank's batch, and the seconds of its backwards."""

    def __init__(self, model: str, hook: str, implementation: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.hook, self.implementation = hook, implementation
        self.seconds: list[float] = []
        self.model: nn.Module = MODELS[model].build().to(device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randn(MODELS[model].input_shape, generator=generator).to(device)
        if implementation != NO_REDUCER:
            self.model, _ = wrap(self.model, maker_of(HOOKS[hook], implementation), WRAPPERS[implementation])

    def step(self) -> float:
        """Run a forward, and time the backward until every gradient is final."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.batch).square().sum() / len(self.batch)
        synchronize(self.batch.device)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        synchronize(self.batch.device)
        return time.perf_counter() - start

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def measure(models: Sequence[str], ranks: Sequence[int], steps: int) -> Measured:
    settings, device = {"models": list(models), "steps": steps, "threads": 1}, bench_device()
    records = [record for size in ranks for record in launch.run(__name__, settings, size, device)]
    if MEMORY_MODEL in models:
        for key in track(REDUCERS, description=f"{'memory':<14}"):
            records += launch.run(__name__, {"memory_of": key, "threads": 1}, 1, device)
    return Measured(settings, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    if "memory_of" in settings:
        hook, implementation = settings["memory_of"]
        return measure_memory(MEMORY_MODEL, hook, implementation, device)
    return [record for name in settings["models"] for record in time_backwards(name, settings["steps"], device)]


def measure_memory(model: str, hook: str, implementation: str, device: torch.device) -> list[Record]:
    case = ReducedModel(model, hook, implementation, device)
    for _ in range(WARM_UP):
        case.step()
    metrics: dict[str, Any] = {Metric.MEMORY: peak_memory(device)}
    return records_of("reducer", {"model": model, "hook": hook}, implementation, 1, metrics)


def time_backwards(model: str, steps: int, device: torch.device) -> list[Record]:
    """Check every reducer on a model and time them, interleaved."""
    cases = [ReducedModel(model, hook, implementation, device) for hook, implementation in REDUCERS]
    for _ in range(WARM_UP):
        for case in cases:
            case.step()
    _check(cases)
    title = f"{model}, {count(dist.get_world_size(), 'rank')}"
    for _, case in turns(range(steps), cases, title):
        case.seconds.append(case.step())
    return summarize(model, cases, [slowest(case.seconds) for case in cases])


def _check(cases: Sequence[ReducedModel]) -> None:
    local = cases[0].gradients()
    mean, largest = [], []
    for gradient in local:
        mean.append(gradient / dist.get_world_size())
        largest.append(gradient.abs().max())
        dist.all_reduce(mean[-1])
        dist.all_reduce(largest[-1], dist.ReduceOp.MAX)
    for case in cases[1:]:
        tolerance = 2**-10 if case.hook == "fp16" else 2**-20  # relative to the largest summand
        expected = local if case.hook == "noop" else mean
        for gradient, reference, scale in zip(case.gradients(), expected, largest, strict=True):
            # fp16 has steps of 2^-24. The comparison is false for a NaN.
            if not (gradient - reference).abs().max() <= tolerance * scale + 2**-22:
                name = f"{case.implementation}, {case.hook}"
                raise RuntimeError(f"{name}: the gradients differ from those without a reducer; nothing is timed.")


def summarize(model: str, cases: Sequence[ReducedModel], seconds: Sequence[Sequence[float]]) -> list[Record]:
    """A record for each case of a model."""
    parameters = list(cases[0].model.parameters())
    sizes = {"parameters": len(parameters), "elements": sum(p.numel() for p in parameters)}
    ranks, records = dist.get_world_size(), []
    for case, times in zip(cases, seconds, strict=True):
        of = {"model": model, **sizes, "hook": case.hook}
        records += records_of("reducer", of, case.implementation, ranks, {Metric.BACKWARD_MS: percentiles_ms(times)})
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    timed = [record for record in records if record.metric == Metric.BACKWARD_MS]
    memory = [record for record in records if record.metric == Metric.MEMORY]
    names = {"model": lambda record: record["model"], "hook": lambda record: label(record["hook"])}
    sides, result = (PYTORCH, GRADWIRE), []
    groups = groups_of(timed, "ranks")
    for (ranks,), group in groups:
        bare = {r["model"]: r.p50 for r in group if r.implementation == NO_REDUCER and r.p50 is not None}
        columns = [
            (NO_REDUCER, value(Metric.BACKWARD_MS, NO_REDUCER)),
            *((name, value(Metric.BACKWARD_MS, name)) for name in sides),
            ("speed-up", speed_up(Metric.BACKWARD_MS, PYTORCH, GRADWIRE)),
            *((f"us per parameter, {name}", _per_parameter(name, bare)) for name in sides),
        ]
        notes = _notes(timed) if ranks == groups[-1][0][0] and not memory else ()
        result.append(pivot(f"{Metric.BACKWARD_MS}, {count(ranks, 'rank')}", group, names, columns, notes))
    if memory:
        base = median_of(memory, Metric.MEMORY, NO_REDUCER) or 0
        columns = [(name, beyond(Metric.MEMORY, name, base)) for name in sides]
        title = f"Peak memory beyond {NO_REDUCER}, {MEMORY_MODEL}"
        reducers = [record for record in memory if record.implementation != NO_REDUCER]
        result.append(pivot(title, reducers, {"hook": names["hook"]}, columns, _notes(timed)))
    return result


def _per_parameter(name: str, bare: dict[str, float]) -> Cell:
    def cell(group: Sequence[Record]) -> str:
        beyond_bare = (median_of(group, Metric.BACKWARD_MS, name) or 0) - bare[group[0]["model"]]
        return format_number(1e3 * beyond_bare / group[0]["parameters"])

    return cell


def _notes(records: Sequence[Record]) -> list[str]:
    facts = records[0].provenance
    models = unique((record["model"], record["parameters"], record["elements"]) for record in records)
    sizes = (f"{name}: {parameters} of {elements / 1e6:.2g} M elements" for name, parameters, elements in models)
    return [
        f"models and their parameters: {', '.join(sizes)}",
        "backward time: until every gradient is final, on the slowest rank, median of "
        f"{facts['settings']['steps']} interleaved steps",
        "time per parameter (us): median time minus that without a reducer, divided by the number of parameters",
        f"{facts['cpu_count']} CPUs run all ranks, one thread each",
    ]
