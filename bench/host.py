"""The host's time in a step on a GPU, measured without a GPU: Python, autograd's hooks and Triton's launches.

`gradwire.bench.host_double` describes the GPU that does nothing. A step is a backward of many tiny parameters. Its CPU
time in 13 buckets minus that in one is the time of 12 buckets. Its CPU time with more parameters in 13 buckets is the
time of these parameters, of which a backward without a DDP takes a part. Hooks are also called directly, on the buckets
of GPT-2 with tiny gradients that stay where they are. Each hook has a process of its own, in which all implementations
and PyTorch's fp16 hook take turns.
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
from gradwire.bench.hook_step import HookStep
from gradwire.bench.host_double import BACKEND, Collectives, Driver
from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH, TorchDDP, wrap
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.shapes import SHAPES, Shape, buckets
from gradwire.bench.tables import Group, Table, median_of, pivot, relative, value
from gradwire.bench.timing import turns
from gradwire.planner.hook_registry import DEFAULT_CAP_MB, FIRST_COMPRESSED, HOOKS, Make, display_name

DEFAULT_HOOKS = (
    "none",
    "fp16",
    "bf16",
    "scaled-fp16",
    "int8",
    "int4",
    "sign",
    "powersgd-r4",
    "powersgd-r4-alternating",
)
REFERENCE = "fp16"  # PyTorch's hook
# Numbers of parameters and of buckets: like GPT-2, with one bucket, and with more parameters.
Size = tuple[int, int]
GPT2, ONE_BUCKET, LARGE = (150, 13), (150, 1), (600, 13)
SIDE = 20  # of matrices: large enough for PowerSGD of rank 4, so small that casts and copies take next to no time
UNTIMED_STEPS = 20  # an alternating hook records both kinds of steps
NO_REDUCER, DIRECT = "no reducer", "direct call"
COUNTS = (Metric.CALLS, Metric.LAUNCHES_PER_BUCKET, Metric.DRIVER_CALLS)


class Tiny(nn.Module):
    """Two vectors to each matrix, as in GPT-2."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        shapes = [(SIDE,) if i % 3 else (SIDE, SIDE) for i in range(parameters)]
        self.tensors = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(each * (x if each.dim() == 2 else x[0])).sum() for each in self.tensors]).sum()


class Backward:
    """The backward of a model in a DDP, or without one; a call is a step, and returns its seconds of CPU time."""

    def __init__(self, make: Make, ddp: type[TorchDDP] | None, size: Size) -> None:
        parameters, n_buckets = size
        self.x = torch.ones(SIDE, SIDE)
        self.model: nn.Module = Tiny(parameters)
        self.parameters = list(self.model.parameters())
        if ddp is not None:
            cap = sum(parameter.nbytes for parameter in self.parameters) / n_buckets / 2**20
            self.model, _ = wrap(self.model, make, ddp, group=dist.new_group(backend=BACKEND), bucket_cap_mb=cap)

    def __call__(self) -> float:
        for parameter in self.parameters:
            parameter.grad = None
        return cpu_seconds(self.model(self.x).backward)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread."""
    gc.disable()
    start = time.thread_time_ns()
    work()
    end = time.thread_time_ns()
    gc.enable()
    return (end - start) / 1e9


def gpt2_buckets() -> list[list[Shape]]:
    """GPT-2's buckets with small tensors."""
    return [[(SIDE,) * len(shape) for shape in bucket] for bucket in buckets(SHAPES["gpt2-124m"], DEFAULT_CAP_MB << 20)]


class HostCase:
    """An implementation, its steps of each size, and their times."""

    def __init__(self, hook: str, name: str) -> None:
        self.name = name
        make = HOOKS[REFERENCE].pytorch.make if name == PYTORCH else HOOKS[hook].make
        ddp = {NO_REDUCER: None, GRADWIRE: DistributedDataParallel}.get(name, TorchDDP)
        sizes = (GPT2, ONE_BUCKET, LARGE)
        self.steps: dict[Any, Callable[[], float]] = {size: Backward(make, ddp, size) for size in sizes}
        registration = make(dist.new_group(backend=BACKEND), FIRST_COMPRESSED)
        if registration is not None and ddp is not None:
            direct = HookStep(registration, gpt2_buckets(), torch.device("cpu"), is_flat=name != GRADWIRE)
            self.steps[DIRECT] = lambda: cpu_seconds(direct)
        self.seconds: dict[Any, list[float]] = {key: [] for key in self.steps}

    def step(self, is_timed: bool = True) -> None:
        for key, step in self.steps.items():
            seconds = step()
            if is_timed:
                self.seconds[key].append(seconds)

    def extra_us(self, more: Size, fewer: Size, number: int) -> list[float]:
        """Microseconds of each of the ``number`` things that one step has more than another, in every round."""
        return [1e6 * (a - b) / number for a, b in zip(self.seconds[more], self.seconds[fewer], strict=True)]

    def counts(self, driver: Driver) -> dict[str, float]:
        """The `COUNTS` of a bucket."""
        steps = [counts_of(self.steps[size], driver) for size in (GPT2, ONE_BUCKET)]
        collectives, *counts = [(more - fewer) / (GPT2[1] - 1) for more, fewer in zip(*steps, strict=True)]
        found = dict(zip(COUNTS, counts, strict=True))
        is_launched = found[Metric.LAUNCHES_PER_BUCKET] > 0 or self.name != GRADWIRE
        if not is_launched or collectives < 1 or collectives % 1 > 0:
            raise RuntimeError(f"{self.name}: {collectives} collectives and {found} in each bucket; nothing is timed.")
        return {metric: round(count, 1) for metric, count in found.items()}


def counts_of(step: Callable[[], object], driver: Driver) -> list[int]:
    """Collectives, calls of Python and C functions, launches and driver calls of a step."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def now() -> list[int]:
        return [Collectives.count, calls, driver.count("launches"), driver.count("driver_calls")]

    before = now()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return [after - earlier for earlier, after in zip(before, now(), strict=True)]


def measure(hooks: Sequence[str], steps: int) -> Measured:
    if not host_double.c_compilers():
        raise launch.LaunchError("there is no C compiler. Install gcc or clang, or set CC to its path.", "")
    settings = {"steps": steps, "threads": 1}
    records = [record for hook in hooks for record in launch.run(__name__, settings | {"hook": hook}, 1)]
    return Measured(settings, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    hook = settings["hook"]
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        driver = host_double.install(Path(folder))
        bare, *cases = [HostCase(hook, name) for name in (NO_REDUCER, PYTORCH, GRADWIRE_ON_PYTORCH, GRADWIRE)]
        for _ in range(UNTIMED_STEPS):
            for case in cases:
                case.step(is_timed=False)
        counts = [case.counts(driver) for case in cases]
        for _, case in turns(range(settings["steps"]), [bare, *cases], hook):
            case.step()
    return [record for case, of in zip(cases, counts, strict=True) for record in summarize(hook, case, bare, of)]


def summarize(hook: str, case: HostCase, bare: HostCase, counts: dict[str, float]) -> list[Record]:
    more = LARGE[0] - GPT2[0]
    parameter, without = (each.extra_us(LARGE, GPT2, more) for each in (case, bare))
    times = {
        Metric.BUCKET_US: case.extra_us(GPT2, ONE_BUCKET, GPT2[1] - 1),
        Metric.PARAMETER_US: [a - b for a, b in zip(parameter, without, strict=True)],
        Metric.DIRECT_US: [1e6 * seconds / len(gpt2_buckets()) for seconds in case.seconds.get(DIRECT, [])],
    }
    # `percentiles_ms` multiplies by 1000
    metrics = {metric: percentiles_ms([us / 1e3 for us in of]) for metric, of in times.items() if of}
    return records_of("host", {"hook": hook}, case.name, 1, metrics | counts)


def tables(records: Sequence[Record]) -> list[Table]:
    """A row per hook and DDP, below PyTorch's hook."""
    reference = f"{PYTORCH}'s {REFERENCE}"
    rows = [r for r in records if r.implementation != PYTORCH or r["hook"] == records[0]["hook"]]

    def compared(group: Group) -> str:
        same = (record for record in records if record["hook"] == group[0]["hook"])
        return relative(Metric.BUCKET_US, median_of(same, Metric.BUCKET_US, PYTORCH))(group)

    names: dict[str, Callable[[Record], str]] = {
        "hook": lambda record: reference if record.implementation == PYTORCH else display_name(record["hook"]),
        "DDP": lambda record: GRADWIRE if record.implementation == GRADWIRE else PYTORCH,
    }
    columns = [
        ("bucket (us)", value(Metric.BUCKET_US)),
        (f"vs. {reference}", compared),
        ("direct call (us)", value(Metric.DIRECT_US)),
        ("parameter (us)", value(Metric.PARAMETER_US)),
        *((metric.removesuffix(" per bucket"), value(metric)) for metric in COUNTS),
    ]
    notes = [
        f"bucket: CPU time of a backward of {GPT2[0]} tiny parameters in {GPT2[1]} buckets minus that in one, divided "
        f"by {GPT2[1] - 1}; medians of {records[0].provenance['settings']['steps']} interleaved steps",
        f"vs. {reference}: time of a bucket, relative to that of {reference} hook in the same process",
        f"direct call: CPU time of the hook per bucket of GPT-2, with gradients of {SIDE} x {SIDE} that stay in place",
        f"parameter: CPU time of each further parameter, of {LARGE[0]} instead of {GPT2[0]}, minus that without a DDP",
        "calls: of Python and C functions, per bucket. Driver calls: of Triton's launcher, launches included; "
        f"{PYTORCH}'s own operators run on the CPU and are not counted",
    ]
    return [pivot("Host time, no GPU", rows, names, columns, notes)]
