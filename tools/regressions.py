"""``python -m tools.regressions`` finds regressions between two states of the code, from the results of benches.

Absolute times of two runs are not comparable: a machine's speed varies from hour to hour. In every
bench, gradwire and PyTorch take turns; this module compares the ratios of their times. Repeated
runs of a state show the noise of a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.record import Metric, Record, RecordError, load
from gradwire.bench.tables import Table, find, print_tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Ratios = dict[str, float]  # gradwire's median in units of another implementation's, by bench, case and implementations

# A smaller change counts as noise, however well repeated runs agree.
MIN_BAND = 0.05
# The assumed noise of a ratio where a state was measured once.
UNREPEATED_BAND = 0.15
# This fraction of all ratios varies by less than the noise. Of 160 ratios with a standard deviation of 5 %, 0.3 seem
# slower on unchanged code after two runs of each state, and none after three (simulated; docs/log/benchmarks.md).
_NOISE_QUANTILE = 0.9

# A method is compared with the PyTorch of its setting.
_SETTING = ("kernel", "model", "bucket_mib", "task", "rate", "optimizer", "hook", "seam")
_NAMING = (*_SETTING, "method")


@dataclass(frozen=True)
class Change:
    """The change of a ratio."""

    what: str  # name of the ratio: bench, case and implementations
    before: list[float]  # the ratios of the runs of one state
    after: list[float]  # those of the other state
    band: float  # the noise, as a fraction

    @property
    def factor(self) -> float:
        """The ratio of the medians, after to before."""
        return median(self.after) / median(self.before)

    @property
    def verdict(self) -> str:
        """slower or faster if all runs of one state differ from all of the other by more than the noise, else empty."""
        if min(self.after) > (1 + self.band) * max(self.before):
            return "slower"
        return "faster" if min(self.before) > (1 + self.band) * max(self.after) else ""


def load_ratios(path: Path) -> Ratios:
    """Every ratio in a file of results. Raises RecordError if the file is not one that a bench writes."""
    return dict(ratios(load(path)))


def ratios(records: Iterable[Record]) -> Iterator[tuple[str, float]]:
    """Ratios between gradwire's time and another implementation's, with their names."""
    listed = list(records)
    for record in listed:
        if record.metric == Metric.VS_GRADWIRE and record.implementation != GRADWIRE and record.p50:
            yield f"{_name(record)}: {GRADWIRE} to {record.implementation}", 1 / record.p50
    timed = [record for record in listed if record.metric in (Metric.STEP_MS, Metric.BACKWARD_MS, Metric.BUCKET_US)]
    yield from _to_pytorch([*timed, *_medians_to_target(listed)])


def _name(record: Record, keys: Sequence[str] = _NAMING) -> str:
    case = ", ".join(f"{key} {value}" for key, value in record.case.items() if key in keys)
    return f"{record.bench}, {case}, ranks {record.ranks}"


def _to_pytorch(records: Sequence[Record]) -> Iterator[tuple[str, float]]:
    for record in records:
        if record.implementation in (GRADWIRE, GRADWIRE_ON_PYTORCH):
            setting = _name(record, _SETTING)
            pytorch = find((other for other in records if _name(other, _SETTING) == setting), record.metric, PYTORCH)
            if pytorch is not None and pytorch.p50 and record.p50:
                yield f"{_name(record)}: {record.implementation} to {PYTORCH}", record.p50 / pytorch.p50


def _medians_to_target(records: Iterable[Record]) -> list[Record]:
    """One record per hook, optimizer and implementation whose trainings all reached the target."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.metric == Metric.TARGET_S:
            groups.setdefault((_name(record), record.implementation), []).append(record)
    medians = []
    for group in groups.values():
        reached = [record.p50 for record in group if record.p50 is not None]
        if len(reached) == len(group):
            medians.append(replace(group[0], p50=median(reached)))
    return medians


def compare(before: Sequence[Ratios], after: Sequence[Ratios]) -> list[Change]:
    """Changes of the ratios that all runs of both states have, the largest slow-down first."""
    common = sorted(set.intersection(*map(set, before), *map(set, after)))
    olds, news = ([[run[what] for run in runs] for what in common] for runs in (before, after))
    band = round(max(MIN_BAND, _noise(olds), _noise(news)), 3)
    changes = [Change(what, old, new, band) for what, old, new in zip(common, olds, news, strict=True)]
    return sorted(changes, key=lambda change: -change.factor)


def _noise(state: Sequence[Sequence[float]]) -> float:
    """The spread of repeated runs of a state, as a fraction: a high quantile over all ratios."""
    if not state or len(state[0]) == 1:
        return UNREPEATED_BAND
    spreads = sorted(max(ratios) / min(ratios) - 1 for ratios in state)
    return spreads[int(_NOISE_QUANTILE * len(spreads))]


def missing(before: Sequence[Ratios], after: Sequence[Ratios]) -> list[str]:
    """Ratios that all runs of one state have and not all of the other: after a missed target, for example."""
    names_before, names_after = (set.intersection(*(set(run) for run in runs)) for runs in (before, after))
    return sorted(names_before - names_after)


def table(changes: Sequence[Change]) -> Table:
    """A row per change."""
    return Table(
        title="Ratio of gradwire's time to other implementations', before and after",
        headers=("", "before", "after", "change", "noise", ""),
        rows=[
            (
                change.what,
                f"{median(change.before):.2f}x",
                f"{median(change.after):.2f}x",
                f"{100 * (change.factor - 1):+.0f} %",
                f"{100 * change.band:.0f} %",
                change.verdict,
            )
            for change in changes
        ],
        styles=[{"slower": "bold red", "faster": "green", "": ""}[change.verdict] for change in changes],
        notes=[
            "before, after: medians of the runs. slower, faster: every run, by more than the noise",
            "noise: nine of ten ratios vary by less between runs of one state; at least 5 %, 15 % for a single run",
        ],
    )


@app.command()
def main(
    before: Annotated[
        list[Path], typer.Option("--before", help="Results before the change. Repeat the option for repeated runs.")
    ],
    after: Annotated[
        list[Path], typer.Option("--after", help="Results after the change. Repeat the option for repeated runs.")
    ],
) -> None:
    """Compare results before and after a change; fail if gradwire got slower relative to PyTorch.

    Ignores differences within the noise of repeated runs. Also fails if a result is missing after the change, for
    example because a training missed its target.
    """
    try:
        states = [[load_ratios(path) for path in paths] for paths in (before, after)]
    except RecordError as error:
        typer.echo(f"tools.regressions: {error}.", err=True)
        raise typer.Exit(1) from None
    changes, lost = compare(*states), missing(*states)
    if not changes:
        typer.echo("tools.regressions: the files have no measurement in common.", err=True)
        raise typer.Exit(1)
    print_tables([table(changes)])
    slower = [change for change in changes if change.verdict == "slower"]
    typer.echo(f"{len(slower)} of {len(changes)} got slower." + "".join(f"\nMissing after: {what}" for what in lost))
    raise typer.Exit(1 if slower or lost else 0)


if __name__ == "__main__":
    app()
