"""The predictions of `gradwire advise`, compared with measured steps, on hosts joined by a link of a chosen rate.

One rank on each host, one thread each. At each rate, the ranks measure and predict as the command does; then each hook
trains for a few steps in a row, as in a training with one hook, which finds its memory in the caches. The hooks take
turns, in another order in each round. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench import launch
from gradwire.bench.implementations import wrap
from gradwire.bench.models import JOBS
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of, unique
from gradwire.bench.tables import (
    Cell,
    Group,
    Table,
    count,
    find,
    format_link,
    format_number,
    format_rate,
    groups_of,
    median_of,
    pivot,
)
from gradwire.bench.timing import slowest, turns
from gradwire.planner.hook_registry import COMPARABLE, HOOKS, PLAIN, Make, display_name
from gradwire.planner.jobs import Job
from gradwire.planner.measurement import measure as measure_job
from gradwire.planner.recommend import Advice, advise

DEFAULT_MODELS = ("linear", "transformer", "densenet", "tiny-layers")
DEFAULT_RATES = ("100mbit", "1gbit", "unlimited")
DEFAULT_HOOKS = tuple(COMPARABLE)
PREDICTED, MEASURED = "predicted", "measured"
SPEED_UP = "speed-up"  # speed-up of the recommended hook over no hook
ADVICE_S = "time of the measurement (s)"
TOLERANCE = 20  # percent
HOSTS = 2
STEPS_IN_A_ROW = 5
_WARM_UP = 5


class JobTraining:
    """A job's model in gradwire's DDP, with a hook; ``make`` returns its registration."""

    def __init__(self, job: Job, make: Make) -> None:
        self.seconds: list[float] = []
        self._loss = job.loss
        self._ddp, _ = wrap(job.model, make)

    def step(self) -> float:
        """Seconds of a forward and a backward, until every gradient is final; all ranks begin together."""
        self._ddp.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        self._loss(self._ddp).backward()
        return time.perf_counter() - start


def time_in_rows(trainings: Mapping[str, JobTraining], rounds: int, title: str) -> dict[str, list[float]]:
    """Seconds of steps on the slowest rank: in each round, `STEPS_IN_A_ROW` of each training. A collective call."""
    for training in trainings.values():
        training.seconds = []
    for _, training in turns(range(rounds), list(trainings.values()), title):
        training.step()  # warms the caches
        training.seconds += [training.step() for _ in range(STEPS_IN_A_ROW)]
    return {name: slowest(training.seconds) for name, training in trainings.items()}


def measure(
    models: Sequence[str], rates: Sequence[Rate], hooks: Sequence[str], rounds: int, delay_ms: float
) -> Measured:
    """Predicted and measured step times of each hook, at each rate of the link."""
    settings: dict[str, Any] = {"hooks": list(hooks), "rounds": rounds, "rates": [rate.name for rate in rates]}
    settings |= {"hosts": HOSTS, "delay_ms": delay_ms, "threads": 1}
    with places_of(HOSTS, rates, delay_ms=delay_ms) as places:
        records = [r for model in models for r in launch.run(__name__, settings | {"model": model}, places)]
    return Measured(settings | {"models": list(models)}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """A rank of a host: predict, then measure, at each rate."""
    model, records = settings["model"], []
    build = JOBS[model]
    trainings = {hook: JobTraining(build(device), HOOKS[hook].make) for hook in unique((PLAIN, *settings["hooks"]))}
    for _ in range(_WARM_UP):  # on an unlimited link
        for training in trainings.values():
            training.step()
    for name in settings["rates"]:
        limit(Rate.named(name))
        started = time.monotonic()
        advice = advise(measure_job(build, settings["hooks"], device))
        seconds = time.monotonic() - started
        times = time_in_rows(trainings, settings["rounds"], f"{model}, {name:<12}")
        records += _records(model, name, settings["hosts"], advice, times, seconds)
    return records


def _records(
    model: str, rate: str, hosts: int, advice: Advice, times: Mapping[str, Sequence[float]], seconds: float
) -> list[Record]:
    predicted = {each.hook: round(1e3 * each.step_seconds, 4) for each in advice.predictions}
    records = []
    for hook, step_times in times.items():
        case = {"model": model, "rate": rate, "hook": hook}
        records += records_of("advise", case, MEASURED, hosts, {Metric.STEP_MS: percentiles_ms(step_times)})
        records += records_of("advise", case, PREDICTED, hosts, {Metric.STEP_MS: predicted[hook]})
    case = {"model": model, "rate": rate, "hook": advice.recommended}
    speed_up = round(median(times[PLAIN]) / median(times[advice.recommended]), 4)
    return records + records_of("advise", case, "advice", hosts, {SPEED_UP: speed_up, ADVICE_S: round(seconds, 2)})


def tables(records: Sequence[Record]) -> list[Table]:
    """A table of errors for each model, and a table of the advice."""
    steps = [record for record in records if record.metric == Metric.STEP_MS]
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
    columns: list[tuple[str, Cell]] = [
        ("advice", lambda group: display_name(_found(group, SPEED_UP)["hook"])),
        ("speed-up", lambda group: f"{_found(group, SPEED_UP).p50:.2f}x"),
        ("best", _best),
        (f"within {TOLERANCE} %", lambda group: f"{sum(e <= TOLERANCE for e in _errors(group))}/{len(_errors(group))}"),
        ("error (%)", lambda group: f"{median(_errors(group)):.0f}"),
        ("time (s)", lambda group: format_number(_found(group, ADVICE_S).p50 or 0)),
    ]
    return pivot(
        f"Advice and its accuracy, {count(settings['hosts'], 'host')}",
        records,
        {"model": lambda record: str(record["model"]), "link": lambda record: format_link(record["rate"], settings)},
        columns,
        [
            f"step: forward and backward on the slowest rank, median of {STEPS_IN_A_ROW * settings['rounds']} steps",
            "error: relative error of the predicted step time",
            "speed-up: measured speed-up of the advised hook over no hook. Best: speed-up of the fastest hook",
            f"within {TOLERANCE} %: number of hooks with a smaller prediction error. Error: median of its magnitude",
            "time: duration of the measurements that the advice needs",
            f"{settings['hosts']} hosts on one machine, one thread each",
        ],
    )


def _found(group: Group, metric: str) -> Record:
    record = find(group, metric)
    assert record is not None
    return record


def _errors(group: Group) -> list[float]:
    """Magnitudes of the errors of all predictions, in percent."""
    steps = [record for record in group if record.metric == Metric.STEP_MS]
    return [abs(_percent(hook_steps)) for _, hook_steps in groups_of(steps, "hook")]


def _best(group: Group) -> str:
    """The speed-up of the fastest hook over no hook."""
    seconds = {r["hook"]: r.p50 for r in group if r.implementation == MEASURED and r.p50 is not None}
    return f"{seconds[PLAIN] / min(seconds.values()):.2f}x"


def _at_rate(group: Sequence[Record], rate: str) -> list[Record]:
    return [record for record in group if record["rate"] == rate]


def _measured(rate: str) -> Any:
    return lambda group: format_number(median_of(_at_rate(group, rate), Metric.STEP_MS, MEASURED) or 0)


def _error(rate: str) -> Any:
    return lambda group: f"{_percent(_at_rate(group, rate)):+.0f}"


def _percent(group: Sequence[Record]) -> float:
    """The error of a prediction in percent."""
    predicted, measured = (median_of(group, Metric.STEP_MS, name) for name in (PREDICTED, MEASURED))
    assert predicted is not None and measured is not None
    return 100 * (predicted / measured - 1)
