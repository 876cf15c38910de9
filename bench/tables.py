"""Tables of records: one pivot, and two renderers, for the terminal and for Markdown pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from gradwire.bench.record import Record, format_bytes, unique

Group = Sequence[Record]  # the records of one row
Cell = Callable[[Group], str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text. The first column names the row; cells of the others are aligned to the right."""

    title: str  # the quantity, with its unit if all cells share it
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]  # cells
    notes: Sequence[str] = ()  # how the numbers were measured and how to read them; below the table
    styles: Sequence[str] = ()  # row styles in a terminal


def pivot(
    title: str,
    records: Iterable[Record],
    names: Mapping[str, Callable[[Record], str]],
    columns: Sequence[tuple[str, Cell]],
    notes: Sequence[str] = (),
) -> Table:
    """A table with a row for every group of records that have equal names.

    Args:
        title: title of the table.
        records: records in the order of the rows.
        names: functions that name a record's row, by header.
        columns: header and function of a row's records, for each further column. Columns without any text are dropped.
        notes: notes of the table.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(name(record) for name in names.values()), []).append(record)
    rows = [(*key, *(cell(group) for _, cell in columns)) for key, group in groups.items()]
    headers = (*names, *(header for header, _ in columns))
    kept = [i for i in range(len(headers)) if i < len(names) or any(row[i] for row in rows)]
    return Table(
        title=title[:1].upper() + title[1:],
        headers=[headers[i] for i in kept],
        rows=[[row[i] for i in kept] for row in rows],
        notes=notes,
    )


def find(group: Iterable[Record], metric: str, implementation: str | None = None) -> Record | None:
    """The first record of a metric, of one implementation or of any."""
    matches = (r for r in group if r.metric == metric and implementation in (None, r.implementation))
    return next(matches, None)


def median_of(group: Iterable[Record], metric: str, implementation: str | None = None) -> float | None:
    """The median of `find`'s record; None if there is none."""
    record = find(group, metric, implementation)
    return None if record is None else record.p50


def value(metric: str, implementation: str | None = None) -> Cell:
    return lambda group: format_value(metric, median_of(group, metric, implementation))


def beyond(metric: str, implementation: str, base: float) -> Cell:
    """A cell with the median above ``base``, or zero."""

    def cell(group: Group) -> str:
        found = median_of(group, metric, implementation)
        return "" if found is None else format_value(metric, max(found - base, 0))

    return cell


def speed_up(metric: str, old: str, new: str) -> Cell:
    """A cell with the median of implementation ``old`` in units of ``new``'s; empty unless both are positive."""

    def cell(group: Group) -> str:
        before, after = median_of(group, metric, old), median_of(group, metric, new)
        return f"{before / after:.2f}x" if before and after and min(before, after) > 0 else ""

    return cell


def relative(metric: str, baseline: float | None) -> Cell:
    """A cell with a median in units of ``baseline``; a dash without one."""

    def cell(group: Group) -> str:
        found = median_of(group, metric)
        return f"{found / baseline:.2f}x" if found is not None and baseline else "-"

    return cell


def gap(
    records: Iterable[Record], metric: str, index: int | None = None, *, name: str = "hook", plain: str = "none"
) -> Cell:
    """A cell with a metric minus that of the baseline with the same seed: mean and range over the seeds.

    Args:
        records: all records, those of the baseline among them. The baseline's own cell has the mean of its metric.
        metric: name of the metric.
        index: number of an entry of its series; None for its single number.
        name, plain: the baseline has the value ``plain`` for ``name``.
    """

    def by_seed(chosen: Iterable[Record]) -> dict[Any, float]:
        found = {r["seed"]: r.p50 if index is None else r.series[index] for r in chosen if r.metric == metric}
        return {seed: number for seed, number in found.items() if number is not None}

    baseline = by_seed(record for record in records if record[name] == plain)

    def cell(group: Group) -> str:
        own = by_seed(group)
        if own and group[0][name] == plain:
            return f"{fmean(own.values()):.3f}"
        found = [number - baseline[seed] for seed, number in own.items() if seed in baseline]
        spread = f" ({min(found):+.3f} to {max(found):+.3f})" if len(found) > 1 else ""
        return f"{fmean(found):+.3f}{spread}" if found else ""

    return cell


def groups_of(records: Iterable[Record], *names: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records by the values of ``names``, in order of appearance."""
    listed = list(records)
    keys = unique(tuple(record[name] for name in names) for record in listed)
    return [(key, [r for r in listed if tuple(r[name] for name in names) == key]) for key in keys]


def to_terminal(table: Table, console: Console) -> list[RichTable]:
    """The table for a terminal. If that is too narrow: several tables, which all begin with the names of the rows."""
    names = next(
        (n for n in range(1, len(table.headers)) if len({(*row[:n],) for row in table.rows}) == len(table.rows)), 1
    )
    blocks, unlimited = [[*range(names)]], console.options.update(width=10_000)
    for column in range(names, len(table.headers)):
        wider = _terminal_table(table, [*blocks[-1], column], console)
        if len(blocks[-1]) > names and console.measure(wider, options=unlimited).maximum > console.width:
            blocks.append([*range(names)])
        blocks[-1].append(column)
    shown = [_terminal_table(table, block, console) for block in blocks]
    width = min(console.width, 80) - 1
    notes = [line for note in table.notes for line in textwrap.wrap(note, width, subsequent_indent="  ")]
    shown[0].title = table.title
    shown[-1].caption = "\n".join(["", *notes]) if notes else None
    return shown


def _terminal_table(table: Table, columns: Sequence[int], console: Console) -> RichTable:
    """Some columns of a table."""
    rich = RichTable(
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        min_width=min(console.width, 80) - 1,  # title and caption are as wide as the table
        pad_edge=False,
        show_edge=False,
    )
    for i in columns:
        header = table.headers[i]
        width = max([len(row[i]) for row in table.rows] + [len(word) for word in header.split()])
        wrapped = "\n".join(textwrap.wrap(header, max(width, 5)))
        rich.add_column(wrapped, justify="right" if i > 0 else "left", no_wrap=True)
    for i, row in enumerate(table.rows):
        rich.add_row(*(row[column] for column in columns), style=table.styles[i] if table.styles else None)
    return rich


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables in the terminal, each part with a blank line after it."""
    console = console or Console()
    for table in tables:
        for part in to_terminal(table, console):
            console.print(part, "")


def machine_line(facts: dict[str, Any]) -> str:
    """Machine, versions, date and background load of a measurement."""
    load = facts.get("background_cpu_load")
    return (
        f"{facts['gpu'] or facts['cpu']}, {facts['cpu_count']} CPUs, {facts['backend']}, torch {facts['torch']}, "
        f"gradwire {facts['gradwire']}, {facts['date'][:10]}"
        + (f"; background CPU load {load:.1f}" if load is not None else "")
    )


def format_value(metric: str, number: float | None) -> str:
    """Format a number by the unit in the metric's parentheses."""
    if number is None:
        return ""
    if metric.endswith("(B)"):
        return format_bytes(number)
    if metric.endswith("(%)"):
        return f"{number:.1f}"
    return f"{number:.4f}" if metric.endswith("loss") else format_number(number)


def format_number(number: float) -> str:
    """Format a number with three digits, or as a whole number if it has more."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def format_bandwidth(bandwidth: float, digits: int = 2) -> str:
    """Format bits per second; measured and predicted bandwidths have no more than two significant digits."""
    mbit = float(f"{bandwidth / 1e6:.{digits}g}")
    for unit in ("Mb/s", "Gb/s"):
        if mbit < 1000:
            return f"{mbit:g} {unit}"
        mbit /= 1000
    return f"{mbit:g} Tb/s"


def format_rate(name: str) -> str:
    """Format a link rate with its unit: 100 Mb/s for 100mbit."""
    return re.sub(r"(?<=\d)([mg])bit$", lambda unit: f" {unit[1].upper()}b/s", name)


def format_link(name: str, settings: Mapping[str, Any]) -> str:
    """Format a link rate, and the delay of the settings if there is one: 100 Mb/s, 20 ms each way."""
    delay = settings.get("delay_ms")  # none in results of earlier versions
    return f"{format_rate(name)}, {delay:g} ms each way" if delay else format_rate(name)


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 rank, 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
