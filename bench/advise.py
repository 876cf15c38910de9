"""The predictions of `gradwire advise`, beside measured steps, on hosts joined by a link of a chosen rate.

One rank on each host, one thread each. At each rate, the ranks measure and predict as the command does; then each hook
trains for a few steps in a row, as in a training with one hook, which finds its memory in the caches. The hooks take
turns, in another order in each round. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from gradwire.bench import launch
from gradwire.bench.models import JOBS, STEPS_IN_A_ROW, Training, time_in_rows
from gradwire.bench.namespaces import Rate
from gradwire.bench.network import LOOPBACK, limit_to, places_of
from gradwire.bench.record import STEP_MS, Measured, Record, percentiles_ms, unique
from gradwire.bench.tables import Table, count, find, format_number, format_rate, groups_of, median_of, pivot
from gradwire.planner.advice import Advice, advise
from gradwire.planner.hook_registry import HOOKS, display_name
from gradwire.planner.probe import PLAIN
from gradwire.planner.probe import measure as measure_job

DEFAULT_MODELS = ("linear", "transformer", "densenet", "tiny-layers")
DEFAULT_RATES = ("100mbit", "1gbit", "unlimited")
DEFAULT_HOOKS = tuple(name for name in HOOKS if name != "noop")
QUICK_HOOKS = ("none", "bf16", "int4", "powersgd-r4")
PREDICTED, MEASURED = "predicted", "measured"
SPEED_UP = "speed-up"  # speed-up of the recommended hook over no hook
ADVICE_S = "time of the measurement (s)"
TOLERANCE = 20  # percent
_WARM_UP = 5


def measure(
    models: Sequence[str], rates: Sequence[Rate], hooks: Sequence[str], rounds: int, hosts: int = 2
) -> Measured:
    """Predicted and measured step times."""
    settings = {"rates": [rate.name for rate in rates], "hooks": list(hooks), "rounds": rounds, "hosts": hosts}
    records: list[Record] = []
    with places_of(hosts, is_local=list(rates) == [LOOPBACK]) as places:
        for model in models:
            records += launch.run(__name__, settings | {"model": model, "threads": 1}, places)
    return Measured(settings | {"models": list(models), "threads": 1}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """Predict and time steps of one model as one rank; returns the records."""
    model, records = settings["model"], []
    build = JOBS[model]
    trainings = {hook: Training(build(device), HOOKS[hook].make) for hook in unique((PLAIN, *settings["hooks"]))}
    for _ in range(_WARM_UP):  # on an unlimited link
        for training in trainings.values():
            training.step()
    for name in settings["rates"]:
        limit_to(name)
        started = time.monotonic()
        advice = advise(measure_job(build, settings["hooks"], device))
        seconds = time.monotonic() - started
        times = time_in_rows(trainings, settings["rounds"], f"{model}, {name:<12}")
        records += _records(model, name, settings["hosts"], advice, times, seconds)
    return records


def _records(
    model: str, rate: str, hosts: int, advice: Advice, times: Mapping[str, Sequence[float]], seconds: float
) -> list[Record]:
    predicted = {each.hook: each for each in advice.predictions}
    records = []
    for hook, of_steps in times.items():
        case = {"model": model, "rate": rate, "hook": hook}
        of_hook = partial(Record, bench="advise", case=case, ranks=hosts, metric=STEP_MS)
        prediction = round(1e3 * predicted[hook].step_seconds, 4)
        records.append(of_hook(implementation=MEASURED, **percentiles_ms(of_steps)))
        records.append(of_hook(implementation=PREDICTED, p50=prediction))
    case = {"model": model, "rate": rate, "hook": advice.recommended}
    of_advice = partial(Record, bench="advise", case=case, ranks=hosts, implementation="advice")
    records.append(of_advice(metric=SPEED_UP, p50=round(median(times[PLAIN]) / median(times[advice.recommended]), 4)))
    records.append(of_advice(metric=ADVICE_S, p50=round(seconds, 2)))
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """For each model, measured times and errors of the predictions; then the advice."""
    steps = [record for record in records if record.metric == STEP_MS]
    rates = unique(record["rate"] for record in steps)
    columns = [
        (f"{header}{format_rate(rate)}", cell(rate))
        for rate in rates
        for header, cell in (("step (ms), ", _measured), ("error (%), ", _error))
    ]
    result = [
        pivot(
            f"Error of predicted step times, {model}",
            group,
            {"hook": lambda record: display_name(record["hook"])},
            columns,
        )
        for (model,), group in groups_of(steps, "model")
    ]
    return [*result, _advice_table(records)]


def _advice_table(records: Sequence[Record]) -> Table:
    settings = records[0].provenance["settings"]
    rows = []
    for (model, rate), group in groups_of(records, "model", "rate"):
        advice, seconds = find(group, SPEED_UP), median_of(group, ADVICE_S)
        assert advice is not None and advice.p50 is not None and seconds is not None
        errors = [abs(_percent(of_hook)) for _, of_hook in groups_of(_steps(group), "hook")]
        plain = median_of(_steps(group, PLAIN), STEP_MS, MEASURED)
        fastest = min(r.p50 for r in group if r.implementation == MEASURED and r.p50 is not None)
        assert plain is not None
        within = sum(error <= TOLERANCE for error in errors)
        rows.append(
            [
                model,
                format_rate(rate),
                display_name(advice["hook"]),
                f"{advice.p50:.2f}x",
                f"{plain / fastest:.2f}x",
                f"{within}/{len(errors)}",
                f"{median(errors):.0f}",
                format_number(seconds),
            ]
        )
    return Table(
        title=f"Advice and its accuracy, {count(settings['hosts'], 'host')}",
        headers=[
            "model",
            "link",
            "advice",
            "speed-up",
            "best",
            f"within {TOLERANCE} %",
            "error (%)",
            "time (s)",
        ],
        rows=rows,
        notes=[
            f"step: forward and backward on the slowest rank, median of {STEPS_IN_A_ROW * settings['rounds']} steps",
            "error: of the prediction, relative to the measured step",
            "speed-up: of a measured step with the advised hook over one without a hook. Best: with the fastest hook",
            f"within {TOLERANCE} %: hooks with a smaller error of the prediction. Error: its median magnitude",
            "time: that the measurement for the advice took",
            f"{settings['hosts']} hosts on one machine, one thread each",
        ],
    )


def _steps(group: Sequence[Record], hook: str | None = None) -> list[Record]:
    return [record for record in group if record.metric == STEP_MS and hook in (None, record["hook"])]


def _of_rate(group: Sequence[Record], rate: str) -> list[Record]:
    return [record for record in group if record["rate"] == rate]


def _measured(rate: str) -> Any:
    return lambda group: format_number(median_of(_of_rate(group, rate), STEP_MS, MEASURED) or 0)


def _error(rate: str) -> Any:
    return lambda group: f"{_percent(_of_rate(group, rate)):+.0f}"


def _percent(group: Sequence[Record]) -> float:
    """The error of a prediction in percent."""
    predicted, measured = (median_of(group, STEP_MS, name) for name in (PREDICTED, MEASURED))
    assert predicted is not None and measured is not None
    return 100 * (predicted / measured - 1)
