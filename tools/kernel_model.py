"""``python -m tools.kernel_model h200``: the kernels' times on a GPU, modeled from counts. Nothing runs.

    time = launches * LAUNCH_S + max(bytes / bandwidth, instructions / issue rate)

Bytes are stated by functions next to the kernels. Launches are recorded from the public functions on buckets
without memory. Instructions are those of the kernels compiled for the GPU, where the number of elements of a program is
fixed: others count as none. The model knows neither latency nor caches: a prediction to hold against a measurement.

A *wave* is as many programs as the GPU holds at once. The time above assumes that multiprocessors never wait for work.
A second time is for programs that all begin and end together, so that a partial wave takes as long as a whole one:

    time in whole waves = launches * LAUNCH_S + max(...) * (sum of the waves, rounded up) / (sum of the waves)

A GPU begins a program when another ends, so the truth lies between the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import typer
from rich.progress import Progress

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_cases import CASES, COMPARED, KernelCase, Maker
from gradwire.bench.kernels import DEFAULT_SIZES
from gradwire.bench.record import Measured, Metric, Record
from gradwire.bench.shapes import SHAPES, buckets, mean_mib, rotation
from gradwire.bench.tables import Table, format_number, groups_of, pivot, value
from gradwire.cli.command_runs import measured, report
from gradwire.cli.options import OutputOption, parse_choice, parse_choices, parse_sizes
from tools.compiled import refuse_without_compiler

if TYPE_CHECKING:
    from tools.ahead_of_time import Launch

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WARP = 32
# An assumption: what a kernel adds to the device's time, by starting and draining, when the host runs ahead.
LAUNCH_S = 2e-6

MODELED_US = "modeled time (us)"
BYTES_US = "modeled for bytes (us)"
INSTRUCTIONS_US = "modeled for instructions (us)"
WHOLE_WAVES_US = "modeled time in whole waves (us)"
WAVES = "waves, modeled"
LAUNCHES_US = "modeled for launches (us)"
UNCOUNTED = "launches without a count of instructions"


class Gpu(NamedTuple):
    """Figures of a GPU.

    Attributes:
        name: name for people.
        target: what kernels are compiled for.
        bandwidth: bandwidth of device memory (B/s).
        source: source of the bandwidth.
        multiprocessors: their number.
        clock_hz: the highest clock.
    """

    name: str
    target: str
    bandwidth: float
    source: str
    multiprocessors: int
    clock_hz: float

    @property
    def issue_rate(self) -> float:
        """Instructions of warps per second: each of a multiprocessor's four schedulers issues one per clock.

        CUDA C++ Programming Guide, "Compute Capabilities", 8.x to 10.x.
        """
        return 4 * self.multiprocessors * self.clock_hz


GPUS = {
    # NVIDIA A100 80GB SXM data sheet: 2,039 GB/s. NVIDIA A100 architecture white paper: 108 SMs, 1,410 MHz.
    "a100": Gpu("A100 80GB", "sm_80", 2.039e12, "specified", 108, 1.41e9),
    # NVIDIA H100 SXM data sheet: 3.35 TB/s. NVIDIA H100 architecture white paper: 132 SMs, up to 1.98 GHz.
    "h100": Gpu("H100", "sm_90", 3.35e12, "specified", 132, 1.98e9),
    # 4.3 TB/s of a copy (the data sheet has 4.8). The chip is the H100's: at 1.98 GHz,
    # the copy is 16.5 B per clock and SM.
    "h200": Gpu("H200", "sm_90", 4.3e12, "measured for a copy", 132, 1.98e9),
    # NVIDIA DGX B200 data sheet: 64 TB/s for 8 GPUs. Two dies of 74 SMs: chipsandcheese.com, "Nvidia's B200: Keeping
    # the CUDA Juggernaut Rolling". 1.965 GHz, as its driver reports.
    "b200": Gpu("B200", "sm_100", 8.0e12, "specified", 148, 1.965e9),
}


def measure(models: Sequence[str], sizes_mib: Sequence[int], gpu: str) -> Measured:
    """Modeled times of gradwire's kernels, for the cases of `kernels.measure`.

    Args:
        models: names in `SHAPES`.
        sizes_mib: sizes at which a bucket is full.
        gpu: a name in `GPUS`.
    """
    counter = ProgramCounter(GPUS[gpu].target)
    records: list[Record] = []
    with Progress() as progress, torch.no_grad():
        todo = progress.add_task(f"model of {gpu}", total=len(models) * len(sizes_mib) * len(COMPARED))
        for model, size in itertools.product(models, sizes_mib):
            shapes = rotation(buckets(SHAPES[model], size << 20), size)
            for name in COMPARED:
                cases, launches = recorded_cases(CASES[name], shapes)
                of = {"kernel": cases[0].kernel, "model": model, "bucket_mib": mean_mib(shapes)}
                records += [
                    Record(
                        bench="kernel_model", case=of, implementation=f"model of {gpu}", ranks=1, metric=metric, p50=p50
                    )
                    for metric, p50 in modeled([case.nbytes for case in cases], launches, GPUS[gpu], counter).items()
                ]
                progress.advance(todo)
    return Measured({"modeled_gpu": gpu, "launch_us": 1e6 * LAUNCH_S}, records)


def recorded_cases(
    make: Maker, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[list[KernelCase], list[list[Launch]]]:
    """Cases on tensors without memory, and the launches of gradwire's implementation on each bucket."""
    from tools.ahead_of_time import recorded_launches

    cases: list[KernelCase] = []
    recorded_launches(lambda: cases.extend(make(shape_list, torch.device("meta")) for shape_list in shapes))
    return cases, [recorded_launches(case.implementations[GRADWIRE]) for case in cases]


class Programs(NamedTuple):
    """The programs of a launch.

    Attributes:
        instructions: instructions of all warps; None if the number of elements of a program is not fixed.
        number: number of programs.
        resident: how many a multiprocessor holds at once.
    """

    instructions: float | None
    number: int
    resident: int


class ProgramCounter:
    """Counts programs of launches on one target, and their instructions. Compiles every variant of a kernel once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._per_program: dict[object, tuple[float | None, int]] = {}

    def __call__(self, launch: Launch) -> Programs:
        """The programs of a launch."""
        from tools.ahead_of_time import compile_launch, variant
        from tools.assembly import inspect, resident_programs

        key = (launch.name, variant(launch, self.target))
        if key not in self._per_program:
            compiled = compile_launch(launch, self.target)
            binary = inspect(compiled)
            per_element, elements = binary.instructions_per_element, binary.program_elements
            is_known = per_element is not None and elements is not None
            instructions = per_element * elements / WARP if is_known else None  # type: ignore[operator]
            self._per_program[key] = instructions, resident_programs(binary, compiled)
        per_program, resident = self._per_program[key]
        number = math.prod(launch.grid)
        return Programs(None if per_program is None else number * per_program, number, resident)


def modeled(
    nbytes: Sequence[float], launches: Sequence[Sequence[Launch]], gpu: Gpu, counter: ProgramCounter
) -> dict[str, float]:
    """The modeled times of a case and what they are made of, as means over its buckets."""
    bucket_programs = [[counter(launch) for launch in bucket_launches] for bucket_launches in launches]
    each = [_modeled_bucket(size, programs, gpu) for size, programs in zip(nbytes, bucket_programs, strict=True)]
    return {metric: round(sum(numbers[metric] for numbers in each) / len(each), 3) for metric in each[0]}


def _modeled_bucket(nbytes: float, launches: Sequence[Programs], gpu: Gpu) -> dict[str, float]:
    """`modeled` for one bucket."""
    known = [each.instructions for each in launches if each.instructions is not None]
    for_launches = 1e6 * len(launches) * LAUNCH_S
    for_bytes, for_instructions = 1e6 * nbytes / gpu.bandwidth, 1e6 * sum(known) / gpu.issue_rate
    waves = [each.number / (each.resident * gpu.multiprocessors) for each in launches]
    busy = max(for_bytes, for_instructions)
    return {
        LAUNCHES_US: for_launches,
        BYTES_US: for_bytes,
        INSTRUCTIONS_US: for_instructions,
        MODELED_US: for_launches + busy,
        WHOLE_WAVES_US: for_launches + busy * sum(map(math.ceil, waves)) / sum(waves),
        WAVES: sum(waves),
        Metric.LAUNCHES: len(launches),
        UNCOUNTED: len(launches) - len(known),
    }


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per kernel: the modeled time and its parts."""
    gpu = GPUS[records[0].provenance["settings"]["modeled_gpu"]]
    names = {"bucket": lambda record: f"{record['model']}, {record['bucket_mib']} MiB"}
    metrics = (Metric.LAUNCHES, LAUNCHES_US, BYTES_US, INSTRUCTIONS_US, MODELED_US, WAVES, WHOLE_WAVES_US)
    columns = [(_column(metric), value(metric)) for metric in metrics]
    groups = groups_of(records, "kernel")
    return [
        pivot(
            f"{kernel}: {gpu.name}, modeled, not measured",
            group,
            names,
            columns,
            _notes(gpu) if kernel == groups[-1][0][0] else (),
        )
        for (kernel,), group in groups
    ]


def _column(metric: str) -> str:
    return metric.replace("modeled for", "for").replace("modeled time in", "in").replace(", modeled", "")


def _notes(gpu: Gpu) -> list[str]:
    return [
        "modeled, not measured: time for launches plus the larger of the times for bytes and for instructions",
        f"launches: {format_number(1e6 * LAUNCH_S)} us each, an assumption",
        f"bytes: those that the kernels must read and write, at {format_number(1e-12 * gpu.bandwidth)} TB/s, "
        f"{gpu.source}",
        f"instructions: of the kernels compiled for {gpu.target}, at {format_number(1e-12 * gpu.issue_rate)} Tinstr/s; "
        "kernels whose programs handle a varying number of elements count as none",
        f"waves: of as many programs as {gpu.multiprocessors} multiprocessors hold, of all launches",
        "in whole waves: the time if a partial wave took as long as a whole one",
    ]


@app.command()
def main(
    gpu: Annotated[str, typer.Argument(help=f"The GPU: {', '.join(GPUS)}.")],
    models: Annotated[str, typer.Option(help="Models whose parameter shapes to use, comma-separated.")] = ", ".join(
        SHAPES
    ),
    sizes: Annotated[str, typer.Option(help="Bucket sizes in MiB, comma-separated.")] = ", ".join(
        map(str, DEFAULT_SIZES)
    ),
    output: OutputOption = None,
) -> None:
    """Predict the times of the cases of `gradwire bench kernels` on a GPU. Measures nothing."""
    parse_choice(gpu, GPUS, "gpu")
    refuse_without_compiler("tools.kernel_model")
    modeled = partial(measure, parse_choices(models, SHAPES, "--models"), parse_sizes(sizes), gpu)
    program = "python -m tools.kernel_model"
    report(measured(program, modeled, torch.device("cpu"), program=program), tables, output)


if __name__ == "__main__":
    app()
