"""README's and docs' tables and plots of benches, made from the results that are kept and from nothing else.

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
from typing import TYPE_CHECKING, Any

from gradwire.bench.contenders import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.converge import summarize, target_of
from gradwire.bench.kernel_cost import OURS
from gradwire.bench.report import format_bytes, machine_line
from gradwire.bench.results import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGES = ("README.md", "docs/benchmarks.md")
PLOTS = "docs/plots"
_CURVES = ("#222222", "#0072b2", "#009e73", "#d55e00", "#a0307a", "#56b4e9", "#f0b400")
_THEIRS_COLOR, _OURS_COLOR, _FLOOR_COLOR = "#d55e00", "#0072b2", "#444444"

_HOOKS = {"none": "no hook", "noop": "noop: nothing sent"}

Results = dict[str, Any]  # what a bench wrote: its measurements and their provenance


class PageError(Exception):
    """A page asks for a table that there is not."""


def write_pages(root: Path) -> list[Path]:
    """Fill in the pages and draw the plots of a checkout; returns what has been written.

    Raises:
        PageError: a page names a table that there is not, or whose results are missing.
    """
    results = load_all(root / "bench" / "results")
    written = []
    for name in PAGES:
        path = root / name
        text = fill(path.read_text(), results)
        with replacing(path) as partial:
            partial.write_text(text)
        written.append(path)
    folder = root / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        if name in results:
            draw(results[name], folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


def load_all(folder: Path) -> dict[str, Results]:
    """The results of each bench, by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


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


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _ms(ms: dict[str, float]) -> str:
    return _number(ms["p50"])


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else ""


def _link(rate: str) -> str:
    return re.sub(r"(?<=\d)([mg])bit$", lambda unit: f" {unit[1].upper()}b/s", rate)


def network_table(results: Results) -> str:
    """Milliseconds a step by rate and hook: PyTorch's, gradwire's, and the latter's bytes."""
    rows = []
    for (rate, hook), group in itertools.groupby(results["measurements"]["measured"], key=itemgetter("rate", "hook")):
        steps = {step["provider"]: step for step in group if not step["one_bucket"] or hook != "noop"}
        ours, theirs = steps[GRADWIRE], steps[PYTORCH]
        sent = format_bytes(ours["link_bytes"]) if ours["link_bytes"] is not None else ""
        times = (_ms(theirs["step_ms"]), _ms(ours["step_ms"]), _ratio(ours["vs_pytorch"]), _ratio(ours["vs_noop"]))
        rows.append((_link(rate), _HOOKS.get(hook, hook), *times, sent))
    headers = ("link", "hook", "PyTorch, ms", "gradwire, ms", "ratio", "in units of noop", "sent")
    return markdown(headers, rows) + _source(results)


def network_summary(results: Results) -> str:
    """A row for each rate: PyTorch's and gradwire's milliseconds a step with each hook."""
    measured = results["measurements"]["measured"]
    of = {(step["rate"], step["hook"], step["provider"]): step["step_ms"] for step in reversed(measured)}
    rates, hooks = (list(dict.fromkeys(step[key] for step in measured)) for key in ("rate", "hook"))
    rows = (
        (_link(rate), *(f"{_ms(of[rate, hook, PYTORCH])} / {_ms(of[rate, hook, GRADWIRE])}" for hook in hooks))
        for rate in rates
    )
    headers = ("ms per step: PyTorch's / gradwire's", *(_HOOKS.get(hook, hook) for hook in hooks))
    return markdown(headers, rows) + _source(results)


def hooks_table(results: Results) -> str:
    """The own cost of each hook: PyTorch's, gradwire's on PyTorch's DDP, and gradwire's on its own; then what else."""
    costs, peaks = results["measurements"]["costs"], results["measurements"]["peak_memory"]
    rows, resources = [], []
    for (ranks, hook), group in itertools.groupby(costs, key=itemgetter("ranks", "hook")):
        ours, mixed, theirs = _sides(group)
        own = (f"{cost['own_ms']:.1f}" for cost in (theirs, mixed, ours))
        rows.append((hook, str(ranks), *own, _ratio(ours["own_vs_pytorch"]), _ratio(ours["step_vs_pytorch"])))
        if ranks == costs[0]["ranks"]:
            beyond = (max(peaks[hook][side] - peaks["noop"][GRADWIRE], 0) for side in (PYTORCH, GRADWIRE))
            counted = [f"{cost['host_ms']:.1f}" for cost in (theirs, ours)]
            if ours["launches"] is not None:
                counted += [f"{cost['launches']} / {cost['synchronizations']}" for cost in (theirs, ours)]
            resources.append((hook, *counted, *map(format_bytes, beyond)))
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
            f"{row['seconds']:.2f}" if row["seconds"] is not None else "",
            format_bytes(row["sent_bytes"]) if row["sent_bytes"] is not None else "",
            _ratio(row["times_faster"]),
        )
        for row in summarize(measured["races"])
    ]
    headers = (f"hook, at {_link(measured['rate'])}", "DDP and hook", "reached", "steps", "seconds", "sent", "faster")
    return markdown(headers, rows) + f"\nUntil {target_of(measured)}." + _source(results)


def converge_summary(results: Results) -> str:
    """A column for each hook: PyTorch's and gradwire's seconds, steps and bytes until the target."""
    measured = results["measurements"]
    of = {(row["hook"], row["provider"]): row for row in summarize(measured["races"])}
    hooks = list(dict.fromkeys(hook for hook, _ in of))

    def line(name: str, text: Callable[[Any], str], key: str) -> tuple[str, ...]:
        cells = ([of[hook, side][key] for side in (PYTORCH, GRADWIRE)] for hook in hooks)
        return name, *(" / ".join(text(value) if value is not None else "missed" for value in pair) for pair in cells)

    rows = [
        line("seconds", lambda seconds: f"{seconds:.0f}", "seconds"),
        line("steps", lambda steps: f"{steps:g}", "steps"),
        line("sent", format_bytes, "sent_bytes"),
    ]
    headers = (f"PyTorch's / gradwire's, at {_link(measured['rate'])}", *(_HOOKS.get(hook, hook) for hook in hooks))
    return markdown(headers, rows) + f"\nUntil {target_of(measured)}." + _source(results)


# By name: that of the file of results, up to the first hyphen.
TABLES: dict[str, Callable[[Results], str]] = {
    "network": network_table,
    "network-summary": network_summary,
    "converge_digits": converge_table,
    "converge_text": converge_table,
    "converge_text-summary": converge_summary,
    "hooks": hooks_table,
    "reducer": reducer_table,
    "kernels": kernels_table,
}


def _pairs(axes: Axes, labels: Sequence[str], theirs: Sequence[float], ours: Sequence[float]) -> None:
    """PyTorch's and gradwire's bars side by side, each with its number at its end."""
    places = range(len(labels))
    for values, shift, color, name in ((theirs, -0.2, _THEIRS_COLOR, "PyTorch"), (ours, 0.2, _OURS_COLOR, "gradwire")):
        bars = axes.barh([place + shift for place in places], values, 0.38, color=color, label=name)
        axes.bar_label(bars, [_number(value) for value in values], padding=2, fontsize=8)
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(axis="x", alpha=0.3)


def _legend_below(figure: Any, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def draw_network(results: Results, path: Path) -> None:
    """Milliseconds a step for each hook, one panel for each rate."""
    from matplotlib.figure import Figure

    measured = results["measurements"]["measured"]
    rates = list(dict.fromkeys(step["rate"] for step in measured))
    figure = Figure(figsize=(4 * len(rates), 4.5), dpi=150, layout="constrained")
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        steps = [step for step in measured if step["rate"] == rate]
        of = {(step["hook"], step["provider"]): step["step_ms"]["p50"] for step in reversed(steps)}
        hooks = list(dict.fromkeys(step["hook"] for step in steps))
        _pairs(axes, hooks, [of[hook, PYTORCH] for hook in hooks], [of[hook, GRADWIRE] for hook in hooks])
        axes.set_xlabel("ms per step")
        axes.set_title(f"link: {rate}", fontsize=11)
    _legend_below(figure, axes)
    _save(figure, f"Steps between {results['measurements']['hosts']} hosts: {results['measurements']['model']}", path)


def draw_converge(results: Results, path: Path) -> None:
    """The score against seconds and against megabytes, a curve for each training."""
    from matplotlib.figure import Figure

    measured = results["measurements"]
    races = measured["races"]
    hooks = list(dict.fromkeys(race["hook"] for race in races))
    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, of, unit in ((panels[0], "seconds", 1.0), (panels[1], "sent_bytes", 1e-6)):
        seen = set()
        for race in (race for race in races if race[of]):
            name = f"{race['hook']}, {race['provider']}"
            axes.plot(
                [unit * value for value in race[of]],
                race["scores"],
                color=_CURVES[hooks.index(race["hook"]) % len(_CURVES)],
                linestyle="-" if race["provider"] == GRADWIRE else ":",
                linewidth=1.5,
                label=None if name in seen else name,
            )
            seen.add(name)
        axes.axhline(measured["target"], color=_FLOOR_COLOR, linestyle="--", linewidth=1)
        axes.set_xlim(left=0)
        if measured["rises"]:
            axes.set_ylim(85, 100)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(measured["score"])
    panels[0].set_xlabel("seconds of training")
    panels[1].set_xlabel("sent by rank 0 (MB)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    title = f"{measured['task']}, {measured['hosts']} hosts at {measured['rate']}; dashed: the target"
    _save(figure, title, path)


def draw_hooks(results: Results, path: Path) -> None:
    """Own cost of each hook, a panel for each number of ranks."""
    from matplotlib.figure import Figure

    costs = results["measurements"]["costs"]
    counts = list(dict.fromkeys(cost["ranks"] for cost in costs))
    figure = Figure(figsize=(6.5 * len(counts), 5), dpi=150, layout="constrained")
    for axes, ranks in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        of_ranks = [cost for cost in costs if cost["ranks"] == ranks]
        of = {(cost["hook"], cost["provider"]): max(cost["own_ms"], 0.0) for cost in of_ranks}
        hooks = [hook for hook in dict.fromkeys(cost["hook"] for cost in of_ranks) if hook != "noop"]
        _pairs(axes, hooks, [of[hook, PYTORCH] for hook in hooks], [of[hook, GRADWIRE] for hook in hooks])
        axes.set_xlabel("ms per step beyond noop_hook")
        axes.set_title(f"ranks: {ranks}", fontsize=11)
    _legend_below(figure, axes)
    _save(figure, f"Own cost of hooks: {results['measurements']['model']}", path)


def draw_kernels(results: Results, path: Path) -> None:
    """Bandwidth of each contender, one panel for each kernel; a line at that of a copy."""
    from matplotlib.figure import Figure

    timings = results["measurements"]["timings"]
    kernels = list(dict.fromkeys(row["kernel"] for row in timings))
    models = list(dict.fromkeys((row["model"], row["bucket_mib"]) for row in timings))
    figure = Figure(figsize=(10, 2.6 * len(kernels)), dpi=150, layout="constrained")
    copied = results["measurements"]["copy_gb_per_s"]
    for axes, kernel in zip(figure.subplots(len(kernels), 1, squeeze=False)[:, 0], kernels, strict=True):
        rows = [row for row in timings if row["kernel"] == kernel]
        contenders = list(dict.fromkeys(row["contender"] for row in rows))
        width = 0.8 / len(contenders)
        for k, contender in enumerate(contenders):
            # Labels begin with a space, because one that begins with an underscore is left out of the legend.
            color = _OURS_COLOR if contender == OURS else str(0.35 + 0.15 * k)
            of = {(row["model"], row["bucket_mib"]): row["gb_per_s"] for row in rows if row["contender"] == contender}
            places = [place + (k - (len(contenders) - 1) / 2) * width for place in range(len(models))]
            axes.bar(places, [of[model] for model in models], width, color=color, label=f" {contender}")
        if max(row["gb_per_s"] for row in rows) > 0.3 * copied:
            axes.axhline(copied, color=_FLOOR_COLOR, linestyle="--", linewidth=1, label="a copy of as many bytes")
        axes.set_xticks(range(len(models)), [f"{model}\n{size} MiB" for model, size in models], fontsize=8)
        axes.set_ylabel("GB/s")
        axes.set_title(kernel, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    _save(figure, "Kernels: bytes that gradwire's moves, per second of each one's time", path)


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


DRAWINGS: dict[str, Callable[[Results, Path], None]] = {
    "network": draw_network,
    "converge_digits": draw_converge,
    "converge_text": draw_converge,
    "hooks": draw_hooks,
    "kernels": draw_kernels,
}
