"""Reports of `gradwire advise`: a table with code to paste, a plot, and JSON."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.bench.tables import Table, count, format_bytes, print_tables
from gradwire.planner.advice import Advice, Prediction
from gradwire.planner.hook_registry import HOOKS, display_name
from gradwire.planner.model import step_seconds
from gradwire.planner.probe import CAST, PLAIN, Measurement

_HEADERS = ("hook", "step (ms)", "vs. no hook", f"vs. {CAST}", "pays below", "sent per step", "extra memory")
_FAR = 30  # the plot's bandwidths, in units of the measured one: down to 1 / _FAR, up to _FAR
_POINTS = 61
_COLORS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00", "#8c564b")
_STYLES = ("-", "--", ":")


def print_advice(measured: Measurement, advice: Advice, seconds: float, console: Console | None = None) -> None:
    """Print the model, the network, the predictions, the recommendation, and the code to register the hook."""
    console = console or Console()
    model, link = measured.model, measured.link
    latency = max(cost.latency for cost in link.costs.values())
    buckets = count(len(model.ready), "bucket")
    lines = [
        f"Model:    {format_bytes(model.gradient_bytes)} of gradients in {buckets}; "
        f"forward {1e3 * model.forward:.3g} ms, backward {1e3 * model.backward:.3g} ms "
        f"with {count(measured.threads, 'CPU thread')}",
        f"Network:  {link.world_size} ranks on {count(link.nodes, 'node')}, "
        f"{format_bandwidth(link.bandwidth)} per {'node' if link.nodes > 1 else 'rank'} "
        f"{'measured' if measured.is_link_measured else 'given'}; the smallest collective takes {1e3 * latency:.2g} ms",
        f"Measured in {seconds:.0f} s.",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    ranked = sorted(advice.predictions, key=lambda each: each.step_seconds)
    styles = ["bold" if each.hook == advice.recommended else "" for each in ranked]
    console.print()
    print_tables([Table(title="", headers=_HEADERS, rows=[_cells(each) for each in ranked], styles=styles)], console)
    console.print(f"{advice.headline}: {advice.reason}.", style="bold", highlight=False, markup=False, soft_wrap=True)
    if code := HOOKS[advice.recommended].code:
        console.print(f"\n{code}", highlight=False, markup=False, soft_wrap=True)


def _cells(each: Prediction) -> list[str]:
    return [
        display_name(each.hook),
        f"{1e3 * each.step_seconds:.1f}",
        f"{each.speed_up:.2f}x",
        f"{each.speed_up_over_bf16:.2f}x",
        "" if each.hook == PLAIN else format_break_even(each.break_even),
        format_bytes(each.payload_bytes),
        format_bytes(each.memory_bytes),
    ]


def format_break_even(bandwidth: float | None) -> str:
    """Format a break-even bandwidth, in bits per second, "never" for None, "always" for infinity."""
    if bandwidth is None:
        return "never"
    return "always" if math.isinf(bandwidth) else format_bandwidth(bandwidth)


def format_bandwidth(bandwidth: float) -> str:
    """Format bits per second with three digits."""
    mbit = bandwidth / 1e6
    for unit in ("Mb/s", "Gb/s"):
        if mbit < 999.5:
            return f"{mbit:.3g} {unit}"
        mbit /= 1000
    return f"{mbit:.3g} Tb/s"


def to_json(measured: Measurement, advice: Advice) -> str:
    """Measurement, predictions and recommendation as JSON.

    The break-even bandwidth is null if a hook never pays off, and "always" if it pays off at every bandwidth.
    """
    predictions = [
        asdict(each) | {"break_even": "always" if each.break_even == math.inf else each.break_even}
        for each in advice.predictions
    ]
    content: dict[str, Any] = {
        "recommended": advice.recommended,
        "reason": advice.reason,
        "code": HOOKS[advice.recommended].code,
        "predictions": predictions,
        "measurement": _plain(asdict(measured)),
    }
    return json.dumps(content, indent=1)


def _plain(value: Any) -> Any:
    """Named tuples as objects with their names, members of an enumeration by their names."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def draw(measured: Measurement, advice: Advice, path: Path) -> None:
    """Plot the predicted step time of each hook against the bandwidth; mark the measured or given bandwidth."""
    from matplotlib.figure import Figure  # takes a second to import, and only plots need it
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    here = measured.link.bandwidth
    bandwidths = [here * _FAR ** (2 * i / (_POINTS - 1) - 1) for i in range(_POINTS)]
    styles = itertools.product(_STYLES, _COLORS)
    for hook in measured.hooks:
        style, color = ("-", "#222222") if hook.name == PLAIN else next(styles)
        width = 2.6 if hook.name in (PLAIN, advice.recommended) else 1.3
        times = [1e3 * step_seconds(measured.model, hook, measured.link.at(bandwidth)) for bandwidth in bandwidths]
        label = display_name(hook.name)
        axes.plot([b / 1e6 for b in bandwidths], times, style, color=color, linewidth=width, label=label)
    for each in advice.predictions:
        axes.plot([here / 1e6], [1e3 * each.step_seconds], "o", color="#222222", markersize=3)
    word = "measured" if measured.is_link_measured else "given"
    axes.axvline(here / 1e6, color="#888888", linestyle="--", linewidth=1)
    axes.annotate(
        f"{word}: {format_bandwidth(here)}",
        (here / 1e6, 0.99),
        (4, -10),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, multiples in ((axes.xaxis, (1,)), (axes.yaxis, (1, 2, 5))):
        axis.set_major_locator(LogLocator(subs=multiples))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bandwidth (Mb/s)")
    axes.set_ylabel("predicted step time (ms)")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    size = format_bytes(measured.model.gradient_bytes)
    figure.suptitle(f"{advice.headline}: {measured.link.world_size} ranks, {size} of gradients", fontsize=12)
    figure.savefig(path, format="png", metadata={"Software": None})
