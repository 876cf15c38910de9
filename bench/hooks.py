"""The own cost of a hook: a step with it, minus a step with noop_hook on the same DDP, in the same processes.

One rank over gloo (or NCCL) runs every copy, product and collective of a hook, while communication takes next to no
time; several ranks share this machine. A round compares one hook on both DDPs with PyTorch's on its own. All
implementations of a round, noop_hook included, take turns step by step, so that background load falls on all of them.
`measure` starts the ranks; each runs `main`. Peak memory is measured in one process per implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track

from gradwire.bench import launch
from gradwire.bench.implementations import (
    BUCKETS_NOTE,
    GRADWIRE,
    GRADWIRE_ON_PYTORCH,
    MODEL,
    PYTORCH,
    WARM_UP,
    Implementation,
    make_batch,
    prepare,
)
from gradwire.bench.record import Measured, Metric, Record, percentiles_ms, records_of, unique
from gradwire.bench.tables import Table, beyond, count, groups_of, pivot, speed_up, value
from gradwire.bench.timing import bench_device, driver_calls, peak_memory, time_in_turn
from gradwire.planner.hook_registry import FIRST_COMPRESSED, HOOKS, STAR_NOTE, label

LEFT_OUT = ("none", "scaled-fp16", "sign", "powersgd-r16")  # by default
DEFAULT_HOOKS = tuple(hook for hook in HOOKS if hook not in LEFT_OUT)


def measure(hooks: Sequence[str], ranks: Sequence[int], steps: int, threads: int) -> Measured:
    """Costs of each hook, after a check of its gradients, and its peak memory."""
    device = bench_device()
    settings = {"model": MODEL, "steps": steps, "threads": threads, "first_compressed_step": FIRST_COMPRESSED}
    # New processes for each hook: PyTorch's DDP does not free all of a model that had one.
    runs = [(size, settings | {"hook": hook}) for size in ranks for hook in hooks]
    records = [record for size, hook_settings in runs for record in launch.run(__name__, hook_settings, size, device)]
    for hook in track(unique(("noop", *hooks)), description=f"{'memory':<24}"):
        for name in (GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH):
            records += launch.run(__name__, settings | {"memory_of": [hook, name]}, 1, device)
    return Measured(settings, records)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    if "memory_of" in settings:
        hook, name = settings["memory_of"]
        return measure_memory(hook, name, device)
    return measure_round(settings["hook"], settings["steps"], device)


def measure_memory(hook: str, name: str, device: torch.device) -> list[Record]:
    implementation = Implementation(hook, name, device)
    for step in range(WARM_UP):
        implementation.step(make_batch(step, 0, device))
    return records_of("hooks", {"hook": hook}, name, 1, {Metric.MEMORY: peak_memory(device)})


def measure_round(hook: str, steps: int, device: torch.device) -> list[Record]:
    """Check and time one hook on both DDPs and PyTorch's hook on PyTorch's DDP, in turn with noop_hook."""
    references = {(name, False): Implementation("noop", name, device) for name in (PYTORCH, GRADWIRE)}
    implementations = [Implementation(hook, name, device) for name in (GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH)]
    if implementations[-1].one_bucket:
        references[PYTORCH, True] = Implementation("noop", PYTORCH, device, one_bucket=True)
    everything = [*references.values(), *implementations]
    prepare(everything, device)
    title = f"{hook}, {count(dist.get_world_size(), 'rank')}"
    batch_of = partial(make_batch, rank=dist.get_rank(), device=device)
    time_in_turn(everything, range(WARM_UP + 1, WARM_UP + 1 + steps), title, batch_of)
    batch = batch_of(WARM_UP + 1 + steps)
    for implementation in implementations:
        implementation.calls = driver_calls(partial(implementation.backward, batch), device)
    return summarize(dist.get_world_size(), implementations, references)


def summarize(
    ranks: int, implementations: Sequence[Implementation], references: dict[tuple[str, bool], Implementation]
) -> list[Record]:
    """Records of the implementations of one hook."""
    records = []
    for implementation in implementations:
        ddp = GRADWIRE if implementation.name == GRADWIRE else PYTORCH
        step_ms = percentiles_ms(implementation.seconds)
        noop_ms = percentiles_ms(references[ddp, implementation.one_bucket].seconds)
        metrics: dict[str, Any] = {
            Metric.STEP_MS: step_ms,
            Metric.NOOP_STEP_MS: noop_ms,
            Metric.OWN_MS: round(step_ms["p50"] - noop_ms["p50"], 4),
            Metric.HOST_MS: percentiles_ms(implementation.host_seconds[-len(implementation.seconds) :])["p50"],
        }
        if implementation.calls is not None:
            metrics |= {
                Metric.LAUNCHES: implementation.calls.launches,
                Metric.SYNCHRONIZATIONS: implementation.calls.synchronizations,
            }
        case = {"hook": implementation.hook, "one_bucket": implementation.one_bucket}
        records += records_of("hooks", case, implementation.name, ranks, metrics)
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """Own cost and step time, a table per world size; then host time, driver calls and memory."""
    names = {"hook": lambda record: label(record["hook"])}
    timed = [record for record in records if record.metric != Metric.MEMORY]
    result = []
    for (ranks,), group in groups_of(timed, "ranks"):
        columns = [
            *((name, value(Metric.OWN_MS, name)) for name in (PYTORCH, GRADWIRE_ON_PYTORCH, GRADWIRE)),
            ("speed-up", _own_speed_up),
            ("step time (ms), gradwire", value(Metric.STEP_MS, GRADWIRE)),
            ("speed-up of the step", speed_up(Metric.STEP_MS, PYTORCH, GRADWIRE)),
        ]
        result.append(pivot(f"Own cost of hooks (ms), {count(ranks, 'rank')}", group, names, columns))
    has_calls = any(record.metric == Metric.LAUNCHES for record in records)
    fewest = [record for record in records if record.ranks == records[0].ranks or record.metric == Metric.MEMORY]
    noop = next(
        record.p50 for record in records if record.metric == Metric.MEMORY and record.implementation == GRADWIRE
    )
    columns = [
        *((f"host time (ms), {name}", value(Metric.HOST_MS, name)) for name in (PYTORCH, GRADWIRE)),
        *((f"memory, {name}", beyond(Metric.MEMORY, name, noop or 0)) for name in (PYTORCH, GRADWIRE)),
    ]
    title = f"Host time and peak memory of a step, {count(records[0].ranks, 'rank')}"
    result.append(pivot(title, fewest, names, columns, () if has_calls else _notes(records)))
    if has_calls:
        calls = [
            (f"{m}, {name}", value(m, name))
            for m in (Metric.LAUNCHES, Metric.SYNCHRONIZATIONS)
            for name in (PYTORCH, GRADWIRE)
        ]
        result.append(pivot("Driver calls of a step", fewest, names, calls, _notes(records)))
    return result


def _own_speed_up(group: Sequence[Record]) -> str:
    # Of noop, nothing but noise is left.
    return "" if group[0]["hook"] == "noop" else speed_up(Metric.OWN_MS, PYTORCH, GRADWIRE)(group)


def _notes(records: Sequence[Record]) -> list[str]:
    settings = records[0].provenance["settings"]
    return [
        f"model: {settings['model']}",
        f"step time: forward and backward on the slowest rank, median of {settings['steps']} interleaved steps",
        "own cost: median step time minus that of noop_hook on the same DDP in the same round; the row of noop shows "
        "the noise. With noop_hook, PyTorch's DDP copies all gradients and gradwire's none, so own cost includes the "
        "copy on gradwire's DDP only",
        "speed-up: gradwire's hook on gradwire's DDP over PyTorch's hook on PyTorch's DDP",
        "host time: CPU time of all threads of rank 0 until the backward returns",
        "launches: kernels, copies and fills handed to the GPU. Host waits: calls that wait for the "
        "device, a stream or an event",
        "memory: peak memory of a process (on a GPU, of its tensors) minus that with noop_hook on gradwire's DDP",
        BUCKETS_NOTE,
        STAR_NOTE,
    ]
