"""The cost of telemetry: measured steps and steps compared with the exact mean, against plain steps.

One model per kind of step trains with the same hook. They take turns step by step, so that background load falls on
all of them, and each timed step follows a plain one. `measure` starts the ranks; each runs `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, MODEL, WARM_UP, Implementation, make_batch, prepare
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of
from gradwire.bench.tables import Group, Table, count, groups_of, median_of, pivot, value
from gradwire.bench.timing import bench_device, time_in_turn
from gradwire.planner.hook_registry import FIRST_COMPRESSED, label

OBSERVED_HOOKS = ("bf16-fp32-sum", "int4", "powersgd-r4")
PLAIN, MEASURED, COMPARED = "plain", "measured", "compared"
EVERY, EXACT_EVERY = 50, 1000  # intervals in the table


def measure(ranks: Sequence[int], steps: int) -> Measured:
    """Step times of each hook without telemetry, measured in every step, and compared in every step."""
    device = bench_device()
    settings = {"model": MODEL, "steps": steps, "threads": 1, "first_compressed_step": FIRST_COMPRESSED}
    runs = [(size, settings | {"hook": hook}) for size in ranks for hook in OBSERVED_HOOKS]
    return Measured(settings, [record for size, of in runs for record in launch.run(__name__, of, size, device)])


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    hook, steps = settings["hook"], settings["steps"]
    kinds = {kind: Implementation(hook, GRADWIRE, device) for kind in (PLAIN, MEASURED, COMPARED)}
    kinds[MEASURED].state.observe(every=1)
    kinds[COMPARED].state.observe(every=1, exact_every=1)
    everything = list(kinds.values())
    prepare(everything, device)
    batch_of = partial(make_batch, rank=dist.get_rank(), device=device)
    time_in_turn(everything, range(WARM_UP + 1, WARM_UP + 1 + steps), hook, batch_of, untimed=kinds[PLAIN])
    case, ranks, records = {"hook": hook}, dist.get_world_size(), []
    for kind, implementation in kinds.items():
        metrics: dict[str, Any] = {Metric.STEP_MS: percentiles_ms(implementation.seconds)}
        records += records_of("telemetry", case, kind, ranks, metrics)
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    names = {"hook": lambda record: label(record["hook"])}
    columns = [
        ("step time (ms)", value(Metric.STEP_MS, PLAIN)),
        ("measured step (ms)", value(Metric.STEP_MS, MEASURED)),
        (f"overhead of every={EVERY}", _share(MEASURED, EVERY)),
        ("compared step (ms)", value(Metric.STEP_MS, COMPARED)),
        (f"overhead of exact_every={EXACT_EVERY}", _share(COMPARED, EXACT_EVERY)),
    ]
    settings = records[0].provenance["settings"]
    notes = (
        f"model: {settings['model']}",
        f"median of {settings['steps']} interleaved steps of each kind, forward and backward on the slowest rank",
        "overhead: extra time of a measured step, averaged over all steps, relative to a step without telemetry",
    )
    return [
        pivot(f"Telemetry, {count(ranks, 'rank')}", group, names, columns, notes)
        for (ranks,), group in groups_of(records, "ranks")
    ]


def _share(kind: str, every: int) -> Callable[[Group], str]:
    """Overhead per step, averaged, if one step in ``every`` is of this kind."""

    def cell(group: Group) -> str:
        plain, other = median_of(group, Metric.STEP_MS, PLAIN), median_of(group, Metric.STEP_MS, kind)
        return "" if plain is None or other is None else f"{(other - plain) / plain / every:.2%}"

    return cell
