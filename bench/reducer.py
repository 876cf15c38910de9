"""The own cost of a reducer: backward with it, beside backward without, on models of few and of many parameters.

gradwire's and PyTorch's reducer live in the same processes and take turns step by step, so that whatever else the
machine does falls on both. With one rank, every autograd hook, copy and collective runs for real, while the collective
itself costs next to nothing: what is left is the price of the reducer. `measure` starts the ranks; each runs `main`.
The memory of each reducer is measured in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default_hooks

from gradwire import DistributedDataParallel
from gradwire.bench.launch import exit_with_launcher, leave, measured_by
from gradwire.bench.measuring import (
    backend_of,
    bench_device,
    in_turn,
    peak_memory,
    percentiles_ms,
    slowest,
    synchronize,
)
from gradwire.bench.models import MODELS, Model
from gradwire.bench.report import bench_table, format_bytes, machine_line
from gradwire.hooks import debugging_hooks, default_hooks

TorchDDP = nn.parallel.DistributedDataParallel
WARM_UP = 5  # the first steps build and rebuild buckets
WEIGHED = "mlp"  # the model that memory is measured with
NO_REDUCER = "no reducer"
MODULE = "gradwire.bench.reducer"

# Name: (the class that wraps the model, the hook).
PROVIDERS: dict[str, tuple[Any, Any]] = {
    NO_REDUCER: (None, None),
    "PyTorch": (TorchDDP, None),
    "gradwire": (DistributedDataParallel, None),
    "PyTorch, noop_hook": (TorchDDP, torch_debugging_hooks.noop_hook),
    "gradwire, noop_hook": (DistributedDataParallel, debugging_hooks.noop_hook),
    "PyTorch, fp16_compress_hook": (TorchDDP, torch_default_hooks.fp16_compress_hook),
    "gradwire, fp16_compress_hook": (DistributedDataParallel, default_hooks.fp16_compress_hook),
}


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What a backward took.

    Attributes:
        model: its name in `gradwire.bench.models.MODELS`.
        parameters: how many tensors.
        elements: of all together.
        ranks: how many took part.
        provider: a key of `PROVIDERS`.
        ms: until every gradient is final, on the slowest rank of each step: p20, p50, p80.
        us_a_parameter: the median beyond that without a reducer, for each parameter.
        vs_pytorch: the median in units of PyTorch's with the same hook; None for that itself, and without a reducer.
    """

    model: str
    parameters: int
    elements: int
    ranks: int
    provider: str
    ms: dict[str, float]
    us_a_parameter: float
    vs_pytorch: float | None


@dataclass
class Case:
    """One model behind one reducer, and the seconds that its backwards took."""

    provider: str
    model: nn.Module
    batch: Tensor
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, model: Model, provider: str, device: torch.device) -> Case:
        """The same initial weights on all ranks, and a batch for this one."""
        torch.manual_seed(0)
        module: nn.Module = model.build().to(device)
        generator = torch.Generator().manual_seed(dist.get_rank())
        batch = torch.randn(model.input_shape, generator=generator).to(device)
        wrap, hook = PROVIDERS[provider]
        if wrap is not None:
            module = wrap(module)
        if hook is not None:
            module.register_comm_hook(None, hook)  # type: ignore[operator]
        return cls(provider, module, batch)

    def step(self) -> float:
        """Forward, and the time of the backward until every gradient is final."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.batch).square().sum() / len(self.batch)
        synchronize(self.batch.device)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        synchronize(self.batch.device)
        return time.perf_counter() - start

    def gradients(self) -> list[Tensor]:
        """Of all parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def measure(models: Sequence[str], ranks: Sequence[int], steps: int) -> dict[str, Any]:
    """Times and memory of backwards, after a check of the gradients.

    Args:
        models: names in `MODELS`.
        ranks: numbers of ranks, one after another.
        steps: timed backwards of each reducer on each model.

    Returns:
        What `reducer_tables` takes and JSON holds: a list of `Backward` as dictionaries, and the peak memory by
        provider.

    Raises:
        LaunchError: a rank failed, or found a gradient that is wrong.
    """
    settings = {"models": list(models), "steps": steps}
    backwards = [of_one for count in ranks for of_one in measured_by(MODULE, settings, count)]
    memory = {}
    if WEIGHED in models:
        for provider in track(PROVIDERS, description=f"{'memory':<14}"):
            memory[provider] = measured_by(MODULE, {"models": [WEIGHED], "weigh": provider}, 1)
    return {"steps": steps, "backwards": backwards, "peak_memory": memory}


def main(settings: dict[str, Any]) -> None:
    """One rank."""
    exit_with_launcher()
    torch.set_num_threads(1)
    device = bench_device()
    dist.init_process_group(backend_of(device))
    measured: Any
    if "weigh" in settings:
        measured = _weigh(settings["models"][0], settings["weigh"], device)
    else:
        measured = [asdict(of_one) for name in settings["models"] for of_one in _time(name, settings["steps"], device)]
    if dist.get_rank() == 0:
        Path(settings["path"]).write_text(json.dumps(measured))
    dist.destroy_process_group()


def _weigh(name: str, provider: str, device: torch.device) -> int:
    """The largest number of bytes that a process held in training steps."""
    case = Case.make(MODELS[name], provider, device)
    for _ in range(WARM_UP):
        case.step()
    return peak_memory(device)


def _time(name: str, steps: int, device: torch.device) -> list[Backward]:
    cases = [Case.make(MODELS[name], provider, device) for provider in PROVIDERS]
    for _ in range(WARM_UP):
        for case in cases:
            case.step()
    _check(cases)
    title = f"{name}, {dist.get_world_size()}"
    for step in track(range(steps), description=f"{title:<14}", disable=dist.get_rank() != 0):
        for case in in_turn(cases, step):
            case.seconds.append(case.step())
    return summarize(name, cases, [slowest(case.seconds) for case in cases])


def _check(cases: Sequence[Case]) -> None:
    local = cases[0].gradients()
    mean, largest = [], []
    for gradient in local:
        mean.append(gradient / dist.get_world_size())
        largest.append(gradient.abs().max())
        dist.all_reduce(mean[-1])
        dist.all_reduce(largest[-1], dist.ReduceOp.MAX)
    for case in cases[1:]:
        tolerance = 2**-10 if "fp16" in case.provider else 2**-20  # of the largest that is summed
        expected = local if "noop" in case.provider else mean
        for gradient, reference, scale in zip(case.gradients(), expected, largest, strict=True):
            # fp16 has steps of 2^-24. A NaN is no smaller than anything.
            if not (gradient - reference).abs().max() <= tolerance * scale + 2**-22:
                raise RuntimeError(f"{case.provider}: the gradients are not those without a reducer; nothing is timed.")


def summarize(name: str, cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> list[Backward]:
    """What the cases of a model took, of which the first has no reducer."""
    ms = {case.provider: percentiles_ms(times) for case, times in zip(cases, seconds, strict=True)}
    parameters = list(cases[0].model.parameters())

    def backward_of(provider: str) -> Backward:
        median = ms[provider]["p50"]
        peer = ms[provider.replace("gradwire", "PyTorch")]["p50"]
        return Backward(
            model=name,
            parameters=len(parameters),
            elements=sum(p.numel() for p in parameters),
            ranks=dist.get_world_size(),
            provider=provider,
            ms=ms[provider],
            us_a_parameter=round(1e3 * (median - ms[NO_REDUCER]["p50"]) / len(parameters), 2),
            vs_pytorch=round(median / peer, 3) if provider.startswith("gradwire") else None,
        )

    return [backward_of(case.provider) for case in cases]


def reducer_tables(measured: dict[str, Any], facts: dict[str, Any]) -> Iterator[Table]:
    """A table for each model and number of ranks, and one of memory; what the numbers mean is below the last."""
    keys = list(dict.fromkeys((of_one["model"], of_one["ranks"]) for of_one in measured["backwards"]))
    memory = measured["peak_memory"]
    for key in keys:
        rows = [of_one for of_one in measured["backwards"] if (of_one["model"], of_one["ranks"]) == key]
        size = f"{rows[0]['parameters']} parameters, {rows[0]['elements'] / 1e6:.2g} M elements"
        title = f"Backward, {key[0]}: {size}; ranks: {key[1]}"
        caption = _caption(measured, facts) if key == keys[-1] and not memory else None
        table = bench_table(title, caption, ("reducer", "ms", "us a\nparameter", "vs\nPyTorch"))
        for row in rows:
            table.add_row(
                row["provider"],
                f"{row['ms']['p50']:.2f} ({row['ms']['p20']:.1f}-{row['ms']['p80']:.1f})",
                f"{row['us_a_parameter']:.1f}" if row["provider"] != NO_REDUCER else "",
                f"{row['vs_pytorch']:.2f}x" if row["vs_pytorch"] is not None else "",
            )
        yield table
    if memory:
        table = bench_table(
            f"Peak memory of a process, {WEIGHED}", _caption(measured, facts), ("reducer", "peak", "beyond no reducer")
        )
        for provider, nbytes in memory.items():
            beyond = format_bytes(nbytes - memory[NO_REDUCER]) if provider != NO_REDUCER else ""
            table.add_row(provider, format_bytes(nbytes), beyond)
        yield table


def _caption(measured: dict[str, Any], facts: dict[str, Any]) -> str:
    return (
        "ms: until every gradient is final, on the slowest rank,\n"
        f"  median (20th-80th percentile) of {measured['steps']}, in turns\n"
        "us a parameter: median beyond that without a reducer\n"
        "vs PyTorch: in units of the median of PyTorch's DDP with the same hook\n"
        f"{facts['cpu_count']} CPUs run all ranks, one thread each\n"
        f"{machine_line(facts)}"
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    leave()
