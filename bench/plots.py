"""The plots of README and docs, each drawn from the results of a bench as PNG, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire.bench.contenders import GRADWIRE, PYTORCH
from gradwire.bench.hooks import star
from gradwire.bench.kernel_cases import OURS
from gradwire.bench.report import format_number, format_rate, make_logarithmic, save_plot
from gradwire.bench.results import Results as DemoResults
from gradwire.bench.results import replacing

_CURVES = ("#222222", "#0072b2", "#009e73", "#d55e00", "#a0307a", "#56b4e9", "#f0b400")
_THEIRS_COLOR, _OURS_COLOR, _FLOOR_COLOR = "#d55e00", "#0072b2", "#444444"

Results = dict[str, Any]  # what a bench wrote: its measurements and their provenance
Size = tuple[float, float]  # of a panel, in inches


def _pairs(axes: Axes, labels: Sequence[str], theirs: Sequence[float], ours: Sequence[float]) -> None:
    """PyTorch's and gradwire's bars side by side, each with its number at its end."""
    places = range(len(labels))
    for values, shift, color, name in ((theirs, -0.2, _THEIRS_COLOR, "PyTorch"), (ours, 0.2, _OURS_COLOR, "gradwire")):
        bars = axes.barh([place + shift for place in places], values, 0.38, color=color, label=name)
        axes.bar_label(bars, [format_number(value) for value in values], padding=2, fontsize=8)
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(axis="x", alpha=0.3)


def _panels_of_pairs(
    panels: dict[str, list[dict[str, Any]]], value: Callable[[dict[str, Any]], float], unit: str, size: Size
) -> Figure:
    """A panel for each title, with the pair of bars of each hook in its rows; of several, the first counts."""
    figure = Figure(figsize=(size[0] * len(panels), size[1]), dpi=150, layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        of = {(row["hook"], row["provider"]): value(row) for row in reversed(rows)}
        hooks = list(dict.fromkeys(row["hook"] for row in rows))
        labels = [f"{hook}{star(hook)}" for hook in hooks]
        _pairs(axes, labels, [of[hook, PYTORCH] for hook in hooks], [of[hook, GRADWIRE] for hook in hooks])
        axes.set_xlabel(unit)
        axes.set_title(title, fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_network(results: Results, path: Path) -> None:
    """Milliseconds a step for each hook, one panel for each rate."""
    steps = results["measurements"]["measured"]
    rates = dict.fromkeys(step["rate"] for step in steps)
    panels = {f"link: {format_rate(rate)}": [step for step in steps if step["rate"] == rate] for rate in rates}
    figure = _panels_of_pairs(panels, lambda step: float(step["step_ms"]["p50"]), "ms per step", (4, 4.5))
    _save(figure, f"Steps between {results['measurements']['hosts']} hosts: {results['measurements']['model']}", path)


def draw_converge(results: Results, path: Path) -> None:
    """The score against seconds and against megabytes, a curve for each training; bold if its time is the median."""
    measured = results["measurements"]
    races = measured["races"]
    hooks = list(dict.fromkeys(race["hook"] for race in races))
    bold = _of_median_time(races)
    faint = [race for race in races if race not in bold]
    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, of, unit in ((panels[0], "seconds", 1.0), (panels[1], "sent_bytes", 1e-6)):
        for race in (race for race in faint + bold if race[of]):
            is_bold = race in bold
            axes.plot(
                [unit * value for value in race[of]],
                race["scores"],
                color=_CURVES[hooks.index(race["hook"]) % len(_CURVES)],
                linestyle="-" if race["provider"] == GRADWIRE else ":",
                linewidth=1.8 if is_bold else 0.8,
                alpha=1.0 if is_bold else 0.35,
                label=f"{race['hook']}, {race['provider']}" if is_bold else None,
            )
        axes.axhline(measured["target"], color=_FLOOR_COLOR, linestyle="--", linewidth=1)
        if measured["rises"]:
            axes.set_ylim(85, 100)
        axes.grid(alpha=0.3)
    panels[0].set_xlim(left=0)
    panels[0].set_ylabel(measured["score"])
    panels[0].set_xlabel("seconds of training")
    make_logarithmic(panels[1])
    panels[1].set_xlabel("sent by rank 0 (MB, logarithmic)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    title = f"{measured['task']}, {measured['hosts']} hosts at {format_rate(measured['rate'])}; dashed: the target"
    _save(figure, f"{title}; bold: the seed of median time", path)


def _of_median_time(races: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each contender the training that takes the median of the seconds; one without the target takes longest."""
    contenders: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for race in races:
        contenders.setdefault((race["hook"], race["provider"]), []).append(race)
    return [
        sorted(group, key=lambda race: (race["reached"] is None, race["seconds"][-1]))[(len(group) - 1) // 2]
        for group in contenders.values()
    ]


def draw_hooks(results: Results, path: Path) -> None:
    """Own cost of each hook, a panel for each number of ranks."""
    costs = [cost for cost in results["measurements"]["costs"] if cost["hook"] != "noop"]
    counts = dict.fromkeys(cost["ranks"] for cost in costs)
    panels = {f"ranks: {ranks}": [cost for cost in costs if cost["ranks"] == ranks] for ranks in counts}
    figure = _panels_of_pairs(panels, lambda cost: max(cost["own_ms"], 0.0), "ms per step beyond noop_hook", (6.5, 5))
    note = "\n* PyTorch's nearest: it has none of the kind, or one that fails"
    _save(figure, f"Own cost of hooks: {results['measurements']['model']}{note}", path)


def draw_kernels(results: Results, path: Path) -> None:
    """Bandwidth of each contender, one panel for each kernel; a line at that of a copy."""
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
            color = _OURS_COLOR if contender == OURS else str(0.35 + 0.11 * k)
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


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


def draw_demo(results: Results, path: Path) -> None:
    """As the demo draws it."""
    save_plot(DemoResults.of(results), path)


DRAWINGS: dict[str, Callable[[Results, Path], None]] = {
    "demo": draw_demo,
    "network": draw_network,
    "converge_digits": draw_converge,
    "converge_text": draw_converge,
    "hooks": draw_hooks,
    "kernels": draw_kernels,
}
