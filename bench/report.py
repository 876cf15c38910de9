"""Table and plot of a demo, made from its results and from nothing else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from gradwire.bench.hooks import HOOKS
from gradwire.bench.results import Results, Run, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "none"
_COLORS = ("#0072b2", "#f0b400", "#009e73", "#a0307a", "#d55e00", "#56b4e9", "#000000")
_WIDTHS = (2.0, 6.0, 3.2, 1.2, 2.0, 2.0)  # curves that lie on each other, as those of casts do: the wide ones first


def bench_table(title: str, caption: str | None, headers: Sequence[str]) -> Table:
    """A table without rows: title above, what the numbers mean below; a column of names, then columns of numbers."""
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        min_width=79,  # title and caption are as wide as the table
        pad_edge=False,
    )
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i > 0 else "left", no_wrap=True)
    return table


def add_hooks(table: Table, rows: Iterable[dict[str, Any]], cells: Callable[[dict[str, Any]], Sequence[str]]) -> None:
    """Add rows of measurements, a section for each hook, whose name is the first row of it."""
    for hook, of_hook in itertools.groupby(rows, key=itemgetter("hook")):
        table.add_row(hook, style="bold")
        for row in of_hook:
            table.add_row(*cells(row))
        table.add_section()


def results_table(results: Results) -> Table:
    """One row for each hook, with what the numbers mean below."""
    numbers = ("training\nloss", "test\naccuracy", "sent per\nstep", "vs\nnone", "ms per\nstep *", "vs\nnone")
    table = bench_table(_title(results), _caption(results), ("hook", *numbers))
    baseline = next((run for run in results.runs if run.hook == BASELINE), None)
    for run in results.runs:
        table.add_row(*_row(run, baseline))
    return table


def _row(run: Run, baseline: Run | None) -> tuple[str, ...]:
    sent, step_ms = run.bytes_per_step, run.step_ms
    return (
        run.hook,
        f"{run.final_loss:.4f}",
        f"{100 * run.test_accuracy:.1f} %",
        format_bytes(sent),
        _ratio(sent, baseline.bytes_per_step) if baseline else "-",
        f"{step_ms['p50']:.1f} ({step_ms['p20']:.0f}-{step_ms['p80']:.0f})",
        _ratio(step_ms["p50"], baseline.step_ms["p50"]) if baseline else "-",
    )


def _ratio(value: float, to: float) -> str:
    return f"{value / to:.2f}x" if to else "-"


def _title(results: Results) -> str:
    settings = results.settings
    processes = f"{settings.processes} process{'es' if settings.processes > 1 else ''}"
    epochs = f"{settings.epochs} epoch{'s' if settings.epochs > 1 else ''}"
    return f"Handwritten digits, {results.parameters:,} parameters, {processes}, {epochs}"


def _caption(results: Results) -> str:
    facts = results.provenance
    link = "memory" if facts["backend"] == "gloo" else "NVLink, PCIe or memory"
    return (
        "loss: training loss, mean of the last epoch\n"
        f"accuracy: of {results.test_images} test images\n"
        f"sent: payload that each rank hands to collectives, mean of all steps{_plain_steps(results)}\n"
        "ms: whole step, median (20th-80th percentile); the hooks took turns\n"
        f"* All processes ran on one machine, where the link is {link}:\n"
        "  this time does not show what a network would.\n"
        f"{machine_line(facts)}"
    )


def _plain_steps(results: Results) -> str:
    """How the payload of low-rank hooks is to be read, if there are any."""
    has_low_rank = any(HOOKS[run.hook].rank is not None for run in results.runs)
    return f";\n  PowerSGD sends the first {results.plain_steps} whole" if has_low_rank else ""


def machine_line(facts: dict[str, Any]) -> str:
    """Where, when and with what numbers were made, in a line; and in one more how busy others kept the machine."""
    others = facts.get("cpus_busy_with_others")
    return (
        f"{facts['gpu'] or facts['cpu']}, {facts['cpu_count']} CPUs, {facts['backend']}, torch {facts['torch']}, "
        f"gradwire {facts['gradwire']}, {facts['date'][:10]}"
        + (f"\n{others:.1f} of these CPUs were busy with others meanwhile" if others is not None else "")
    )


def format_bytes(count: float) -> str:
    """Decimal units, three digits: 1.23 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def format_number(value: float) -> str:
    """Three digits, or a whole number if that is more."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_rate(name: str) -> str:
    """A link's rate as people write it: 100 Mb/s for 100mbit."""
    return re.sub(r"(?<=\d)([mg])bit$", lambda unit: f" {unit[1].upper()}b/s", name)


def make_logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def save_plot(results: Results, path: Path) -> None:
    """Draw training loss against megabytes sent per rank, one curve for each hook, as a PNG, whole or not at all."""
    from matplotlib.figure import Figure

    steps = len(results.runs[0].losses)
    window = max(1, steps // 20)
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for run, color, width in zip(results.runs, itertools.cycle(_COLORS), itertools.cycle(_WIDTHS), strict=False):
        megabytes = [sent / 1e6 for sent in run.sent_bytes[window - 1 :]]
        axes.plot(
            megabytes,
            running_mean(run.losses, window),
            color=color,
            linewidth=width,
            label=f"{run.hook}: {format_bytes(run.bytes_per_step)} a step, test {100 * run.test_accuracy:.1f} %",
        )
    axes.set_yscale("log")
    totals = [run.sent_bytes[-1] for run in results.runs]
    if max(totals) > 8 * min(totals) > 0:
        make_logarithmic(axes)
    axes.set_xlabel("payload sent per rank so far (MB)")
    axes.set_ylabel(f"training loss (mean of {window} steps)" if window > 1 else "training loss")
    axes.set_title(_title(results), fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    with replacing(path) as partial:
        figure.savefig(partial, format="png")


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of each ``window`` consecutive values."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(high - low) / window for low, high in zip(sums, sums[window:], strict=False)]
