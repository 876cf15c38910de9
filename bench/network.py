"""Steps over a network: the same model with each hook, on hosts joined by a link of a chosen rate.

One rank on each host, one thread each. All implementations live in the same processes and take turns step by step, at
one rate after another. `measure` starts the ranks; each runs `main`, checks the gradients, limits its own interface,
and times its steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench import launch, namespaces
from gradwire.bench.implementations import (
    BUCKETS_NOTE,
    GRADWIRE,
    MODEL,
    PYTORCH,
    WARM_UP,
    Implementation,
    make_batch,
    prepare,
)
from gradwire.bench.namespaces import Rate, limit, places_of
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of, unique
from gradwire.bench.tables import Table, count, format_link, format_number, groups_of, median_of, pivot, speed_up, value
from gradwire.bench.timing import time_in_turn
from gradwire.planner.hook_registry import FIRST_COMPRESSED, label

REFERENCE = "noop"
DEFAULT_HOOKS = (
    *("noop", "none", "fp16", "bf16", "int8", "int6", "int4", "int2", "sign"),
    *("powersgd-r1", "powersgd-r4", "powersgd-r16", "powersgd-r8-int8", "powersgd-r16-int8", "powersgd-r32-int8"),
)
DEFAULT_RATES = ("100mbit", "1gbit", "unlimited")
_PROBE_BYTES = 8_000_000


def measure(hooks: Sequence[str], rates: Sequence[Rate], steps: int, hosts: int, delay_ms: float = 0.0) -> Measured:
    """Step times of each hook at each rate: over a link between hosts, or over loopback."""
    settings = {"hooks": list(hooks), "rates": [rate.name for rate in rates], "steps": steps, "hosts": hosts}
    settings |= {"threads": 1, "delay_ms": delay_ms}
    with places_of(hosts, rates, delay_ms=delay_ms) as places:
        records = launch.run(__name__, settings, places)
    return Measured(settings | {"model": MODEL, "first_compressed_step": FIRST_COMPRESSED}, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    made = make_implementations(settings["hooks"], device)
    return time_steps(made, list(map(Rate.named, settings["rates"])), settings["steps"], settings["hosts"])


def time_steps(
    implementations: Sequence[Implementation], rates: Sequence[Rate], steps: int, hosts: int
) -> list[Record]:
    """Check all gradients, then time all steps. A collective call. Raises RuntimeError if a gradient is wrong."""
    sent_bytes = None if all(rate.is_loopback for rate in rates) else namespaces.sent_bytes
    # The first steps send the most. Where nothing limits the senders, a relay that delays packets loses some.
    limit(max(rates, key=lambda rate: rate.mbit or 0))
    device, first = implementations[0].device, WARM_UP + 1
    prepare(implementations, device)
    batch_of = partial(make_batch, rank=dist.get_rank(), device=device)
    records: list[Record] = []
    for rate in rates:
        limit(rate)
        records += records_of("network", {"rate": rate.name}, "all_reduce", hosts, {Metric.LINK_RATE: _probe(hosts)})
        time_in_turn(implementations, range(first, first + steps), rate.name, batch_of, sent_bytes)
        first += steps
        records += summarize(rate.name, hosts, implementations)
    return records


def make_implementations(hooks: Sequence[str], device: torch.device) -> list[Implementation]:
    """PyTorch's and gradwire's implementation of each hook.

    Among them is noop_hook, on every DDP with the same buckets.
    """
    made = [Implementation(hook, by, device) for hook in unique((REFERENCE, *hooks)) for by in (PYTORCH, GRADWIRE)]
    if any(implementation.one_bucket for implementation in made):
        made.insert(1, Implementation(REFERENCE, PYTORCH, device, one_bucket=True))
    return made


def _probe(hosts: int) -> float:
    """The rate in Mb/s at which each rank sends in a plain all-reduce."""
    tensor = torch.zeros(_PROBE_BYTES // 4)
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return round(2 * (hosts - 1) / hosts * 8e-6 * _PROBE_BYTES / median(times), 1)


def summarize(rate: str, hosts: int, implementations: Sequence[Implementation]) -> list[Record]:
    """Records of all implementations at one rate."""
    noop = {(i.name, i.one_bucket): median(i.seconds) for i in implementations if i.hook == REFERENCE}
    records = []
    for i in implementations:
        case = {"rate": rate, "hook": i.hook, "one_bucket": i.one_bucket}
        metrics: dict[str, Any] = {
            Metric.STEP_MS: percentiles_ms(i.seconds),
            Metric.EXPOSED_MS: round(1e3 * (median(i.seconds) - noop[i.name, i.one_bucket]), 3),
        }
        if i.link_bytes:
            metrics[Metric.SENT_PER_STEP] = median(i.link_bytes)
        records += records_of("network", case, i.name, hosts, metrics)
    return records


def hook_label(record: Record) -> str:
    """The row of a record: its hook, and a row of its own for PyTorch's noop_hook in one bucket."""
    return f"{label(record['hook'])}{', one bucket' if record['hook'] == REFERENCE and record['one_bucket'] else ''}"


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per link rate."""
    facts = records[0].provenance
    settings, result = facts["settings"], []
    groups = groups_of(records, "rate")
    for (rate,), group in groups:
        reached = median_of(group, Metric.LINK_RATE) or 0
        title = f"{Metric.STEP_MS}, {count(settings['hosts'], 'host')}, link: {format_link(rate, settings)} "
        columns = [
            *((name, value(Metric.STEP_MS, name)) for name in (PYTORCH, GRADWIRE)),
            ("speed-up", speed_up(Metric.STEP_MS, PYTORCH, GRADWIRE)),
            *((f"exposed, {name}", value(Metric.EXPOSED_MS, name)) for name in (PYTORCH, GRADWIRE)),
            ("sent per step", value(Metric.SENT_PER_STEP, GRADWIRE)),
        ]
        steps = [record for record in group if record.metric != Metric.LINK_RATE]
        notes = _notes(facts) if rate == groups[-1][0][0] else ()
        names = {"hook": hook_label}
        result.append(pivot(f"{title}(all-reduce reaches {format_number(reached)} Mb/s)", steps, names, columns, notes))
    return result


def _notes(facts: dict[str, Any]) -> list[str]:
    settings = facts["settings"]
    return [
        f"model: {settings['model']}",
        f"step time: forward and backward on the slowest rank, median of {settings['steps']} interleaved steps",
        "speed-up: gradwire's hook on gradwire's DDP over PyTorch's hook on PyTorch's DDP",
        "exposed: step time minus that of noop_hook on the same DDP (ms); includes compression",
        "sent per step: bytes on rank 0's interface, with headers and a barrier",
        BUCKETS_NOTE,
        f"{facts['cpu_count']} CPUs run all {settings['hosts']} hosts, one thread each",
    ]
