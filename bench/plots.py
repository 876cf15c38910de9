"""The plots of README and docs, each drawn from the records of a bench as PNG, whole or not at all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from gradwire.bench import converge, demo, kernels, network
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.kernel_cases import COMPILED, EAGER
from gradwire.bench.record import Metric, Record, format_bytes, replacing, unique
from gradwire.bench.tables import count, find, format_bandwidth, format_link, format_number, groups_of, median_of
from gradwire.planner.hook_registry import CAST, PLAIN, STAR_NOTE, display_name, label
from gradwire.planner.measurement import Measurement
from gradwire.planner.recommend import Advice
from gradwire.planner.step_model import step_seconds

Records = Sequence[Record]

# Okabe and Ito's colors, which color-blind readers can tell apart, and others in place of their yellow.
_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PURPLE, _BLACK, _BROWN, _GRAY, _WINE, _OLIVE, _INDIGO = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#cc79a7",
    "#222222",
    "#8c564b",
    "#7f7f7f",
    "#882255",
    "#888800",
    "#332288",
)
_SIDES = {PYTORCH: (_RED, "s"), GRADWIRE: (_BLUE, "o")}
_HOOK_COLORS = (_BLACK, _GRAY, _BLUE, _GREEN, _SKY, _RED, _ORANGE, _PURPLE, _WINE, _BROWN, _OLIVE, _INDIGO)
_HOOK_LINES = ("-", "--", ":")  # of hooks with the same color
# Color and marker of each implementation in `draw_kernels`.
_KERNEL_STYLES = {
    GRADWIRE: (_BLUE, "o"),
    "DDP and hook of PyTorch": (_RED, "s"),
    "PyTorch's hook": (_RED, "s"),
    "cat, to, div": (_GREEN, "^"),
    "norm, div": (_GREEN, "^"),
    EAGER: (_GREEN, "^"),
    COMPILED: (_PURPLE, "D"),
    "foreach copy": (_BLACK, "x"),
    "linalg.qr": (_ORANGE, "v"),
}
_LABEL_SIZE = 9  # points, of the labels of curves
MOST_CURVES = 7  # of the plot of `gradwire advise`
_LOWEST_SCORE = 80  # accuracy (%) at the bottom of plots of accuracy
_SMALL_KERNELS = ("orthogonalize", "column norms")  # kernels on kB-sized factors


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=12)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)


def _logarithmic(axes: Axes, name: str = "x", multiples: Sequence[float] = (1, 2, 5)) -> None:
    """Make an axis logarithmic, with plain numbers at the multiples of powers of ten."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=multiples))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def hook_styles(hooks: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Color and line style of every hook of a plot, no two the same; colors are repeated after the last one only."""
    styles = [(color, line) for line in _HOOK_LINES for color in _HOOK_COLORS]
    return dict(zip(hooks, styles[: len(hooks)], strict=True))


def _label_ends(figure: Figure, axes: Axes, above: bool) -> None:
    """Write the label of every line next to its last point, in rows below (or above) all curves; make room for them.

    A vertical line joins each label to its point. Points further right get rows nearer to the curves, so that no such
    line crosses a label.
    """
    ends = {line: tuple(np.asarray(line.get_xydata())[-1]) for line in axes.lines}
    lines = sorted(ends, key=lambda line: -ends[line][0])
    figure.draw_without_rendering()  # lays out the axes, whose size the rows and the limits depend on
    row = 1.25 * _LABEL_SIZE / 72 * figure.dpi / axes.bbox.height  # in fractions of the axes, as all below
    share = (len(lines) + 0.7) * row
    to_fractions = axes.transScale + axes.transLimits
    (low, high), ticks = axes.get_ylim(), axes.get_yticks()
    right = 1.0
    for index, line in enumerate(lines):
        x, y = ends[line]
        depth = share - (index + 0.7) * row
        label = axes.annotate(
            f" {line.get_label()}",
            (x, y),
            (x, 1 - depth if above else depth),
            textcoords=("data", "axes fraction"),
            va="center",
            fontsize=_LABEL_SIZE,
            color=line.get_color(),
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 0,
            },
        )
        width = label.get_window_extent().width / axes.bbox.width
        right = max(right, to_fractions.transform((x, y))[0] / (1 - 1.1 * width))
    bottom, top = (0.0, 1 / (1 - share)) if above else (-share / (1 - share), 1.0)
    corners = to_fractions.inverted().transform([(0, bottom), (right, top)])
    axes.set(xlim=corners[:, 0], ylim=corners[:, 1], yticks=[tick for tick in ticks if low <= tick <= high])


def _panels_of_bars(panels: dict[str, list[Record]], metric: str, unit: str, width: float, height: float) -> Figure:
    """A panel for each title, with PyTorch's bar above gradwire's for each hook."""
    figure = _figure(width, height)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False).flat
    for axes, (title, records) in zip(grid, panels.items(), strict=True):
        hooks = unique(record["hook"] for record in records)
        for shift, (name, (color, _)) in zip((-0.2, 0.2), _SIDES.items(), strict=True):
            of = [[record for record in records if record["hook"] == hook] for hook in hooks]
            values = [max(median_of(group, metric, name) or 0, 0) for group in of]
            bars = axes.barh([i + shift for i in range(len(hooks))], values, 0.38, color=color, label=name)
            axes.bar_label(bars, [format_number(value) for value in values], padding=2, fontsize=8)
        _name_rows(axes, [label(hook) for hook in hooks])
        axes.margins(x=0.2)
        axes.set_xlabel(unit)
        axes.set_title(title, fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_network(records: Records, path: Path) -> None:
    """Step time with each hook, one panel for each link rate."""
    settings = records[0].provenance["settings"]
    steps = [
        r for r in records if r.metric == Metric.STEP_MS and not (r["hook"] == network.REFERENCE and r["one_bucket"])
    ]
    panels = {f"link: {format_link(rate, settings)}": group for (rate,), group in groups_of(steps, "rate")}
    height = 1.2 + 0.34 * len(unique(r["hook"] for r in steps))  # the numbers of two bars must not touch
    figure = _panels_of_bars(panels, Metric.STEP_MS, Metric.STEP_MS, 12, height)
    _save(figure, f"Step time between {count(settings['hosts'], 'host')}: {settings['model']}\n{STAR_NOTE}", path)


def draw_hooks(records: Records, path: Path) -> None:
    """Own cost of each hook, a panel for each world size."""
    costs = [record for record in records if record.metric == Metric.OWN_MS and record["hook"] != "noop"]
    panels = {count(ranks, "rank"): group for (ranks,), group in groups_of(costs, "ranks")}
    figure = _panels_of_bars(panels, Metric.OWN_MS, "ms per step beyond noop_hook", 11, 5)
    model = records[0].provenance["settings"]["model"]
    _save(figure, f"Own cost of hooks: {model}\n{STAR_NOTE}", path)


def draw_converge(records: Records, path: Path) -> None:
    """Time to target of every hook as dots, median and range; next to it the curves of gradwire's median trainings.

    If the results have several optimizers, only the first one is drawn.
    """
    settings, optimizer = records[0].provenance["settings"], records[0].case.get("optimizer")
    records = [record for record in records if record.case.get("optimizer") == optimizer]
    hooks = unique(record["hook"] for record in records)
    styles = hook_styles(hooks)
    figure = _figure(10.5, 5.4)
    dots, curves = figure.subplots(1, 2, width_ratios=(1, 1.3))
    for (hook, by), group in groups_of(records, "hook", "implementation"):
        seconds = converge.to_target(group, Metric.TARGET_S)
        if seconds is None:
            continue
        (color, _), marker, fill = styles[hook], _SIDES[by][1], "white" if by == PYTORCH else None
        y = hooks.index(hook) + (0.2 if by == GRADWIRE else -0.2)
        dots.plot([min(seconds), max(seconds)], [y, y], color=color, linewidth=2, alpha=0.5)
        dots.plot([median(seconds)], [y], marker, color=color, markerfacecolor=fill, markersize=6)
        dots.annotate(
            format_number(median(seconds)), (max(seconds), y), (6, -3), textcoords="offset points", fontsize=8
        )
    _name_rows(dots, [display_name(hook) for hook in hooks])
    for name, (color, _) in zip(dots.get_yticklabels(), styles.values(), strict=True):
        name.set_color(color)
    dots.margins(x=0.15)
    dots.set_xlim(left=0)
    seeds = count(len(unique(record["seed"] for record in records)), "seed")
    dots.set_xlabel(f"time to target (s): median and range, {seeds}")
    dots.set_title(f"until {converge.target_of(settings)}", fontsize=11)
    for hook, (color, line) in styles.items():
        seconds, scores = _median_training([r for r in records if r["hook"] == hook], settings["score"])
        label = display_name(hook)
        curves.plot(
            seconds, scores, color=color, linestyle=line, linewidth=1.5, label=label, marker="o", markevery=[-1]
        )
    _logarithmic(curves)
    if settings["rises"]:
        curves.set_ylim(bottom=_LOWEST_SCORE)
        points = [point for line in curves.lines for point in np.asarray(line.get_xydata())]
        curves.set_xlim(left=0.8 * min((x for x, y in points if y >= _LOWEST_SCORE), default=points[0][0]))
    _label_ends(figure, curves, above=settings["rises"])
    curves.axhline(settings["target"], color="#444444", linestyle="--", linewidth=1)
    curves.annotate("target", (0, settings["target"]), (4, 3), ("axes fraction", "data"), "offset points", fontsize=9)
    curves.set_xlabel("training time (s, logarithmic)")
    curves.set_ylabel(settings["score"])
    curves.set_title("gradwire, seed of median time", fontsize=11)
    curves.grid(alpha=0.3)
    sides = [
        Line2D([], [], color="#888888", marker=marker, markerfacecolor="white" if name == PYTORCH else None, label=name)
        for name, (_, marker) in _SIDES.items()
    ]
    figure.legend(handles=sides, loc="outside lower left", ncols=2, frameon=False)
    link = f"{count(settings['hosts'], 'host')} at {format_link(settings['rate'], settings)}"
    _save(figure, f"Time to target: {settings['task']}, {link}", path)


def _median_training(records: Records, score: str) -> tuple[list[float], list[float]]:
    """Seconds and scores of gradwire's training of median time; one that missed the target counts as longest."""
    ours = [record for record in records if record.implementation == GRADWIRE]
    times = sorted((r for r in ours if r.metric == Metric.TARGET_S), key=lambda r: (r.p50 is None, r.series[-1]))
    chosen = times[(len(times) - 1) // 2]
    scores = find((r for r in ours if r["seed"] == chosen["seed"]), score)
    assert scores is not None
    return chosen.series, scores.series


def draw_kernels(records: Records, path: Path) -> None:
    """Effective bandwidth of kernels that stream gradients; microseconds of those of kB-sized factors."""
    copied = median_of(records, Metric.BANDWIDTH, kernels.COPY)
    panels = groups_of((record for record in records if record.implementation != kernels.COPY), "kernel")
    panels.sort(key=lambda panel: panel[0][0].startswith(_SMALL_KERNELS))
    figure = _figure(12, 4.1 * -(-len(panels) // 2))
    grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for axes, ((kernel,), group) in zip(grid, panels, strict=False):
        is_small = kernel.startswith(_SMALL_KERNELS)
        buckets = unique((record["model"], record["bucket_mib"]) for record in group)
        for name in unique(record.implementation for record in group):
            of = [[r for r in group if (r["model"], r["bucket_mib"]) == bucket] for bucket in buckets]
            metric, scale = (Metric.TIME_MS, 1e3) if is_small else (Metric.BANDWIDTH, 1.0)
            values = [scale * (median_of(rows, metric, name) or 0) for rows in of]
            color, marker = _KERNEL_STYLES.get(name, (_SKY, "P"))
            size, order = (8, 3) if name == GRADWIRE else (6, 2)
            axes.plot(values, range(len(buckets)), marker, color=color, markersize=size, label=f" {name}", zorder=order)
        if not is_small and copied:
            axes.axvline(copied, color="#444444", linestyle="--", linewidth=1, label="copy_")
        _name_rows(axes, [f"{model}, {size} MiB" for model, size in buckets])
        axes.grid(axis="y", alpha=0.15)
        if is_small:
            _logarithmic(axes)
            axes.set_xlabel("time (us, logarithmic); left is better")
        else:
            axes.set_xlim(left=0)
            axes.set_xlabel("effective bandwidth (GB/s); right is better")
        axes.set_title(f"{kernel}: {'time' if is_small else 'effective bandwidth'}", fontsize=11)
        axes.legend(fontsize=8, frameon=True, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    facts = records[0].provenance
    machine = facts["gpu"] or f"{facts['cpu']}, {count(facts['threads_per_process'], 'thread')}"
    _save(figure, f"Effective bandwidth of kernels; time of operations on kB-sized factors ({machine})", path)


def draw_demo(records: Records, path: Path) -> None:
    """Training loss against megabytes sent per rank, one curve for each hook."""
    groups = [group for _, group in groups_of(records, "hook")]
    curves = [(find(group, Metric.SENT_PER_STEP), find(group, Metric.TRAINING_LOSS)) for group in groups]
    steps = len(groups[0][0].series)
    window = max(1, steps // 20)
    figure = _figure(8, 5)
    axes = figure.subplots()
    styles = hook_styles([group[0]["hook"] for group in groups]).values()
    for group, (sent, loss), (color, line) in zip(groups, curves, styles, strict=True):
        assert sent is not None and loss is not None
        megabytes = [nbytes / 1e6 for nbytes in sent.series[window - 1 :]]
        payload = f"{format_bytes(median_of(group, Metric.SENT_PER_STEP) or 0)} per step"
        text = f"{display_name(group[0]['hook'])}: {payload}, test accuracy {median_of(group, Metric.ACCURACY):.1f} %"
        axes.plot(megabytes, running_mean(loss.series, window), label=text, color=color, linestyle=line)
    axes.set_yscale("log")
    totals = [sent.series[-1] for sent, _ in curves if sent is not None]
    if max(totals) > 8 * min(totals) > 0:
        _logarithmic(axes)
    axes.set_xlabel("sent per rank (MB)")
    axes.set_ylabel(f"training loss (mean of {window} steps)" if window > 1 else "training loss")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _save(figure, demo.title(records), path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each ``window`` consecutive values."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(high - low) / window for low, high in zip(sums, sums[window:], strict=False)]


def draw_advice(measured: Measurement, advice: Advice, path: Path) -> None:
    """Plot predicted step times against the bandwidth: no hook, bf16, the recommended hook, and the fastest others.

    `MOST_CURVES` at most; the fastest have the smallest mean of logarithms, as the plot shows them. allreduce, which
    sends the same bytes as no hook, is not one of them.
    """
    figure = _figure(9, 5.5)
    axes = figure.subplots()
    here = measured.link.bandwidth
    bandwidths = [here * 30 ** (i / 30) for i in range(-30, 31)]
    times = {
        hook.name: [1e3 * step_seconds(measured.model, hook, measured.link.at(bandwidth)) for bandwidth in bandwidths]
        for hook in measured.hooks
    }
    fastest = sorted((name for name in times if name != "allreduce"), key=lambda name: sum(map(math.log, times[name])))
    names = unique((PLAIN, CAST, advice.recommended, *fastest))[:MOST_CURVES]
    for name, (color, line) in hook_styles(names).items():
        is_recommended = name == advice.recommended
        label = display_name(name) + " (recommended)" * is_recommended
        width, order = (2.6, 3) if is_recommended else (1.3, 2)
        axes.plot(bandwidths, times[name], color=color, linestyle=line, linewidth=width, label=label, zorder=order)
    word, digits = ("measured", 2) if measured.is_link_measured else ("given", 6)
    here_label = f"{word}: {format_bandwidth(here, digits)}"
    axes.axvline(here, color="#888888", linestyle="--", linewidth=1, label=here_label)
    _logarithmic(axes, "x", (1,))
    axes.xaxis.set_major_formatter(lambda bandwidth, _: format_bandwidth(bandwidth))
    shown = [milliseconds for name in names for milliseconds in times[name]]
    ratio = max(shown) / min(shown)  # the smaller, the more numbers per decade, so that there are three at least
    _logarithmic(axes, "y", (1, 2, 5) if ratio > 20 else (1, 1.5, 2, 3, 5, 7))
    if ratio < 5:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("bandwidth")
    axes.set_ylabel("predicted step time (ms)")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right center", fontsize=9, frameon=False)
    size = format_bytes(measured.model.gradient_bytes)
    _save(figure, f"{advice.headline}: {measured.link.world_size} ranks, {size} of gradients", path)


DRAWINGS: dict[str, Callable[[Records, Path], None]] = {
    "demo": draw_demo,
    "network": draw_network,
    "converge": draw_converge,
    "hooks": draw_hooks,
    "kernels": draw_kernels,
}
