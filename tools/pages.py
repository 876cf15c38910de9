"""``python -m tools.pages``: tables and plots of README and docs, from the results in bench/results and nothing else.

A page marks the place of a table by a pair of comments, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the text
between them is replaced. `TABLES` lists the names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.bench.plots import DRAWINGS
from gradwire.bench.record import Record, RecordError, load, replacing, unique
from gradwire.bench.tables import Table, machine_line
from gradwire.cli.bench import TABLES as BENCH_TABLES
from tools import advice_error, choice_tables, gpu_records, rounding, sharded_losses, soak

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/published-formats.md",
    "docs/choosing-a-hook.md",
    "docs/quantization.md",
    "docs/advise.md",
    "docs/telemetry.md",
    "docs/guarantees.md",
)
PLOTS = "docs/plots"
Results = dict[str, list[Record]]  # by file name

# By name: the results files, and the function of their records.
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., list[Table]]]] = {
    **{name: ((name,), BENCH_TABLES[name]) for name in BENCH_TABLES if name not in ("converge", "long_runs")},
    **{
        f"converge_{what}": ((f"converge_{what}",), BENCH_TABLES["converge"])
        for what in ("digits", "text", "optimizers_digits", "optimizers_text")
    },
    **{
        f"converge_long_{what}": ((f"converge_long_{what}",), BENCH_TABLES["long_runs"])
        for what in ("text", "gpt", "digits")
    },
    **{name: ((name,), BENCH_TABLES["network"]) for name in ("network_20ms", "network_80ms")},
    "rounding": (("rounding",), lambda records: [rounding.errors_table(records)]),
    "formats": (("rounding",), lambda records: [rounding.formats_table(records)]),
    "sharded_losses": (("sharded_losses",), sharded_losses.tables),
    "advise": (("advise",), advice_error.tables),
    "leading": (("converge_text", "converge_long_text"), choice_tables.leading),
    "loss_by_optimizer": (("converge_long_text",), choice_tables.optimizers),
    "choice": (("network", "converge_long_text"), choice_tables.hooks),
    "wires": (("converge_long_text", "rounding"), choice_tables.wire_formats),
    "soak": (("soak",), soak.tables),
    "gpu": (("gpu",), gpu_records.tables),
}


class PageError(Exception):
    """A page asks for a table that does not exist."""


def write_pages(root: Path) -> list[Path]:
    """Fill in the pages and draw the plots of a checkout; returns the files written.

    Raises:
        PageError: a page names an unknown table, or the results for it are missing or not a bench's.
    """
    results = load_all(root / "bench" / "results")
    pages = {root / name: fill((root / name).read_text(), results) for name in PAGES}
    for path, text in pages.items():
        with replacing(path) as partial:
            partial.write_text(text)
    written = list(pages)
    folder = root / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in results.items():
        if records[0].bench in DRAWINGS and any(f"plots/{name}.png" in text for text in pages.values()):
            DRAWINGS[records[0].bench](records, folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


def load_all(folder: Path) -> Results:
    """The results of each bench. Raises PageError if a file is not a bench's."""
    try:
        return {path.stem: load(path) for path in sorted(folder.glob("*.jsonl"))}
    except RecordError as error:
        raise PageError(f"{error}. Run that bench again, or delete the file.") from error


def fill(page: str, results: Results) -> str:
    """The page with every table generated anew. Raises PageError like `write_pages`."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        files, tables = TABLES.get(name, ((name,), None))
        missing = [f"bench/results/{file}.jsonl" for file in files if file not in results]
        if tables is None or missing:
            raise PageError(f"There is no table {name!r}, or no {' and no '.join(missing)} for it. Run that bench.")
        found = [results[file] for file in files]
        sources = "\n".join(map(source, files, found))
        return f"<!-- begin {name} -->\n{to_markdown(tables(*found))}\n{sources}<!-- end {name} -->"

    return re.sub(r"<!-- begin (?P<name>\S+) -->\n.*?<!-- end (?P=name) -->", replaced, page, flags=re.DOTALL)


def to_markdown(tables: Sequence[Table]) -> str:
    """Tables for a page, each under its title, with the notes of all below the last."""
    parts = []
    for table in tables:
        rule = ["---", *("---:" for _ in table.headers[1:])]
        lines = "".join(f"| {' | '.join(row)} |\n" for row in (table.headers, rule, *table.rows))
        parts.append(f"**{table.title}**\n\n{lines}")
    notes = [f"- {note[0].upper()}{note[1:]}.\n" for note in unique(note for table in tables for note in table.notes)]
    return "\n".join([*parts, "".join(notes)] if notes else parts)


def source(file: str, records: Sequence[Record]) -> str:
    """Commands, commits and machine of the measurements in a file of bench/results, as a line of Markdown."""
    runs = [facts for facts, _ in itertools.groupby(record.provenance for record in records)]
    if len(runs) > 1:
        options = [re.split(r" (?=--)", facts["command"]) for facts in runs]
        common = [option for option in options[0] if all(option in others for others in options)]
        place = f"bench/results/{file}.jsonl"
        what = f"{len(runs)} runs of `{' '.join(common)}`; {place} has their options and commits"
    else:
        commit = _commit(runs[0])
        what = f"`{runs[0]['command']}`" + (f", commit {commit}" if commit else "")
    return f"{what}. {machine_line(runs[-1])}.\n"


def _commit(facts: dict[str, Any]) -> str:
    name, _, changes = (facts["commit"] or "").partition("-")
    return f"{name[:10]}{' with local changes' if changes else ''}"


@app.command()
def main(
    root: Annotated[Path, typer.Argument(help="Checkout with bench/results, README.md and docs/.")] = Path(),
) -> None:
    """Generate the tables and plots in README.md and docs/ from bench/results."""
    try:
        for path in write_pages(root):
            typer.echo(path)
    except (PageError, OSError) as error:
        typer.echo(f"tools.pages: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
