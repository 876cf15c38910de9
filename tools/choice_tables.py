"""Tables that help to choose, from the results of several benchmarks: hooks by link rate, and wire formats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradwire.bench.converge import target_of, to_target
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Metric, Record, format_bytes, unique
from gradwire.bench.tables import Table, count, find, format_number, format_rate, median_of
from gradwire.planner.hook_registry import display_name
from tools.rounding import BITS, RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS, RING, STEPS_WORLD_SIZE, TWO_SHOT

LEFT_OUT = ("noop",)  # trains nothing
# By the hook of `converge`, the wire format and the all-reduce of `rounding`.
WIRES = {
    "none": ("fp32", RING),
    "fp16": ("fp16", RING),
    "int8": ("int8", TWO_SHOT),
    "int4": ("int4", TWO_SHOT),
    "int2": ("int2", TWO_SHOT),
}


def hooks(network: Sequence[Record], converge: Sequence[Record]) -> list[Table]:
    """A row per hook of gradwire: bytes, speed-up at each link rate, further steps."""
    rates = unique(record["rate"] for record in network)
    rows = []
    for hook in unique(record["hook"] for record in network if "hook" in record.case):
        if hook in LEFT_OUT:
            continue
        sent, plain_sent = (_of(network, rates[0], name, GRADWIRE, Metric.SENT_PER_STEP) for name in (hook, "none"))
        speed_ups = [
            _of(network, rate, "none", PYTORCH, Metric.STEP_MS) / _of(network, rate, hook, GRADWIRE, Metric.STEP_MS)
            for rate in rates
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
        f"speed-up: forward and backward, compared with PyTorch's DDP without a hook; "
        f"{count(facts['hosts'], 'host')}, {facts['model']}",
        f"steps to target: number of steps relative to no hook, until {target_of(trained)}; "
        f"{trained['parameters']:,} parameters; empty for hooks that were not trained",
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
        to_target([r for r in converge if r["hook"] == name and r.implementation == GRADWIRE], Metric.STEPS)
        for name in (hook, "none")
    ]
    return f"{median(steps[0]) / median(steps[1]):.2f}x" if steps[0] and steps[1] else ""


def wire_formats(converge: Sequence[Record], rounding: Sequence[Record]) -> list[Table]:
    """A row per hook: what its wire format costs and what it saves."""
    trained, measured = converge[0].provenance["settings"], rounding[0].provenance["settings"]
    rows = []
    for hook, (wire, exchange) in WIRES.items():
        steps, seconds, sent = (
            _at_target(converge, hook, metric) for metric in (Metric.STEPS, Metric.TARGET_S, Metric.SENT)
        )
        wire_records = [r for r in rounding if (r["wire"], r.implementation) == (wire, exchange)]
        world_records = [r for r in wire_records if r.ranks == STEPS_WORLD_SIZE]
        errors = [find(world_records, metric) for metric in (RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS)]
        bits = find(wire_records, BITS)
        assert bits is not None and bits.p50 is not None
        rows.append(
            [
                display_name(hook),
                format_number(bits.p50),
                format_number(steps),
                format_number(seconds),
                format_bytes(sent),
                *("" if error is None or error.p50 is None else format_number(100 * error.p50) for error in errors),
            ]
        )
    ranks = count(STEPS_WORLD_SIZE, "rank")
    headers = [
        "hook",
        "bits per element",
        "steps",
        "time to target (s)",
        "sent",
        "error (%)",
        f"error, {measured['steps']} steps (%)",
    ]
    notes = [
        f"steps, time and bytes until {target_of(trained)}: {trained['parameters']:,} parameters, "
        f"{count(trained['hosts'], 'host')} at {format_rate(trained['rate'])}, medians over the seeds",
        f"error: relative error of the mean gradient of {ranks}; normally distributed gradients",
        f"error, {measured['steps']} steps: relative error of the mean over these steps; with error feedback if "
        "quantized",
    ]
    return [Table(title="Wire formats", headers=headers, rows=rows, notes=notes)]


def _at_target(records: Sequence[Record], hook: str, metric: str) -> float:
    """The median over the seeds of gradwire's trainings; NaN if one missed the target."""
    group = [r for r in records if r["hook"] == hook and r.implementation == GRADWIRE]
    values = to_target(group, metric)
    return median(values) if values else float("nan")
