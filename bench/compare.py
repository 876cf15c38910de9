"""What got slower between two states of the code, by the results that benches wrote.

A machine is faster at one hour than at another, so times of two runs are not compared. Every bench has PyTorch's code
take turns with gradwire's; what is compared is their ratio. Several runs of a state tell how much a ratio moves by
itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from gradwire.bench.contenders import GRADWIRE, PYTORCH
from gradwire.bench.converge import summarize
from gradwire.bench.kernel_cases import OURS

Ratios = dict[str, float]  # by what was measured: gradwire's median in units of another's

# A change that is smaller than this is not told from noise, however well repeated runs agree.
LEAST_BAND = 0.05
# What a ratio is taken to move by where a state was measured once.
UNREPEATED_BAND = 0.15
# This part of all ratios moves by less than the noise. Of 160 ratios with a standard deviation of 5 %, 0.3 seem
# slower on unchanged code after two runs of each state, and none after three (simulated; docs/log.md).
_NOISE_QUANTILE = 0.9


class ResultsError(Exception):
    """A file does not hold what a bench writes."""


@dataclass(frozen=True)
class Change:
    """How a ratio changed.

    Attributes:
        what: was measured.
        before: the ratios of the runs of one state.
        after: of the other's.
        band: how much of a ratio is noise, as a fraction.
    """

    what: str
    before: list[float]
    after: list[float]
    band: float

    @property
    def factor(self) -> float:
        """How many times as long it takes now: by the medians."""
        return median(self.after) / median(self.before)

    @property
    def verdict(self) -> str:
        """Whether any run of one state is further from any of the other than the noise."""
        if min(self.after) > (1 + self.band) * max(self.before):
            return "slower"
        return "faster" if min(self.before) > (1 + self.band) * max(self.after) else ""


def load_ratios(path: Path) -> Ratios:
    """Every ratio between gradwire's time and another's in a file that a bench wrote.

    Raises:
        ResultsError: it is none.
    """
    try:
        measurements = json.loads(path.read_text())["measurements"]
        ratios = {
            what: ratio for name in _ROWS for row in measurements.get(name, ()) for what, ratio in _ROWS[name](row)
        }
        return ratios | dict(_races(measurements))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not a file that `gradwire bench ... --output` writes ({error!r})") from error


def _kernel(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if row["contender"] != OURS:
        yield f"{row['kernel']}: {row['model']}, {row['bucket_mib']} MiB, to {row['contender']}", 1 / row["vs_gradwire"]


def _hook(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if row["step_vs_pytorch"] is not None:
        yield f"hook {row['hook']}, ranks: {row['ranks']}: {row['provider']}", row["step_vs_pytorch"]


def _network(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if row["vs_pytorch"] is not None:
        yield f"{row['rate']}, hook {row['hook']}: {row['provider']}", row["vs_pytorch"]


def _reducer(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if row["vs_pytorch"] is not None:
        yield f"reducer, {row['model']}, ranks: {row['ranks']}: {row['provider']}", row["vs_pytorch"]


def _races(measurements: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if "races" not in measurements:
        return
    rows = summarize(measurements["races"])
    race = f"{measurements['task']}, {measurements['hosts']} hosts at {measurements['rate']}"
    seconds = {(row["hook"], row["provider"]): row["seconds"] for row in rows}
    for (hook, provider), ours in seconds.items():
        theirs = seconds.get((hook, PYTORCH))
        if provider == GRADWIRE and ours and theirs:
            yield f"time to the target, {race}, hook {hook}", ours / theirs


# By the name of the list in a bench's measurements.
_ROWS: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, float]]]] = {
    "timings": _kernel,
    "costs": _hook,
    "measured": _network,
    "backwards": _reducer,
}


def compare(before: Sequence[Ratios], after: Sequence[Ratios]) -> list[Change]:
    """What was measured in all runs of both states, the slowest change first."""
    common = sorted(set.intersection(*map(set, before), *map(set, after)))
    olds, news = ([[run[what] for run in runs] for what in common] for runs in (before, after))
    band = round(max(LEAST_BAND, _noise(olds), _noise(news)), 3)
    changes = [Change(what, old, new, band) for what, old, new in zip(common, olds, news, strict=True)]
    return sorted(changes, key=lambda change: -change.factor)


def _noise(state: Sequence[Sequence[float]]) -> float:
    """How far repeated runs of a state are apart, as a fraction: a high quantile over all that was measured."""
    if not state or len(state[0]) == 1:
        return UNREPEATED_BAND
    spreads = sorted(max(ratios) / min(ratios) - 1 for ratios in state)
    return spreads[int(_NOISE_QUANTILE * len(spreads))]


def missing(before: Sequence[Ratios], after: Sequence[Ratios]) -> list[str]:
    """What was measured in all runs of one state and not in all of the other: a race's target that was missed, say."""
    of_before, of_after = (set.intersection(*(set(run) for run in runs)) for runs in (before, after))
    return sorted(of_before - of_after)


def changes_table(changes: Sequence[Change]) -> Table:
    """A row for each change."""
    table = Table(
        title="gradwire's time in units of PyTorch's, before and after",
        caption="before, after: medians. slower, faster: every run, by more than the noise\n"
        "noise: nine of ten ratios move by less between runs of one state; 5 % at least, 15 % for a single run",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("what")
    for header in ("before", "after", "change", "noise", ""):
        table.add_column(header, justify="right", no_wrap=True)
    for change in changes:
        table.add_row(
            change.what,
            f"{median(change.before):.2f}x",
            f"{median(change.after):.2f}x",
            f"{100 * (change.factor - 1):+.0f} %",
            f"{100 * change.band:.0f} %",
            change.verdict,
            style={"slower": "bold red", "faster": "green", "": ""}[change.verdict],
        )
    return table
