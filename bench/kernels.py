"""Kernels on parameter lists of real models, compared with plain PyTorch and the bandwidth of a copy.

A model's parameters are split into buckets as DDP splits them. Every implementation goes through several buckets, so
that no cache holds one from the last time, and all implementations of a case take turns. A case is checked before it is
timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch
from rich.progress import Progress

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_cases import CASES, COMPARED, COMPILED, KernelCase, check, copy_bandwidth, time_cases
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of, unique
from gradwire.bench.shapes import SHAPES, buckets, mean_mib, rotation
from gradwire.bench.tables import Table, format_number, groups_of, median_of, pivot, value

DEFAULT_SIZES = (25, 1024)  # MiB at which a bucket is full: DDP's default, and whole models
COPY = "copy_"


def measure(models: Sequence[str], sizes_mib: Sequence[int], rounds: int, device: torch.device) -> Measured:
    """Times of every implementation of every kernel. Raises RuntimeError if a kernel's result is wrong."""
    torch.manual_seed(0)
    copied = round(copy_bandwidth(device), 2)
    records = records_of("kernels", {"kernel": "copy"}, COPY, 1, {Metric.BANDWIDTH: copied})
    with Progress() as progress, torch.no_grad():
        todo = progress.add_task("kernels", total=len(models) * len(sizes_mib) * len(COMPARED))
        for model, size, name in itertools.product(models, sizes_mib, COMPARED):
            shapes = rotation(buckets(SHAPES[model], size << 20), size)
            cases = [CASES[name](bucket_shapes, device) for bucket_shapes in shapes]
            progress.update(todo, description=f"{model}: {cases[0].kernel}")
            records += run(cases, model, mean_mib(shapes), rounds, device)
            progress.advance(todo)
    return Measured({"rounds": rounds}, records)


def run(cases: Sequence[KernelCase], model: str, bucket_mib: int, rounds: int, device: torch.device) -> list[Record]:
    """Check a kernel on the first bucket, then time its implementations on all buckets, interleaved."""
    check(cases[0], model)
    if COMPILED in cases[0].implementations:
        torch._dynamo.reset()  # it stops compiling a function after a number of shapes
    timings = time_cases(cases, rounds, device)
    seconds = {name: [timing.seconds for timing in round_timings] for name, round_timings in timings.items()}
    nbytes = mean(case.nbytes for case in cases)
    records = []
    for name, times in seconds.items():
        metrics: dict[str, Any] = {
            Metric.TIME_MS: percentiles_ms(times),
            Metric.BANDWIDTH: round(1e-9 * nbytes / median(times), 2),
            Metric.VS_GRADWIRE: float(f"{median(times) / median(seconds[GRADWIRE]):.4g}"),
        }
        host = [timing.host_seconds for timing in timings[name] if timing.host_seconds is not None]
        if host:
            metrics[Metric.HOST_MS] = percentiles_ms(host)
        case = {"kernel": cases[0].kernel, "model": model, "bucket_mib": bucket_mib}
        records += records_of("kernels", case, name, 1, metrics)
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    copied = median_of(records, Metric.BANDWIDTH, COPY) or 1.0
    timed = [record for record in records if record.implementation != COPY]
    names = {"bucket": lambda record: f"{record['model']}, {record['bucket_mib']} MiB"}
    result: list[Table] = []
    groups = groups_of(timed, "kernel")
    for (kernel,), group in groups:
        columns = [
            *((name, value(Metric.TIME_MS, name)) for name in unique(record.implementation for record in group)),
            (Metric.HOST_MS, value(Metric.HOST_MS, GRADWIRE)),
            (Metric.BANDWIDTH, value(Metric.BANDWIDTH, GRADWIRE)),
            ("of a copy", lambda rows: f"{100 * (median_of(rows, Metric.BANDWIDTH, GRADWIRE) or 0) / copied:.0f} %"),
        ]
        notes = () if kernel != groups[-1][0][0] else _notes(records, copied)
        result.append(pivot(f"{kernel}: {Metric.TIME_MS}", group, names, columns, notes))
    return result


def _notes(records: Sequence[Record], copied: float) -> list[str]:
    rounds = records[0].provenance["settings"]["rounds"]
    has_host_time = any(record.metric == Metric.HOST_MS for record in records)
    return [
        f"time: per bucket, median of {rounds} interleaved rounds over the buckets",
        *(["host time: until gradwire's call returns; the device starts later"] if has_host_time else []),
        "effective bandwidth: the bytes that gradwire's kernel reads and writes, divided by its time",
        f"of a copy: bandwidth divided by that of copy_, {format_number(copied)} GB/s in the same run",
    ]
