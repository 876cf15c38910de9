"""The time of the host in a step on a GPU, measured without a GPU: Python, autograd and Triton's launches.

`gradwire.bench.host_double` describes the GPU that does nothing. A step is a backward of many tiny parameters in
buckets like GPT-2's. Its thread CPU time with 13 buckets, minus that with one, is the cost of 12 buckets; that of more
parameters in as many buckets, minus that of a backward without a reducer, is the cost of parameters. A hook is also
called directly, on the buckets of GPT-2 with tiny tensors, which stay where they are. A process measures one hook; its
cases and PyTorch's fp16 hook take turns.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import DistributedDataParallel
from gradwire.bench import host_double, launch
from gradwire.bench.gpu.timings import BUCKET_MIB, HookStep
from gradwire.bench.host_double import Collectives, Driver
from gradwire.bench.implementations import FIRST_COMPRESSED, GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH, TorchDDP, wrap
from gradwire.bench.models import turns
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.shapes import SHAPES, Shape, buckets
from gradwire.bench.tables import Table, pivot, relative, value
from gradwire.planner.hook_registry import HOOKS, Make, Registration, display_name

DEFAULT_HOOKS = ("none", "fp16", "bf16", "int8", "int4", "sign", "powersgd-r4", "powersgd-r4-alternating")
MODEL, REFERENCE = "gpt2-124m", "fp16"
SIDE = 20  # of matrices: the smallest that PowerSGD compresses at rank 4; all else costs the CPU time
# (parameters, buckets)
BASE, ONE_BUCKET, MANY_PARAMETERS = (150, 13), (150, 1), (600, 13)
SIZES = (BASE, ONE_BUCKET, MANY_PARAMETERS)
WARM_UP = 12
COUNTS = (Metric.CALLS, Metric.BUCKET_LAUNCHES, Metric.DRIVER_CALLS)
NO_REDUCER = "no reducer"
IMPLEMENTATIONS = (PYTORCH, GRADWIRE_ON_PYTORCH, GRADWIRE)


class Tiny(nn.Module):
    """Matrices and vectors, two vectors to a matrix as in GPT-2."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        shapes = [(SIDE, SIDE) if i % 3 == 0 else (SIDE,) for i in range(parameters)]
        self.tensors = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        factors = {2: x, 1: x[0]}
        return torch.stack([(tensor * factors[tensor.dim()]).sum() for tensor in self.tensors]).sum()


class Backward:
    """The backward of a model in a DDP, or without one; a call is a step, and returns its CPU time."""

    def __init__(self, make: Make | None, ddp: type[TorchDDP] | None, size: tuple[int, int]) -> None:
        parameters, n_buckets = size
        self.x = torch.ones(SIDE, SIDE)
        self.model: nn.Module = Tiny(parameters)
        self.parameters = list(self.model.parameters())
        if ddp is not None and make is not None:
            cap = sum(parameter.nbytes for parameter in self.parameters) / n_buckets / 2**20
            self.model, _ = wrap(self.model, make, ddp, group=new_group(), bucket_cap_mb=cap)

    def __call__(self) -> float:
        for parameter in self.parameters:
            parameter.grad = None
        return thread_seconds(self.model(self.x).backward)


def thread_seconds(work: Callable[[], object]) -> float:
    gc.disable()
    start = time.thread_time_ns()
    work()
    seconds = (time.thread_time_ns() - start) / 1e9
    gc.enable()
    return seconds


def new_group() -> Any:
    return dist.new_group(backend=host_double.BACKEND)


def renamed(make: Make) -> Make:
    """Without NCCL, PyTorch's DDP refuses bf16 hooks by name."""

    def make_renamed(group: dist.ProcessGroup | None, start: int) -> Registration | None:
        registration = make(group, start)
        if registration is None:
            return None
        state, hook = registration
        return state, lambda state, bucket: hook(state, bucket)

    return make_renamed


def tiny_buckets() -> list[list[Shape]]:
    """GPT-2's buckets with small tensors of as many dimensions."""
    return [[(SIDE,) * len(shape) for shape in bucket] for bucket in buckets(SHAPES[MODEL], BUCKET_MIB << 20)]


class Case:
    """An implementation: a backward for each size, and a direct call of the hook unless there is none."""

    def __init__(self, hook: str, name: str) -> None:
        self.name = name
        entry = HOOKS[REFERENCE].pytorch if name == PYTORCH else HOOKS[hook]
        make = entry.make if name == GRADWIRE else renamed(entry.make)
        ddp = {GRADWIRE: DistributedDataParallel, NO_REDUCER: None}.get(name, TorchDDP)
        self.steps: dict[Any, Callable[[], float]] = {size: Backward(make, ddp, size) for size in SIZES}
        registration = None if name == NO_REDUCER else entry.make(new_group(), FIRST_COMPRESSED)
        if registration is not None:
            direct = HookStep(registration, tiny_buckets(), torch.device("cpu"), is_flat=name != GRADWIRE)
            self.steps["direct"] = lambda: thread_seconds(direct)
        self.seconds: dict[Any, list[float]] = {key: [] for key in self.steps}

    def step(self, is_timed: bool = True) -> None:
        for key, step in self.steps.items():
            seconds = step()
            if is_timed:
                self.seconds[key].append(seconds)

    def us(self, more: Any, fewer: Any, number: int) -> list[float]:
        """Microseconds of each of the ``number`` things that one step has more than another, in all rounds."""
        return [1e6 * (a - b) / number for a, b in zip(self.seconds[more], self.seconds[fewer], strict=True)]

    def counts(self, driver: Driver) -> dict[str, float]:
        """What each further bucket adds to a step, by metric."""
        many, one = (counts_of(self.steps[size], driver) for size in (BASE, ONE_BUCKET))
        n_collectives, *rest = [(a - b) / (BASE[1] - 1) for a, b in zip(many, one, strict=True)]
        if n_collectives < 1 or n_collectives % 1:
            raise RuntimeError(f"{self.name} does not reduce {BASE[1]} and {ONE_BUCKET[1]} buckets; nothing is timed.")
        return {metric: round(count, 1) for metric, count in zip(COUNTS, rest, strict=True)}


def counts_of(step: Callable[[], object], driver: Driver) -> list[int]:
    """Collectives, Python and C calls, launches and driver calls of a step."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = Collectives.count, driver.count("launches"), driver.count("driver_calls")
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    after = Collectives.count, driver.count("launches"), driver.count("driver_calls")
    collectives, launches, driver_calls = (b - a for a, b in zip(before, after, strict=True))
    return [collectives, calls, launches, driver_calls]


def measure(hooks: Sequence[str], steps: int) -> Measured:
    """Measure each hook in a process of its own."""
    host_double.compiler()
    settings = {"steps": steps, "threads": 1}
    records = [record for hook in hooks for record in launch.run(__name__, settings | {"hook": hook}, 1)]
    return Measured(settings, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        driver = host_double.install(Path(folder))
        hook = settings["hook"]
        cases = [Case(hook, name) for name in (NO_REDUCER, *IMPLEMENTATIONS)]
        for _ in range(WARM_UP):
            for case in cases:
                case.step(is_timed=False)
        counts = {case.name: case.counts(driver) for case in cases[1:]}
        for _, case in turns(range(settings["steps"]), cases, hook):
            case.step()
        return [record for case in cases[1:] for record in summarize(hook, case, cases[0], counts[case.name])]


def summarize(hook: str, case: Case, bare: Case, counts: dict[str, float]) -> list[Record]:
    n_parameters = MANY_PARAMETERS[0] - BASE[0]
    per_parameter, bare_parameter = (each.us(MANY_PARAMETERS, BASE, n_parameters) for each in (case, bare))
    own = [a - b for a, b in zip(per_parameter, bare_parameter, strict=True)]
    times = {Metric.BUCKET_US: case.us(BASE, ONE_BUCKET, BASE[1] - ONE_BUCKET[1]), Metric.PARAMETER_US: own}
    if "direct" in case.seconds:
        times[Metric.DIRECT_US] = [1e6 * seconds / len(tiny_buckets()) for seconds in case.seconds["direct"]]
    # `percentiles_ms` multiplies by 1000
    metrics = {metric: percentiles_ms([us / 1e3 for us in values]) for metric, values in times.items()}
    return records_of("host", {"hook": hook}, case.name, 1, metrics | counts)


def tables(records: Sequence[Record]) -> list[Table]:
    """A row per hook and DDP, after one of PyTorch's hook."""
    references = {record["hook"]: record.p50 for record in records if _is_reference(record)}
    first = records[0]["hook"]
    rows = [record for record in records if record.implementation != PYTORCH or record["hook"] == first]
    names = {
        "hook": lambda record: (
            f"{PYTORCH}'s {REFERENCE}" if record.implementation == PYTORCH else display_name(record["hook"])
        ),
        "DDP": lambda record: GRADWIRE if record.implementation == GRADWIRE else PYTORCH,
    }
    columns = [
        ("us per bucket", value(Metric.BUCKET_US)),
        (f"vs. {PYTORCH}'s {REFERENCE}", lambda group: relative(Metric.BUCKET_US, references[group[0]["hook"]])(group)),
        ("us per bucket, called directly", value(Metric.DIRECT_US)),
        ("us per parameter", value(Metric.PARAMETER_US)),
        *((metric.removesuffix(" per bucket"), value(metric)) for metric in COUNTS),
    ]
    settings = records[0].provenance["settings"]
    notes = [f"medians of {settings['steps']} interleaved steps"]
    return [pivot("Host time of a step on a GPU, measured without a GPU", rows, names, columns, notes)]


def _is_reference(record: Record) -> bool:
    return record.implementation == PYTORCH and record.metric == Metric.BUCKET_US
