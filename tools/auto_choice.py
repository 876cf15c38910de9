"""`auto_hook` compared with each of its candidates, on hosts joined by a link of a chosen rate.

One rank on each host, one thread each. At each rate, a new `AutoState` measures and chooses; then the choice, no hook
and every candidate take turns, each for a few steps in a row, as in a training with one hook, which finds its
memory in the caches. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.bench.models import JOBS
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import limit_to
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.tables import Group, Table, count, format_rate, pivot, speed_up, value
from gradwire.hooks.auto_hook import DEFAULT_CANDIDATES, AutoState, auto_hook
from gradwire.planner.hook_registry import HOOKS
from tools.links import STEPS_IN_A_ROW, Training, measure_on_links, time_in_rows

DEFAULT_MODELS = ("linear", "transformer", "densenet", "tiny-layers")
DEFAULT_RATES = ("100mbit", "1gbit", "unlimited")
NO_HOOK, AUTO = "no hook", "auto_hook"
CANDIDATES = DEFAULT_CANDIDATES[1:]  # without "plain", which is no hook
PARAMETERS = "parameters"  # chosen for a candidate
WARM_UP = 5


def measure(models: Sequence[str], rates: Sequence[Rate], rounds: int, hosts: int = 2) -> Measured:
    """The choice at each rate of the link, and the step times of the choice, no hook and every candidate."""
    return measure_on_links(__name__, models, rates, hosts, {"rounds": rounds})


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """A rank of a host: choose, then time all trainings, at each rate."""
    build, records = JOBS[settings["model"]], []
    fixed = {name: Training(build(device), HOOKS[name].make) for name in ("none", *CANDIDATES)}
    for _ in range(WARM_UP):  # on an unlimited link
        for training in fixed.values():
            training.step()
    for name in settings["rates"]:
        limit_to(name)
        chosen = Training(build(device), lambda group, start: (AutoState(group), auto_hook))
        while not chosen.state.plan:
            chosen.step()
        for _ in range(WARM_UP):
            chosen.step()
        trainings = {AUTO: chosen, NO_HOOK: fixed["none"], **{each: fixed[each] for each in CANDIDATES}}
        times = time_in_rows(trainings, settings["rounds"], f"{settings['model']}, {name:<12}")
        case, chosen_by = {"model": settings["model"], "rate": name}, Counter(chosen.state.plan.values())
        for each, seconds in times.items():
            records += records_of("auto", case, each, settings["hosts"], {Metric.STEP_MS: percentiles_ms(seconds)})
        for each, parameters in chosen_by.items():
            records += records_of("auto", case, each, settings["hosts"], {PARAMETERS: parameters})
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """Two tables: the choices with their speed-up; the step times of `auto_hook`, no hook and every candidate."""
    settings = records[0].provenance["settings"]
    names: dict[str, Callable[[Record], str]] = {
        "model": lambda record: str(record["model"]),
        "link": lambda record: format_rate(record["rate"]),
    }
    choice_notes = [
        "choice: candidate chosen by auto_hook from its default list; if several, with the share of parameter tensors",
        "speed-up: step time of no hook divided by that of auto_hook",
        f"{count(settings['hosts'], 'host')} on one machine, one thread each",
    ]
    time_notes = [
        f"step time (ms): forward and backward on the slowest rank, median of {STEPS_IN_A_ROW * settings['rounds']} "
        "interleaved steps",
    ]
    times = [(each, value(Metric.STEP_MS, each)) for each in (AUTO, NO_HOOK, *CANDIDATES)]
    choices = [("choice", _choice), ("speed-up", speed_up(Metric.STEP_MS, NO_HOOK, AUTO))]
    return [
        pivot("Automatic choice", records, names, choices, choice_notes),
        pivot(f"Automatic choice: {Metric.STEP_MS}", records, names, times, time_notes),
    ]


def _choice(group: Group) -> str:
    parts = [(record.p50 or 0, record.implementation) for record in group if record.metric == PARAMETERS]
    if len(parts) == 1:
        return parts[0][1]
    total = sum(parameters for parameters, _ in parts)
    return ", ".join(f"{name} {parameters / total:.0%}" for parameters, name in sorted(parts, reverse=True))
