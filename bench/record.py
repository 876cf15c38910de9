"""Records of measurements, and the files of JSON lines that hold them: the only source of tables, plots, comparisons.

A line is one record, or the provenance of the records that follow, ``{"provenance": {...}}``. A file begins with one;
it has several if several runs have added to it.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch

import gradwire


class Metric(StrEnum):
    """A measured quantity, with its unit in parentheses, by which tables format it."""

    TIME_MS = "time (ms)"
    STEP_MS = "step time (ms)"
    NOOP_STEP_MS = "step time with noop_hook (ms)"
    BACKWARD_MS = "backward time (ms)"
    HOST_MS = "host time (ms)"
    BUCKET_US = "host time per bucket (us)"
    PARAMETER_US = "host time per parameter (us)"
    DIRECT_US = "host time per direct call (us)"
    CALLS = "calls per bucket"
    DRIVER_CALLS = "driver calls per bucket"
    LAUNCHES_PER_BUCKET = "Triton launches per bucket"
    OWN_MS = "own cost (ms)"
    EXPOSED_MS = "exposed time (ms)"
    TRAINING_S = "training time (s)"
    TARGET_S = "time to target (s)"
    STEPS = "steps"
    BANDWIDTH = "effective bandwidth (GB/s)"
    LINK_RATE = "all-reduce rate (Mb/s)"
    SENT = "sent (B)"
    SENT_PER_STEP = "sent per step (B)"
    MEMORY = "peak memory (B)"
    VS_GRADWIRE = "time vs. gradwire"
    LAUNCHES = "launches"
    SYNCHRONIZATIONS = "host waits"
    ACCURACY = "test accuracy (%)"
    TRAINING_LOSS = "training loss"
    VALIDATION_LOSS = "validation loss"
    RESIDUAL_RATIO = "residual ratio"
    GAIN = "gain"


class RecordError(Exception):
    """A file does not hold records of a bench."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured quantity."""

    # the bench that measured it, such as "hooks": a module of gradwire.bench or tools
    bench: str
    case: dict[str, Any]  # the workload: hook, model, bucket size, link rate, seed, as far as the bench has them
    implementation: str  # gradwire, PyTorch, or a baseline
    ranks: int  # world size
    metric: str  # the quantity, with its unit in parentheses
    p50: float | None  # the median, or the only value; None for a target that a training missed
    p20: float | None = None  # percentiles, where the measurement was repeated
    p80: float | None = None
    series: list[float] = field(default_factory=list)  # values in the course of a training, one per step or evaluation
    # machine, versions, date, commit, command, settings
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Any:
        """A key of the case, or an attribute."""
        return self.case[name] if name in self.case else getattr(self, name)

    def to_json(self) -> str:
        optional = {"p20": self.p20, "p80": self.p80, "series": self.series or None}
        data = {name: self[name] for name in ("bench", "case", "implementation", "ranks", "metric", "p50")}
        return json.dumps(data | {name: value for name, value in optional.items() if value is not None})


def records_of(
    bench: str, case: dict[str, Any], implementation: str, ranks: int, metrics: Mapping[str, Any]
) -> list[Record]:
    """A record per metric, given its median or a dictionary of its numbers."""
    return [
        Record(
            bench=bench,
            case=case,
            implementation=implementation,
            ranks=ranks,
            metric=metric,
            **(numbers if isinstance(numbers, dict) else {"p50": numbers}),
        )
        for metric, numbers in metrics.items()
    ]


class Measured(NamedTuple):
    """The outcome of a bench."""

    settings: dict[str, Any]  # model, steps, hosts, ...
    records: list[Record]  # without their provenance

    def with_provenance(self, facts: dict[str, Any]) -> list[Record]:
        """The records, with ``facts`` and the settings as their provenance."""
        provenance = facts | {"settings": self.settings}
        return [replace(record, provenance=provenance) for record in self.records]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, Any]:
    """The 20th, 50th and 80th percentile of at least one time, in milliseconds."""
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [*seconds] * 9
    return {f"p{10 * i}": round(1e3 * cuts[i - 1], 4) for i in (2, 5, 8)}


def save(records: Sequence[Record], path: Path) -> None:
    """Write records and their provenance, whole or not at all."""
    lines = []
    for provenance, group in itertools.groupby(records, lambda record: record.provenance):
        lines += [json.dumps({"provenance": provenance}), *(record.to_json() for record in group)]
    with replacing(path) as partial:
        partial.write_text("\n".join(lines) + "\n")


def load(path: Path) -> list[Record]:
    """Read the records of a file. Raises RecordError if the file is missing, or is not one that a bench writes."""
    try:
        records: list[Record] = []
        provenance: Any = None
        for line in path.read_text().splitlines():
            content = json.loads(line)
            if "provenance" in content:
                provenance = content["provenance"]
            else:
                records.append(Record(**content, provenance=provenance))
        if not records or not all(map(_has_right_types, records)):
            raise ValueError("there are no records, or values of other types")
        return records
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path} is not a file that `gradwire bench ... --output` writes ({error!r})") from error


def _has_right_types(record: Record) -> bool:
    numbers = [record.p50, record.p20, record.p80]
    return (
        all(isinstance(text, str) for text in (record.bench, record.implementation, record.metric))
        and isinstance(record.case, dict)
        and isinstance(record.provenance, dict)
        and isinstance(record.ranks, int)
        and isinstance(record.series, list)
        and all(number is None or isinstance(number, int | float) for number in (*numbers, *record.series))
    )


def unique(values: Iterable[Any]) -> list[Any]:
    """The distinct values, in order."""
    return list(dict.fromkeys(values))


def provenance(device: torch.device, backend: str, threads: int) -> dict[str, Any]:
    """Machine, versions, date, commit. Call it before the measurement, which would raise the load average."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gradwire": gradwire.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "backend": backend,
        "threads_per_process": threads,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """The model of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that holds this file, with "-dirty" after local changes; None outside a checkout.

    New files of Python count, too. Results and documentation, which is partly made from them, do not: benches run one
    after another.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:  # a venv inside somebody else's checkout
        return None
    root = here.parents[1]
    commit = _git(root, "rev-parse", "HEAD")
    generated = (":!bench/results", ":!docs", ":!README.md")
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", *generated) or ""
    is_dirty = any(not line.startswith("??") or line.endswith(".py") for line in changes.splitlines())
    return f"{commit}-dirty" if is_dirty and commit else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which replaces ``path`` at the end unless an exception is raised."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.touch(exist_ok=False)  # never through a link that somebody else has made in a shared folder
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units with three digits: 1.23 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
