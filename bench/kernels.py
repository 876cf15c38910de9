"""Kernels on parameter lists of real models, beside plain PyTorch and the bandwidth of a copy.

A model's parameters are split into buckets as DDP splits them. Every implementation goes through several buckets, so
that no cache holds one from the last time, and all implementations of a case take turns. A case is checked before it is
timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from math import prod
from statistics import median
from typing import Any

import torch
from rich.progress import Progress

from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_case import Case
from gradwire.bench.kernel_cases import MAKERS
from gradwire.bench.record import BANDWIDTH, TIME_MS, VS_GRADWIRE, Measured, Record, percentiles_ms, unique
from gradwire.bench.shapes import SHAPES, buckets
from gradwire.bench.tables import Table, format_number, groups_of, median_of, pivot, value
from gradwire.bench.timing import in_turn, timed

DEFAULT_SIZES = (25, 1024)  # MiB at which a bucket is full: DDP's default, and whole models
ROTATION_MIB = 100  # of buckets in rotation, so that no cache holds them
WARM_UP = 2
COPY = "copy_"


def measure(models: Sequence[str], sizes_mib: Sequence[int], rounds: int, device: torch.device) -> Measured:
    """Times of every implementation of every kernel.

    Args:
        models: names in `SHAPES`.
        sizes_mib: sizes at which a bucket is full. A smaller model is one bucket.
        rounds: how often each implementation goes through all buckets of a case.
        device: where to measure.

    Raises:
        RuntimeError: a kernel's result is wrong.
    """
    torch.manual_seed(0)
    copied = round(copy_bandwidth(device), 2)
    records = [_record({"kernel": "copy"}, COPY, BANDWIDTH, p50=copied)]
    with Progress() as progress, torch.no_grad():
        todo = progress.add_task("kernels", total=len(models) * len(sizes_mib) * len(MAKERS))
        for model, size, make in itertools.product(models, sizes_mib, MAKERS):
            shapes = buckets(SHAPES[model], size << 20)[: -(-ROTATION_MIB // size)]
            case = make(shapes, device)
            progress.update(todo, description=f"{model}: {case.kernel}")
            numel = sum(map(prod, itertools.chain(*shapes)))
            records += run(case, model, round(4 * numel / len(shapes) / (1 << 20)), rounds, device)
            progress.advance(todo)
    return Measured({"rounds": rounds}, records)


def _record(case: dict[str, Any], implementation: str, metric: str, **numbers: Any) -> Record:
    return Record(bench="kernels", case=case, implementation=implementation, ranks=1, metric=metric, **numbers)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of ``copy_``, reads and writes counted, of 64 MiB that no cache holds."""
    pairs = [torch.ones(2, 16 << 20, device=device) for _ in range(4)]
    seconds = [timed(partial(pair[1].copy_, pair[0]), device) for _ in range(5) for pair in pairs]
    return 1e-9 * pairs[0].nbytes / median(seconds[len(pairs) :])


def run(case: Case, model: str, bucket_mib: int, rounds: int, device: torch.device) -> list[Record]:
    """Check a case, then time its implementations in turns."""
    case.implementations[GRADWIRE](0)
    try:
        case.check()
    except AssertionError as error:
        raise RuntimeError(f"{case.kernel} of {model} is wrong; nothing is timed.") from error
    seconds: dict[str, list[float]] = {name: [] for name in case.implementations}
    for turn in range(WARM_UP + rounds):
        order = in_turn(list(case.implementations.items()), turn)
        for (name, implementation), bucket in itertools.product(order, range(len(case.nbytes))):
            duration = timed(partial(implementation, bucket), device)
            if turn >= WARM_UP:
                seconds[name].append(duration)
    # Buckets differ in size, so the median is that of the rounds' means over the buckets.
    count = len(case.nbytes)
    means = {
        name: [sum(times[i : i + count]) / count for i in range(0, len(times), count)]
        for name, times in seconds.items()
    }
    nbytes = sum(case.nbytes) / count
    records = []
    for name, times in means.items():
        of = {"kernel": case.kernel, "model": model, "bucket_mib": bucket_mib}
        records += [
            _record(of, name, TIME_MS, **percentiles_ms(times)),
            _record(of, name, BANDWIDTH, p50=round(1e-9 * nbytes / median(times), 2)),
            _record(of, name, VS_GRADWIRE, p50=float(f"{median(times) / median(means[GRADWIRE]):.4g}")),
        ]
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per kernel: times of all implementations, and gradwire's bandwidth."""
    copied = median_of(records, BANDWIDTH, COPY) or 1.0
    timed = [record for record in records if record.implementation != COPY]
    names = {"bucket": lambda record: f"{record['model']}, {record['bucket_mib']} MiB"}
    result: list[Table] = []
    groups = groups_of(timed, "kernel")
    for (kernel,), group in groups:
        columns = [
            *((name, value(TIME_MS, name)) for name in unique(record.implementation for record in group)),
            (BANDWIDTH, value(BANDWIDTH, GRADWIRE)),
            ("of a copy", lambda rows: f"{100 * (median_of(rows, BANDWIDTH, GRADWIRE) or 0) / copied:.0f} %"),
        ]
        notes = () if kernel != groups[-1][0][0] else _notes(records, copied)
        result.append(pivot(f"{kernel}: {TIME_MS}", group, names, columns, notes))
    return result


def _notes(records: Sequence[Record], copied: float) -> list[str]:
    rounds = records[0].provenance["settings"]["rounds"]
    return [
        f"time: per bucket, median of {rounds} rounds over the buckets, in turns",
        "effective bandwidth: the bytes that gradwire's kernel reads and writes, divided by its time",
        f"of a copy: in units of the bandwidth of copy_, {format_number(copied)} GB/s in the same run",
    ]
