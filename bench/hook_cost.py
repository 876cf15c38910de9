"""The own cost of a hook: a step with it, minus a step with noop_hook on the same DDP, in the same processes.

One rank over gloo (or NCCL) runs every copy, product and collective of a hook for real, while the wire costs next to
nothing; several ranks share this machine. A round compares one hook on both DDPs with PyTorch's on its own; all of a
round, the steps with noop_hook too, take turns step by step, so that whatever else the machine does falls on all.
`measure` starts the ranks; each runs `main`. The memory of each contender is measured in a process of its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from rich.table import Table

from gradwire.bench.contenders import (
    BUCKETS,
    FIRST_COMPRESSED,
    GRADWIRE,
    GRADWIRE_ON_PYTORCH,
    MODEL,
    PYTORCH,
    WARM_UP,
    Contender,
    make_batch,
    needs_one_bucket,
    provider_label,
)
from gradwire.bench.launch import exit_with_launcher, leave, measured_by
from gradwire.bench.measuring import (
    backend_of,
    bench_device,
    calls_of_driver,
    in_turn,
    peak_memory,
    percentiles_ms,
    slowest,
)
from gradwire.bench.report import add_hooks, bench_table, format_bytes, machine_line

DEFAULT_HOOKS = (
    "noop",
    "allreduce",
    "fp16",
    "bf16",
    "powersgd-r1",
    "powersgd-r4",
    "powersgd-r32",
    "powersgd-r4-bf16",
    "powersgd-r4-alternating",
    "powersgd-r4-batched",
)
MODULE = "gradwire.bench.hook_cost"
QUICK_HOOKS = ("noop", "fp16", "powersgd-r4")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a hook cost on a DDP.

    Attributes:
        ranks: how many took part.
        hook: its name in `gradwire.bench.hooks.HOOKS`.
        provider: whose hook, and on whose DDP.
        one_bucket: whether the model was one bucket; else buckets of 25 MiB.
        step_ms: a forward and a backward on the slowest rank of each step: p20, p50, p80.
        host_ms: CPU time of a step in all threads of rank 0's process, until the backward returns, the median.
        launches: kernels and copies that rank 0 hands to its GPU in a step; None without one.
        synchronizations: how often the host waits for the GPU in a step; None without one.
        noop_ms: the same with noop_hook on the same DDP with the same buckets, in the same round.
        own_ms: the difference of the medians.
        step_vs_pytorch: the median step in units of that of PyTorch's hook; None for that itself.
        own_vs_pytorch: the same of ``own_ms``; None also where there is no cost.
    """

    ranks: int
    hook: str
    provider: str
    one_bucket: bool
    step_ms: dict[str, float]
    host_ms: float
    launches: int | None
    synchronizations: int | None
    noop_ms: dict[str, float]
    own_ms: float
    step_vs_pytorch: float | None
    own_vs_pytorch: float | None


def measure(hooks: Sequence[str], ranks: Sequence[int], steps: int, threads: int) -> dict[str, Any]:
    """The costs of each hook, after a check of its gradients, and its memory.

    Args:
        hooks: names in `HOOKS`.
        ranks: numbers of ranks, one after another.
        steps: timed steps of each contender.
        threads: of each rank, for the arithmetic of the CPU.

    Returns:
        What `cost_tables` takes and JSON holds: the settings, a list of `Cost` as dictionaries, and the peak memory by
        hook and provider.

    Raises:
        LaunchError: a rank failed, or a hook's gradients are wrong.
    """
    settings = {"threads": threads, "steps": steps}
    costs = [cost for count in ranks for cost in measured_by(MODULE, settings | {"hooks": list(hooks)}, count)]
    peaks: dict[str, dict[str, int]] = {}
    for hook in track(dict.fromkeys(("noop", *hooks)), description=f"{'memory':<24}"):
        peaks[hook] = {
            provider: measured_by(MODULE, settings | {"weigh": [hook, provider]}, 1)
            for provider in (GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH)
        }
    return {
        "model": MODEL,
        "steps": steps,
        "threads": threads,
        "first_compressed_step": FIRST_COMPRESSED,
        "costs": costs,
        "peak_memory": peaks,
    }


def main(settings: dict[str, Any]) -> None:
    """One rank."""
    exit_with_launcher()
    torch.set_num_threads(settings["threads"])
    device = bench_device()
    dist.init_process_group(backend_of(device))
    measured: Any
    if "weigh" in settings:
        hook, provider = settings["weigh"]
        measured = _weigh(hook, provider, device)
    else:
        rounds = (_round(hook, settings["steps"], device) for hook in settings["hooks"])
        measured = [asdict(cost) for costs in rounds for cost in costs]
    if dist.get_rank() == 0:
        Path(settings["path"]).write_text(json.dumps(measured))
    dist.destroy_process_group()


def _weigh(hook: str, provider: str, device: torch.device) -> int:
    """The largest number of bytes that a process held in training steps."""
    contender = Contender(hook, provider, device, provider == PYTORCH and needs_one_bucket(hook, device))
    for step in range(WARM_UP):
        contender.step(make_batch(step, 0, device))
    return peak_memory(device)


def _round(hook: str, steps: int, device: torch.device) -> list[Cost]:
    one_bucket = needs_one_bucket(hook, device)
    references = {(kind, False): Contender("noop", kind, device) for kind in (PYTORCH, GRADWIRE)}
    if one_bucket:
        references[PYTORCH, True] = Contender("noop", PYTORCH, device, one_bucket=True)
    contenders = [
        Contender(hook, GRADWIRE, device),
        Contender(hook, GRADWIRE_ON_PYTORCH, device),
        Contender(hook, PYTORCH, device, one_bucket=one_bucket),
    ]
    runners = [*references.values(), *contenders]
    rank = dist.get_rank()
    for step in range(WARM_UP):
        for runner in runners:
            runner.step(make_batch(step, rank, device))
    for runner in runners:
        runner.check(make_batch(WARM_UP, rank, device))
    for runner in runners:
        runner.host_seconds = []
    title = f"{hook}, {dist.get_world_size()}"
    for step in track(range(steps), description=f"{title:<24}", disable=rank != 0):
        batch = make_batch(WARM_UP + 1 + step, rank, device)
        for runner in in_turn(runners, step):
            dist.barrier()
            runner.seconds.append(runner.step(batch))
    for runner in runners:
        runner.seconds = slowest(runner.seconds)
    for contender in contenders:
        contender.calls = calls_of_driver(partial(contender.step, batch), device)
    costs = summarize(dist.get_world_size(), contenders, references)
    del runners, contenders, references
    gc.collect()  # a DDP is part of a cycle, and a round holds gigabytes
    return costs


def summarize(ranks: int, contenders: Sequence[Contender], references: dict[tuple[str, bool], Contender]) -> list[Cost]:
    """The costs of contenders of one hook, of which the last is PyTorch's.

    Args:
        ranks: how many took part.
        contenders: with their times.
        references: noop_hook on each DDP that they run on, by its provider and whether it has one bucket.
    """
    timed = []
    for contender in contenders:
        ddp = GRADWIRE if contender.provider == GRADWIRE else PYTORCH
        step_ms = percentiles_ms(contender.seconds)
        noop_ms = percentiles_ms(references[ddp, contender.one_bucket].seconds)
        timed.append((contender, step_ms, noop_ms, round(step_ms["p50"] - noop_ms["p50"], 3)))
    _, their_step_ms, _, their_own_ms = timed[-1]

    def cost_of(contender: Contender, step_ms: dict[str, float], noop_ms: dict[str, float], own_ms: float) -> Cost:
        is_ours, is_cost = contender.provider != PYTORCH, min(own_ms, their_own_ms) > 0
        return Cost(
            ranks=ranks,
            hook=contender.hook,
            provider=contender.provider,
            one_bucket=contender.one_bucket,
            step_ms=step_ms,
            host_ms=percentiles_ms(contender.host_seconds)["p50"],
            launches=contender.calls.launches if contender.calls is not None else None,
            synchronizations=contender.calls.synchronizations if contender.calls is not None else None,
            noop_ms=noop_ms,
            own_ms=own_ms,
            step_vs_pytorch=round(step_ms["p50"] / their_step_ms["p50"], 3) if is_ours else None,
            own_vs_pytorch=round(own_ms / their_own_ms, 3) if is_ours and is_cost else None,
        )

    return [cost_of(*row) for row in timed]


def cost_tables(measured: dict[str, Any], facts: dict[str, Any]) -> Iterator[Table]:
    """Three rows for each hook, in a table for each number of ranks; then one of what else hooks take."""
    for ranks, of_ranks in itertools.groupby(measured["costs"], key=itemgetter("ranks")):
        title = f"Own cost of hooks, ranks: {ranks}\n{measured['model']}"
        headers = ("hook", "ms per step", "vs\nPyT.", "own\nms", "vs\nPyT.")
        table = bench_table(title, None, headers)
        add_hooks(table, of_ranks, _row)
        yield table
    yield _resources_table(measured, facts)


def _resources_table(measured: dict[str, Any], facts: dict[str, Any]) -> Table:
    """Host time, launches and memory of each hook."""
    headers = ("hook", "host\nms", "launches", "syncs", "memory")
    table = bench_table("What a step takes besides time", _caption(measured, facts), headers)
    peaks = measured["peak_memory"]
    ranks = measured["costs"][0]["ranks"]
    costs = [cost for cost in measured["costs"] if cost["ranks"] == ranks]

    def row(cost: dict[str, Any]) -> tuple[str, ...]:
        beyond = peaks[cost["hook"]][cost["provider"]] - peaks["noop"][GRADWIRE]
        return (
            f"  {provider_label(cost['hook'], cost['provider'], cost['one_bucket'])}",
            f"{cost['host_ms']:.1f}",
            str(cost["launches"]) if cost["launches"] is not None else "-",
            str(cost["synchronizations"]) if cost["synchronizations"] is not None else "-",
            format_bytes(max(beyond, 0)),
        )

    add_hooks(table, costs, row)
    return table


def _row(cost: dict[str, Any]) -> tuple[str, ...]:
    step_ms = cost["step_ms"]
    return (
        f"  {provider_label(cost['hook'], cost['provider'], cost['one_bucket'])}",
        f"{step_ms['p50']:.1f} ({step_ms['p20']:.0f}-{step_ms['p80']:.0f})",
        _ratio(cost["step_vs_pytorch"]),
        f"{cost['own_ms']:.1f}",
        _ratio(cost["own_vs_pytorch"]),
    )


def _ratio(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


def _caption(measured: dict[str, Any], facts: dict[str, Any]) -> str:
    return (
        f"ms: forward and backward, median (20th-80th percentile) of {measured['steps']}, in turns\n"
        "ms per step: on the slowest rank\n"
        "own: median beyond that with noop_hook on the same DDP in the same round;\n"
        "  the rows of noop itself show the noise. gradwire's DDP starts from less,\n"
        "  because with noop_hook it copies nothing\n"
        "vs PyT.: in units of the same for PyTorch's hook, the last row of each round\n"
        "host: CPU time of all threads of rank 0; launches, syncs: of and for a GPU\n"
        "memory: peak of a process (on a GPU, of tensors) beyond noop_hook on gradwire's DDP\n"
        f"{BUCKETS}\n"
        f"{machine_line(facts)}"
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    leave()
