"""``python -m tools.gpu_records LANE --output FILE``: the times that `make gpu` has measured, as records of a bench.

LANE is the file of JSON lines that the GPU lane writes, build/gpu_lane.jsonl; the cases of its stage *bench* are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Measured, Metric, Record, records_of, save
from gradwire.bench.tables import Table, groups_of, median_of

COMMAND = "python -m tools.gpu_records build/gpu_lane.jsonl --output bench/results/gpu.jsonl"
COPY = "copy_"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

IN_GRAPH, NBYTES, INCLUDES_HOST = "time in a CUDA graph (ms)", "read and written (B)", "includes host time"
# Metrics of a row of the lane, with the names of their keys.
METRICS = {
    Metric.TIME_MS: "device_ms",
    IN_GRAPH: "graph_ms",
    Metric.HOST_MS: "host_ms",
    Metric.STEP_MS: "step_ms",
    NBYTES: "nbytes",
    INCLUDES_HOST: "includes_host",  # 1 or 0
    Metric.LAUNCHES: "launches",
    Metric.SYNCHRONIZATIONS: "host_waits",
    "bandwidth (GB/s)": "gb_per_s",
}
# Facts of a case that are the same for all.
FACTS = (
    *("gradwire", "commit", "torch", "triton", "cuda", "nccl", "python", "system"),
    *("cpu", "cpu_count", "gpu", "backend"),
)
HOOK, GRAPH = "hook ", "graph of hook "  # how the names of these cases begin
LINK = ", link of "  # what is in the names of steps on an emulated link


def measured(lines: Sequence[dict[str, Any]]) -> list[Record]:
    """The records of the cases of stage *bench* that have passed."""
    cases = [line for line in lines if line["stage"] == "bench" and line["status"] == "passed"]
    records = [
        record
        for line in cases
        for row in line["measured"]
        for record in records_of(
            "gpu",
            {"name": line["case"]},
            row["implementation"],
            line["ranks"],
            {metric: _number(row[key]) for metric, key in METRICS.items() if row.get(key) is not None},
        )
    ]
    facts = {name: cases[0].get(name) for name in FACTS}
    return Measured({}, records).with_provenance({"date": cases[-1]["date"], **facts, "command": COMMAND})


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def tables(records: Sequence[Record]) -> list[Table]:
    """Kernels on a bucket, and hooks on a model: gradwire's time, its floor, and the best other time."""
    groups = {name: group for (name,), group in groups_of(records, "name")}
    rate = next(record.p50 for record in records if record.implementation == COPY) or 1.0
    kernels = [_row(name, group, rate) for name, group in groups.items() if HOOK not in name and name != "copy"]
    links = [name for name in groups if LINK in name]
    hooks = dict.fromkeys(n.removeprefix(GRAPH).removeprefix(HOOK) for n in groups if HOOK in n and n not in links)
    notes = [
        "time: median, between two events on the device, with the host ahead; * the call waits for the device or fills "
        "its queue, so that host time is included; there is no speed-up then, because gradwire's time is without it",
        f"floor: the time of the bytes that gradwire's kernels read and write, at the {rate:,.0f} GB/s of copy_ in the "
        "same run",
        "launches: gradwire's, and those of the other implementation",
        "host: time until a step is enqueued",
    ]
    columns = [
        *("gradwire (us)", "in a CUDA graph (us)", "time / floor"),
        *("fastest other (us)", "fastest other", "speed-up", "launches"),
    ]
    gpu = records[0].provenance["gpu"]
    made = [Table(title=f"Kernels on a bucket, {gpu}", headers=["kernel", *columns], rows=kernels, notes=notes[:-1])]
    title = f"Hooks on all buckets of a model, one rank, {gpu}"
    hosts = ["host (us)", "host, other (us)"]
    groups_of_hooks = [(name, [*groups.get(HOOK + name, ()), *groups.get(GRAPH + name, ())]) for name in hooks]
    rows = [[*_row(name, group, rate), *_host(group)] for name, group in groups_of_hooks]
    made.append(Table(title=title, headers=["hook", *columns, *hosts], rows=rows, notes=notes))
    title = f"Steps of a small model on an emulated link, one rank, {gpu}"
    rows = [[name.removeprefix(HOOK), *_steps(groups[name])] for name in links]
    made.append(Table(title=title, headers=["hook", "gradwire (ms)", "PyTorch's closest (ms)", "speed-up"], rows=rows))
    return [table for table in made if table.rows]


def _row(name: str, group: Sequence[Record], rate: float) -> list[str]:
    times = {record.implementation: record.p50 or 0.0 for record in group if record.metric == Metric.TIME_MS}
    in_graph = times.pop("captured", None) or median_of(group, IN_GRAPH, GRADWIRE)
    eager = times.pop("eager", None)
    ours = GRADWIRE if GRADWIRE in times else "eager"
    own = times.get(GRADWIRE, eager) or 0.0
    others = {name: time for name, time in times.items() if not name.startswith(GRADWIRE)}
    best = min(others, key=others.__getitem__) if others else ""
    waits = bool(best and median_of(group, INCLUDES_HOST, best))
    floor_ms = 1e-6 * (median_of(group, NBYTES, ours) or 0.0) / rate
    launches = [median_of(group, Metric.LAUNCHES, each) for each in (ours, best)]
    return [
        name,
        _us(own),
        "" if in_graph is None else _us(in_graph),
        f"{own / floor_ms:.2f}x" if floor_ms > 1e-3 else "",  # below 1 us, launches take longer than the bytes
        (_us(others[best]) + "*" * waits) if best else "",
        best,
        f"{others[best] / own:.1f}x" if best and not waits else "",
        ", ".join(f"{number:.0f}" for number in launches if number is not None),
    ]


def _host(group: Sequence[Record]) -> list[str]:
    """The host's time for a step: gradwire's, and the shortest other."""
    times = {record.implementation: record.p50 or 0.0 for record in group if record.metric == Metric.HOST_MS}
    others = [time for name, time in times.items() if name not in (GRADWIRE, "eager", "captured")]
    return ["" if ms is None else _us(ms) for ms in (times.get(GRADWIRE), min(others, default=None))]


def _steps(group: Sequence[Record]) -> list[str]:
    """gradwire's step, PyTorch's, and the ratio."""
    own, other = median_of(group, Metric.STEP_MS, GRADWIRE), median_of(group, Metric.STEP_MS, PYTORCH)
    return [f"{own:.1f}", f"{other:.1f}", f"{other / own:.2f}x"] if own and other else [f"{own:.1f}", "", ""]


def _us(ms: float) -> str:
    return f"{1e3 * ms:,.0f}"


@app.command()
def main(
    lane: Annotated[Path, typer.Argument(help="File of JSON lines that `make gpu` has written.")],
    output: Annotated[Path, typer.Option(help="File for the records.")],
) -> None:
    """Keep the times that `make gpu` has measured."""
    save(measured([json.loads(line) for line in lane.read_text().splitlines()]), output)


if __name__ == "__main__":
    app()
