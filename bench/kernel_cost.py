"""The speed of kernels on parameter lists of real models, beside their floor and what one would write without them.

A model's parameters are cut into buckets as DDP cuts them. Every contender goes through several buckets, so that no
cache holds one from the last time, and all contenders of a case take turns. A case is checked before it is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from gradwire.bench.kernel_cases import MAKERS, OURS, Case
from gradwire.bench.measuring import in_turn, percentiles_ms, timed
from gradwire.bench.report import bench_table, machine_line
from gradwire.bench.shapes import SHAPES, buckets

DEFAULT_SIZES = (25, 1024)  # MiB at which a bucket is full: DDP's default, and whole models
ROTATION_MIB = 100  # of buckets in rotation, so that no cache holds them
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a contender took for one bucket.

    Attributes:
        kernel: what it does.
        model: whose shapes, a key of `gradwire.bench.shapes.SHAPES`.
        bucket_mib: the size of a bucket as fp32, the mean of those that were timed.
        contender: who.
        ms: p20, p50, p80.
        gb_per_s: the bytes that gradwire's kernel moves, as its own traffic function counts them, in the median time.
        of_copy: that, in units of the bandwidth of a plain copy on this device.
        vs_gradwire: the median in units of gradwire's.
    """

    kernel: str
    model: str
    bucket_mib: int
    contender: str
    ms: dict[str, float]
    gb_per_s: float
    of_copy: float
    vs_gradwire: float


def measure(models: Sequence[str], sizes_mib: Sequence[int], rounds: int, device: torch.device) -> dict[str, Any]:
    """Times of every kernel and its rivals.

    Args:
        models: names in `SHAPES`.
        sizes_mib: at which a bucket is full. A smaller model is one bucket.
        rounds: times that each contender goes through all buckets of a case.
        device: where to measure.

    Returns:
        What `kernel_tables` takes and JSON holds: the bandwidth of a copy, and a list of `Timing` as dictionaries.

    Raises:
        RuntimeError: a kernel's result is wrong.
    """
    torch.manual_seed(0)
    copied = copy_bandwidth(device)
    timings: list[Timing] = []
    with Progress() as progress, torch.no_grad():
        todo = progress.add_task("kernels", total=len(models) * len(sizes_mib) * len(MAKERS))
        for model, size, make in itertools.product(models, sizes_mib, MAKERS):
            shapes = buckets(SHAPES[model], size << 20)[: -(-ROTATION_MIB // size)]
            case = make(shapes, device)
            progress.update(todo, description=f"{model}: {case.kernel}")
            elements = sum(map(prod, itertools.chain(*shapes)))
            timings += run(case, model, round(4 * elements / len(shapes) / (1 << 20)), rounds, copied, device)
            progress.advance(todo)
    return {"rounds": rounds, "copy_gb_per_s": round(copied, 2), "timings": [asdict(timing) for timing in timings]}


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of ``copy_``, reading and writing counted, of 64 MiB that no cache holds."""
    pairs = [torch.ones(2, 16 << 20, device=device) for _ in range(4)]
    seconds = [timed(partial(pair[1].copy_, pair[0]), device) for _ in range(5) for pair in pairs]
    return 1e-9 * pairs[0].nbytes / median(seconds[len(pairs) :])


def run(case: Case, model: str, size: int, rounds: int, copied: float, device: torch.device) -> list[Timing]:
    """Check a case, then time its contenders in turns."""
    case.contenders[OURS](0)
    try:
        case.check()
    except AssertionError as error:
        raise RuntimeError(f"{case.kernel} of {model} is wrong; nothing is timed.") from error
    seconds: dict[str, list[float]] = {name: [] for name in case.contenders}
    for turn in range(WARM_UP + rounds):
        order = in_turn(list(case.contenders.items()), turn)
        for (name, contender), bucket in itertools.product(order, range(len(case.nbytes))):
            took = timed(partial(contender, bucket), device)
            if turn >= WARM_UP:
                seconds[name].append(took)
    # Buckets differ in size, so the middle one of a round's means is what a bucket takes.
    count = len(case.nbytes)
    means = {
        name: [sum(times[i : i + count]) / count for i in range(0, len(times), count)]
        for name, times in seconds.items()
    }
    nbytes = sum(case.nbytes) / count
    ours = median(means[OURS])
    return [
        Timing(
            kernel=case.kernel,
            model=model,
            bucket_mib=size,
            contender=name,
            ms=percentiles_ms(times),
            gb_per_s=round(1e-9 * nbytes / median(times), 2),
            of_copy=round(1e-9 * nbytes / median(times) / copied, 3),
            vs_gradwire=float(f"{median(times) / ours:.4g}"),
        )
        for name, times in means.items()
    ]


def kernel_tables(measured: dict[str, Any], facts: dict[str, Any]) -> Iterator[Table]:
    """A table for each kernel; what the numbers mean is below the last."""
    by_kernel = sorted(measured["timings"], key=itemgetter("kernel"))
    kernels = list(dict.fromkeys(row["kernel"] for row in by_kernel))
    for kernel, rows in itertools.groupby(by_kernel, key=itemgetter("kernel")):
        caption = _caption(measured, facts) if kernel == kernels[-1] else None
        table = bench_table(kernel, caption, ("model, bucket", "ms", "GB/s", "of a\ncopy", "vs\ngradwire"))
        for (model, size), contenders in itertools.groupby(rows, key=itemgetter("model", "bucket_mib")):
            table.add_row(f"{model}, {size} MiB", style="bold")
            for row in contenders:
                ms = row["ms"]
                table.add_row(
                    f"  {row['contender']}",
                    f"{ms['p50']:.2f} ({ms['p20']:.1f}-{ms['p80']:.1f})",
                    f"{row['gb_per_s']:.3g}",
                    f"{100 * row['of_copy']:.0f} %",
                    f"{row['vs_gradwire']:.2f}x" if row["contender"] != OURS else "",
                )
        yield table


def _caption(measured: dict[str, Any], facts: dict[str, Any]) -> str:
    return (
        f"ms: for one bucket, median (20th-80th percentile) of {measured['rounds']} rounds over\n"
        "  the buckets, in turns\n"
        "GB/s: the bytes that gradwire's kernel moves, in that time\n"
        f"of a copy: in units of copy_, which moves {measured['copy_gb_per_s']:.3g} GB/s here\n"
        f"{machine_line(facts)}"
    )
