"""What a demo or a bench measured, as data with its provenance: the only source of tables and plots."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import gradwire


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a demo was asked to do.

    Attributes:
        hooks: names in `gradwire.bench.hooks.HOOKS`, one training each.
        processes: number of ranks.
        epochs: passes over the training images.
        seed: of the initial weights and the order of the data; the split is always the same.
        command: the command line.
    """

    hooks: tuple[str, ...]
    processes: int
    epochs: int
    seed: int
    command: str

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Settings":
        """What ``dataclasses.asdict`` took apart, also after a way through JSON."""
        return cls(**data | {"hooks": tuple(data["hooks"])})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        hook: its name in `gradwire.bench.hooks.HOOKS`.
        description: what the hook sends.
        final_loss: training loss, mean of the last epoch.
        test_accuracy: from 0 to 1.
        bytes_per_step: payload that a rank hands to collectives, mean of all steps.
        step_ms: time of a whole step on rank 0 in milliseconds, by percentile: p20, p50, p80.
        losses: training loss of each step, mean over the ranks.
        sent_bytes: payload that a rank has handed to collectives by the end of each step.
    """

    hook: str
    description: str
    final_loss: float
    test_accuracy: float
    bytes_per_step: float
    step_ms: dict[str, float]
    losses: list[float]
    sent_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All trainings of one demo, with what is needed to judge the numbers.

    Attributes:
        provenance: machine, versions, date, commit.
        settings: what was asked for.
        train_images, test_images: how many.
        parameters: how many the network has.
        batch_size: images of a step, over all ranks.
        plain_steps: of each training, before low-rank hooks begin to compress.
        runs: one for each hook, in the order of the settings.
    """

    provenance: dict[str, Any]
    settings: Settings
    train_images: int
    test_images: int
    parameters: int
    batch_size: int
    plain_steps: int
    runs: list[Run]

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Results":
        """The same for results."""
        return cls(**data | {"settings": Settings.of(data["settings"]), "runs": [Run(**run) for run in data["runs"]]})


def provenance(device: torch.device, backend: str, threads: int) -> dict[str, Any]:
    """Where, when and with what the numbers are made. To be called before: the load is to be that of others."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gradwire": gradwire.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "backend": backend,
        "threads_per_process": threads,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that holds this file, with "-dirty" after local changes; None outside a checkout.

    New results, and pages and plots made from them, are no such changes: a bench may follow another.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:  # a venv inside somebody else's checkout
        return None
    root = here.parents[1]
    commit = _git(root, "rev-parse", "HEAD")
    made = (":!bench/results", ":!docs/plots", ":!docs/benchmarks.md", ":!README.md")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *made)
    return f"{commit}-dirty" if changes and commit else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def save_results(results: Results, path: Path) -> None:
    """Write ``results`` as JSON, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(asdict(results), indent=1) + "\n")


def save_measurements(measurements: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    """Write a bench's numbers with their provenance as JSON, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(json.dumps({"provenance": facts, "measurements": measurements}, indent=1) + "\n")


def load_results(path: Path) -> Results:
    """Read what `save_results` wrote."""
    return Results.of(json.loads(path.read_text()))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` at the end, unless an exception comes first."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
