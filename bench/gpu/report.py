"""Plain-text tables of what the stages of the GPU lane have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.bench.implementations import GRADWIRE, PYTORCH

Row = Mapping[str, Any]

NOTES = (
    "device ms: between two events, with the host ahead, after a spin; * where the call waits for the device or fills "
    "its queue, so that host time is included",
    "host ms: until the call returns, with all work enqueued",
    "graph ms: a replay of a CUDA graph of the same work",
    "floor ms: bytes that gradwire's kernels read and write at least, at the bandwidth of a copy in this run",
    "waits: calls in which the host waits for the device, a stream or an event; launches and waits of one call",
    "step ms: forward and backward of a small model, on an emulated link (a model, not a measured network)",
)

# Goals of the host's time for a step, in ms: PyTorch's fp16 hook took 1.4 on an H200 (docs/log/kernels.md).
HOST_GOALS = {"hook fp16, gpt2-124m": 1.4, "hook int4, gpt2-124m": 3.0, "hook powersgd-r4, gpt2-124m": 1.0}
LINK = "link of 100gbit"  # on which the steps of these hooks are to be at least as fast as with PyTorch's fp16
LINK_GOALS = ("fp16", "int4")


def verdicts(measured: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line for each goal that was measured: whether it holds."""
    lines = []
    for case, goal in HOST_GOALS.items():
        for row in measured.get(case, ()):
            if row["implementation"] == GRADWIRE and (host := _median(row, "host_ms")) is not None:
                lines.append(f"goal {_held(host <= goal)}: {case}, host {host:.2f} ms, at most {goal} ms")
    steps = {
        (hook, row["implementation"]): _median(row, "step_ms")
        for hook in LINK_GOALS
        for row in measured.get(f"hook {hook}, {LINK}", ())
    }
    reference = steps.get(("fp16", PYTORCH))
    for hook in LINK_GOALS:
        step = steps.get((hook, GRADWIRE))
        if step is not None and reference is not None:
            what = f"hook {hook}, {LINK}, step {step:.2f} ms, at most {reference:.2f} ms of PyTorch's fp16"
            lines.append(f"goal {_held(step <= reference)}: {what}")
    return lines


def _held(holds: bool) -> str:
    return "met" if holds else "MISSED"


def tables(measured: Mapping[str, Sequence[Row]]) -> list[str]:
    """The lines of a table of all rows, by case."""
    if not measured:
        return []
    bandwidth = next((row["gb_per_s"] for row in measured.get("copy", ())), None)
    header = ("case", "", "device ms", "graph ms", "host ms", "floor ms", "of floor", "launches", "waits", "step ms")
    body = [_cells(case, row, bandwidth) for case, rows in measured.items() for row in rows if "gb_per_s" not in row]
    lines = [f"copy: {bandwidth:,} GB/s, read and written"] if bandwidth is not None else []
    return [*lines, *_aligned([header, *body]), *NOTES, *verdicts(measured)] if body else lines


def _cells(case: str, row: Row, bandwidth: float | None) -> tuple[str, ...]:
    device_ms, nbytes = _median(row, "device_ms"), row.get("nbytes")
    floor_ms = 1e-6 * nbytes / bandwidth if nbytes is not None and bandwidth else None
    ratio = device_ms / floor_ms if device_ms is not None and floor_ms else None
    return (
        case,
        row["implementation"],
        _number(device_ms) + ("*" if row.get("includes_host") else ""),
        _number(_median(row, "graph_ms")),
        _number(_median(row, "host_ms")),
        _number(floor_ms),
        f"{ratio:.2f}x" if ratio is not None else "",
        str(row.get("launches", "")),
        str(row.get("host_waits", "")),
        _number(_median(row, "step_ms")),
    )


def _median(row: Row, name: str) -> float | None:
    percentiles = row.get(name)
    return percentiles["p50"] if percentiles else None


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of two columns of text and further ones of numbers; columns without a number are left out."""
    kept = [i for i in range(len(rows[0])) if i < 2 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return [
        "  ".join(row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in kept).rstrip() for row in rows
    ]
