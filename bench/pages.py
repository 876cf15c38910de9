"""README's and docs' tables of benches, made from the results that are kept and from nothing else; plots beside them.

A page says where a table goes by a pair of comments, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; what stands
between them is replaced. `TABLES` holds what there is.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gradwire.bench.contenders import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.converge import summarize, target_of
from gradwire.bench.hooks import star
from gradwire.bench.kernel_cases import OURS
from gradwire.bench.report import format_bytes, format_number, format_rate, machine_line
from gradwire.bench.results import replacing

PAGES = ("README.md", "docs/benchmarks.md")
PLOTS = "docs/plots"
_HOOK_NAMES = {"none": "no hook", "noop": "noop: nothing sent"}

Results = dict[str, Any]  # what a bench wrote: its measurements and their provenance


class PageError(Exception):
    """A page asks for a table that there is not."""


def write_pages(root: Path) -> list[Path]:
    """Fill in the pages and draw the plots of a checkout; returns what has been written.

    Raises:
        PageError: a page names a table that there is not, or whose results are missing or no bench's.
    """
    from gradwire.bench.plots import DRAWINGS  # matplotlib takes a second to import

    results = load_all(root / "bench" / "results")
    pages = {root / name: fill((root / name).read_text(), results) for name in PAGES}
    for path, text in pages.items():
        with replacing(path) as partial:
            partial.write_text(text)
    written = list(pages)
    folder = root / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        if name in results:
            draw(results[name], folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


def load_all(folder: Path) -> dict[str, Results]:
    """The results of each bench, by the name of their file."""
    return {path.stem: _load(path) for path in sorted(folder.glob("*.json"))}


def _load(path: Path) -> Results:
    try:
        results: Results = json.loads(path.read_text())
    except ValueError as error:
        raise PageError(f"{path} is not what a bench writes ({error}). Run that bench again, or delete it.") from error
    return results


def fill(page: str, results: dict[str, Results]) -> str:
    """The page with every table made anew. See `write_pages` for what it raises."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        bench = name.partition("-")[0]
        if name not in TABLES or bench not in results:
            raise PageError(f"There is no table {name!r}, or no bench/results/{bench}.json for it. Run that bench.")
        return f"<!-- begin {name} -->\n{TABLES[name](results[bench])}<!-- end {name} -->"

    return re.sub(r"<!-- begin (?P<name>\S+) -->\n.*?<!-- end (?P=name) -->", replaced, page, flags=re.DOTALL)


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, all columns but the first aligned to the right."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in (headers, rule, *rows))


def _source(results: Results) -> str:
    facts = results["provenance"]
    machine, *rest = machine_line(facts).splitlines()
    name, _, changes = (facts["commit"] or "").partition("-")
    commit = f", commit {name[:10]}{' with local changes' if changes else ''}" if name else ""
    return f"\n`{facts['command']}`{commit}. {machine}{''.join(f'; {line}' for line in rest)}.\n"


def _ms(ms: dict[str, float]) -> str:
    return format_number(ms["p50"])


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else ""


def _hook(hook: str) -> str:
    """What a table calls a hook; with a star if PyTorch's is only the nearest that it has."""
    return f"{_HOOK_NAMES.get(hook, hook)}{star(hook)}"


def network_table(results: Results) -> str:
    """Milliseconds a step by rate and hook: PyTorch's, gradwire's, and the latter's bytes."""
    rows = []
    for (rate, hook), group in itertools.groupby(results["measurements"]["measured"], key=itemgetter("rate", "hook")):
        steps = {step["provider"]: step for step in group if not step["one_bucket"] or hook != "noop"}
        ours, theirs = steps[GRADWIRE], steps[PYTORCH]
        sent = format_bytes(ours["link_bytes"]) if ours["link_bytes"] is not None else ""
        times = (_ms(theirs["step_ms"]), _ms(ours["step_ms"]), _ratio(ours["vs_pytorch"]))
        exposed = f"{theirs['exposed_ms']:,.0f} / {ours['exposed_ms']:,.0f}"
        rows.append((format_rate(rate), _hook(hook), *times, exposed, _ratio(ours["vs_noop"]), sent))
    headers = ("link", "hook", "PyTorch, ms", "gradwire, ms", "ratio", "exposed", "in units of noop", "sent")
    reached = (f"{mbit:,.0f} ({format_rate(rate)})" for rate, mbit in results["measurements"]["reached_mbit"].items())
    return f"{markdown(headers, rows)}\nMb/s that a plain all-reduce reaches: {', '.join(reached)}.{_source(results)}"


def network_summary(results: Results) -> str:
    """A row for each rate: PyTorch's and gradwire's milliseconds a step with each hook."""
    measured = results["measurements"]["measured"]
    of = {(step["rate"], step["hook"], step["provider"]): step["step_ms"] for step in reversed(measured)}
    rates, hooks = (list(dict.fromkeys(step[key] for step in measured)) for key in ("rate", "hook"))
    rows = (
        (format_rate(rate), *(f"{_ms(of[rate, hook, PYTORCH])} / {_ms(of[rate, hook, GRADWIRE])}" for hook in hooks))
        for rate in rates
    )
    headers = ("ms per step: PyTorch's / gradwire's", *(_HOOK_NAMES.get(hook, hook) for hook in hooks))
    return markdown(headers, rows) + _source(results)


def hooks_table(results: Results) -> str:
    """The own cost of each hook: PyTorch's, gradwire's on PyTorch's DDP, and gradwire's on its own; then what else."""
    costs, peaks = results["measurements"]["costs"], results["measurements"]["peak_memory"]
    rows, resources = [], []
    for (ranks, hook), group in itertools.groupby(costs, key=itemgetter("ranks", "hook")):
        ours, mixed, theirs = _sides(group)
        own = (f"{cost['own_ms']:.1f}" for cost in (theirs, mixed, ours))
        is_own = hook != "noop"  # of which nothing but noise is left
        ratio = _ratio(ours["own_vs_pytorch"] if is_own else None)
        rows.append((_hook(hook), str(ranks), *own, ratio, _ratio(ours["step_vs_pytorch"])))
        if ranks == costs[0]["ranks"]:
            beyond = (max(peaks[hook][side] - peaks["noop"][GRADWIRE], 0) for side in (PYTORCH, GRADWIRE))
            counted = [f"{cost['host_ms']:.1f}" for cost in (theirs, ours)]
            if ours["launches"] is not None:
                counted += [f"{cost['launches']} / {cost['synchronizations']}" for cost in (theirs, ours)]
            resources.append((_hook(hook), *counted, *map(format_bytes, beyond)))
    headers = (
        "hook",
        "ranks",
        "PyTorch, ms",
        "gradwire on PyTorch's DDP",
        "gradwire on its own",
        "ratio",
        "whole step",
    )
    sides = ["PyTorch", "gradwire"]
    launches = [f"launches / waits, {side}" for side in sides] if costs[0]["launches"] is not None else []
    others = ("hook", *(f"host ms, {side}" for side in sides), *launches, *(f"memory, {side}" for side in sides))
    return f"{markdown(headers, rows)}\n{markdown(others, resources)}{_source(results)}"


def _sides(costs: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of one hook: gradwire's, gradwire's on PyTorch's DDP, PyTorch's."""
    by_provider = {cost["provider"]: cost for cost in costs}
    return by_provider[GRADWIRE], by_provider[GRADWIRE_ON_PYTORCH], by_provider[PYTORCH]


def reducer_table(results: Results) -> str:
    """Ratios of backwards to PyTorch's, by model, ranks and hook."""
    rows = []
    for (model, ranks), group in itertools.groupby(
        results["measurements"]["backwards"], key=itemgetter("model", "ranks")
    ):
        backwards = {row["provider"]: row for row in group}
        none = backwards["no reducer"]
        size = f"{model}: {none['parameters']} parameters, {none['elements'] / 1e6:.2g} M"
        hooks = ("", ", noop_hook", ", fp16_compress_hook")
        theirs = backwards["PyTorch"]["ms"]
        ratios = (_ratio(backwards[f"gradwire{hook}"]["vs_pytorch"]) for hook in hooks)
        rows.append((size, str(ranks), _ms(none["ms"]), _ms(theirs), *ratios))
    headers = ("model", "ranks", "no reducer, ms", "PyTorch, ms", "gradwire / PyTorch: no hook", "noop", "fp16")
    memory = results["measurements"]["peak_memory"]
    bare = memory.get("no reducer", 0)
    beyond = [(name, format_bytes(nbytes - bare)) for name, nbytes in memory.items() if name != "no reducer"]
    weighed = "\n" + markdown(("mlp: peak memory beyond no reducer", ""), beyond) if beyond else ""
    return markdown(headers, rows) + weighed + _source(results)


def kernels_table(results: Results) -> str:
    """Milliseconds of each kernel for a bucket, its bandwidth, and what its rivals take in units of it."""
    rows = []
    timings = sorted(results["measurements"]["timings"], key=itemgetter("kernel"))
    for (kernel, model, size), group in itertools.groupby(timings, key=itemgetter("kernel", "model", "bucket_mib")):
        ours, *rivals = sorted(group, key=lambda row: row["contender"] != OURS)
        others = ", ".join(f"{row['contender']}: {row['vs_gradwire']:.2f}" for row in rivals)
        bucket = f"{model}, {size} MiB"
        rows.append((kernel, bucket, _ms(ours["ms"]), f"{ours['gb_per_s']:.3g}", f"{ours['of_copy']:.2f}", others))
    headers = ("kernel", "bucket", "ms", "GB/s", "of a copy", "others, in units of gradwire's time")
    return markdown(headers, rows) + _source(results)


def converge_table(results: Results) -> str:
    """Steps, seconds and bytes of each contender until the target."""
    measured = results["measurements"]
    rows = [
        (
            row["hook"],
            row["provider"],
            row["reached"],
            f"{row['steps']:g}" if row["steps"] is not None else "",
            _seconds(row),
            f"{row['step_ms']:.0f}" if row["step_ms"] is not None else "",
            format_bytes(row["sent_bytes"]) if row["sent_bytes"] is not None else "",
            _ratio(row["times_faster"]),
        )
        for row in summarize(measured["races"])
    ]
    headers = (
        f"hook, at {format_rate(measured['rate'])}",
        "DDP and hook",
        "reached",
        "steps",
        "seconds",
        "ms per step",
        "sent",
        "faster",
    )
    return markdown(headers, rows) + f"\nUntil {target_of(measured)}." + _source(results)


def _seconds(row: dict[str, Any]) -> str:
    """The median, and how far the seeds are apart."""
    if row["seconds"] is None:
        return ""
    low, high = row["range"]
    digits = 0 if row["seconds"] >= 10 else 2
    return f"{row['seconds']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def converge_summary(results: Results) -> str:
    """A column for each hook: PyTorch's and gradwire's seconds, steps and bytes until the target."""
    measured = results["measurements"]
    of = {(row["hook"], row["provider"]): row for row in summarize(measured["races"])}
    hooks = list(dict.fromkeys(hook for hook, _ in of))

    def line(name: str, text: Callable[[Any], str], key: str) -> tuple[str, ...]:
        cells = ([of[hook, side][key] for side in (PYTORCH, GRADWIRE)] for hook in hooks)
        return name, *(" / ".join(text(value) if value is not None else "missed" for value in pair) for pair in cells)

    rows = [
        line("seconds, median of the seeds", lambda seconds: f"{seconds:.0f}", "seconds"),
        line("their range", lambda ends: "-".join(f"{end:.0f}" for end in ends), "range"),
        line("steps", lambda steps: f"{steps:g}", "steps"),
        line("ms per step after the first looks", lambda ms: f"{ms:.0f}", "step_ms"),
        line("sent", format_bytes, "sent_bytes"),
    ]
    headers = (
        f"PyTorch's / gradwire's, at {format_rate(measured['rate'])}",
        *(_HOOK_NAMES.get(hook, hook) for hook in hooks),
    )
    return markdown(headers, rows) + f"\nUntil {target_of(measured)}." + _source(results)


def demo_table(results: Results) -> str:
    """Loss, accuracy and bytes of each hook of the demo."""
    runs = results["runs"]
    whole = next(run["bytes_per_step"] for run in runs if run["hook"] == "none")
    rows = (
        (
            _HOOK_NAMES.get(run["hook"], run["hook"]),
            f"{run['final_loss']:.4f}",
            f"{100 * run['test_accuracy']:.1f}",
            format_bytes(run["bytes_per_step"]),
            _ratio(run["bytes_per_step"] / whole),
        )
        for run in runs
    )
    headers = ("hook", "training loss", "test images that are right, %", "sent a step", "of no hook's")
    facts = results["provenance"] | {"command": results["settings"]["command"]}
    return markdown(headers, rows) + _source({"provenance": facts})


# By name: that of the file of results, up to the first hyphen.
TABLES: dict[str, Callable[[Results], str]] = {
    "demo": demo_table,
    "network": network_table,
    "network-summary": network_summary,
    "converge_digits": converge_table,
    "converge_text": converge_table,
    "converge_text-summary": converge_summary,
    "hooks": hooks_table,
    "reducer": reducer_table,
    "kernels": kernels_table,
}
