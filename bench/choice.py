"""The table that helps to choose a hook: step times of `network` by link rate, steps to the target of `converge`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradwire.bench.converge import target_of, to_target
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import SENT_PER_STEP, STEP_MS, STEPS, Record, unique
from gradwire.bench.tables import Table, count, format_rate, median_of
from gradwire.planner.hook_registry import display_name

LEFT_OUT = ("noop",)  # trains nothing


def tables(network: Sequence[Record], converge: Sequence[Record]) -> list[Table]:
    """A row per hook of gradwire: bytes, speed-up at each link rate, further steps."""
    rates = unique(record["rate"] for record in network)
    rows = []
    for hook in unique(record["hook"] for record in network if "hook" in record.case):
        if hook in LEFT_OUT:
            continue
        sent, plain_sent = (_of(network, rates[0], name, GRADWIRE, SENT_PER_STEP) for name in (hook, "none"))
        speed_ups = [
            _of(network, rate, "none", PYTORCH, STEP_MS) / _of(network, rate, hook, GRADWIRE, STEP_MS) for rate in rates
        ]
        rows.append(
            [
                display_name(hook),
                f"{sent / plain_sent:.1%}",
                *(f"{speed_up:.2f}x" for speed_up in speed_ups),
                _further_steps(converge, hook),
            ]
        )
    facts, trained = network[0].provenance["settings"], converge[0].provenance["settings"]
    notes = [
        f"sent: bytes per step, relative to no hook, at {format_rate(rates[0])}",
        f"speed-up: of forward and backward, over PyTorch's DDP without a hook; {count(facts['hosts'], 'host')}, "
        f"{facts['model']}",
        f"steps to target: relative to no hook, until {target_of(trained)}; {trained['parameters']:,} parameters; "
        "empty for hooks that were not trained",
    ]
    headers = ["hook", "sent", *(f"speed-up, {format_rate(rate)}" for rate in rates), "steps to target"]
    return [Table(title="Hooks of gradwire by link rate", headers=headers, rows=rows, notes=notes)]


def _of(network: Sequence[Record], rate: str, hook: str, implementation: str, metric: str) -> float:
    group = [r for r in network if r["rate"] == rate and r.case.get("hook") == hook]
    found = median_of(group, metric, implementation)
    assert found is not None, f"{metric} of {hook} at {rate}"
    return found


def _further_steps(converge: Sequence[Record], hook: str) -> str:
    """Steps to the target in units of those without a hook, medians over the seeds."""
    steps = [
        to_target([r for r in converge if r["hook"] == name and r.implementation == GRADWIRE], STEPS)
        for name in (hook, "none")
    ]
    return f"{median(steps[0]) / median(steps[1]):.2f}x" if steps[0] and steps[1] else ""
