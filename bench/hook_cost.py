"""The own cost of a hook: a step with it, minus a step with noop_hook on the same DDP, in one process.

One rank over gloo (or NCCL) runs every copy, product and collective of a hook for real, while the wire costs next to
nothing. A round compares one hook on both DDPs with PyTorch's on its own; all of a round, the steps with noop_hook too,
take turns step by step, so that whatever else the machine does falls on all.
"""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

import torch
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
    provider_label,
)
from gradwire.bench.hooks import HOOKS
from gradwire.bench.measuring import percentiles_ms, world_of_one
from gradwire.bench.report import bench_table, machine_line

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
QUICK_HOOKS = ("noop", "fp16", "powersgd-r4")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a hook cost on a DDP.

    Attributes:
        hook: its name in `gradwire.bench.hooks.HOOKS`.
        provider: whose hook, and on whose DDP.
        one_bucket: whether the model was one bucket; else buckets of 25 MiB.
        step_ms: a forward and a backward: p20, p50, p80.
        noop_ms: the same with noop_hook on the same DDP with the same buckets, in the same round.
        own_ms: the difference of the medians.
        step_vs_pytorch: the median step in units of that of PyTorch's hook; None for that itself.
        own_vs_pytorch: the same of ``own_ms``; None also where there is no cost.
    """

    hook: str
    provider: str
    one_bucket: bool
    step_ms: dict[str, float]
    noop_ms: dict[str, float]
    own_ms: float
    step_vs_pytorch: float | None
    own_vs_pytorch: float | None


def measure(hooks: Sequence[str], steps: int, threads: int, device: torch.device) -> dict[str, Any]:
    """The costs of each hook, after a check of its gradients.

    Args:
        hooks: names in `HOOKS`.
        steps: timed steps of each contender.
        threads: for the arithmetic of the CPU.
        device: where to measure.

    Returns:
        What `cost_table` takes and JSON holds: the settings, and a list of `Cost` as dictionaries.

    Raises:
        RuntimeError: a hook's gradients are wrong.
    """
    with world_of_one(device, threads):
        costs = [cost for hook in hooks for cost in _round(hook, steps, device)]
    return {
        "model": MODEL,
        "steps": steps,
        "threads": threads,
        "first_compressed_step": FIRST_COMPRESSED,
        "costs": [asdict(cost) for cost in costs],
    }


def _round(hook: str, steps: int, device: torch.device) -> list[Cost]:
    peer = HOOKS[hook].peer
    assert peer is not None
    references = {(kind, False): Contender("noop", kind, device) for kind in (PYTORCH, GRADWIRE)}
    if peer.one_bucket:
        references[PYTORCH, True] = Contender("noop", PYTORCH, device, one_bucket=True)
    contenders = [
        Contender(hook, GRADWIRE, device),
        Contender(hook, GRADWIRE_ON_PYTORCH, device),
        Contender(hook, PYTORCH, device, one_bucket=peer.one_bucket),
    ]
    runners = [*references.values(), *contenders]
    for step in range(WARM_UP):
        for runner in runners:
            runner.step(make_batch(step, 0, device))
    for runner in runners:
        runner.check(make_batch(WARM_UP, 0, device))
    for step in track(range(steps), description=f"{hook:<24}"):
        batch = make_batch(WARM_UP + 1 + step, 0, device)
        for runner in runners:
            runner.seconds.append(runner.step(batch))
    costs = summarize(contenders, references)
    del runners, contenders, references
    gc.collect()  # a DDP is part of a cycle, and a round holds gigabytes
    return costs


def summarize(contenders: Sequence[Contender], references: dict[tuple[str, bool], Contender]) -> list[Cost]:
    """The costs of contenders of one hook, of which the last is PyTorch's.

    Args:
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
            hook=contender.hook,
            provider=contender.provider,
            one_bucket=contender.one_bucket,
            step_ms=step_ms,
            noop_ms=noop_ms,
            own_ms=own_ms,
            step_vs_pytorch=round(step_ms["p50"] / their_step_ms["p50"], 3) if is_ours else None,
            own_vs_pytorch=round(own_ms / their_own_ms, 3) if is_ours and is_cost else None,
        )

    return [cost_of(*row) for row in timed]


def cost_table(measured: dict[str, Any], provenance: dict[str, Any]) -> Table:
    """Three rows for each hook, with what the numbers mean below."""
    title = f"Own cost of hooks, one rank\n{measured['model']}"
    headers = ("hook", "ms per step", "vs\nPyT.", "own\nms", "vs\nPyT.")
    table = bench_table(title, _caption(measured, provenance), headers)
    for hook, costs in itertools.groupby(measured["costs"], key=itemgetter("hook")):
        table.add_row(hook, style="bold")
        for cost in costs:
            table.add_row(*_row(cost))
        table.add_section()
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
        "own: median beyond that with noop_hook on the same DDP in the same round;\n"
        "  the rows of noop itself show the noise. gradwire's DDP starts from less,\n"
        "  because with noop_hook it copies nothing\n"
        "vs PyT.: in units of the same for PyTorch's hook, the last row of each round\n"
        f"{BUCKETS}\n"
        f"{machine_line(facts)}"
    )
