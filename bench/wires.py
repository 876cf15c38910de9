"""The table that helps to choose a wire format: bits and error of `rounding`, steps and bytes of `converge`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradwire.bench.converge import target_of, to_target
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.record import BITS, RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS, SENT, STEPS, TARGET_S, Record
from gradwire.bench.rounding import RING, STEPS_WORLD_SIZE, TWO_SHOT
from gradwire.bench.tables import Table, count, find, format_bytes, format_number, format_rate
from gradwire.planner.hook_registry import display_name

# By the hook of `converge`, the wire format and the all-reduce of `rounding`.
WIRES = {
    "none": ("fp32", RING),
    "fp16": ("fp16", RING),
    "int8": ("int8", TWO_SHOT),
    "int4": ("int4", TWO_SHOT),
    "int2": ("int2", TWO_SHOT),
}


def tables(converge: Sequence[Record], rounding: Sequence[Record]) -> list[Table]:
    """A row per hook: what its wire format costs and what it saves."""
    trained, measured = converge[0].provenance["settings"], rounding[0].provenance["settings"]
    rows = []
    for hook, (wire, exchange) in WIRES.items():
        steps, seconds, sent = (_at_target(converge, hook, metric) for metric in (STEPS, TARGET_S, SENT))
        of_wire = [r for r in rounding if (r["wire"], r.implementation) == (wire, exchange)]
        of_ranks = [r for r in of_wire if r.ranks == STEPS_WORLD_SIZE]
        errors = [find(of_ranks, metric) for metric in (RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS)]
        bits = find(of_wire, BITS)
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
        f"error: of the mean gradient of {ranks}, relative to its norm; normally distributed gradients",
        f"error, {measured['steps']} steps: of the mean over as many steps, with error feedback if quantised",
    ]
    return [Table(title="Wire formats", headers=headers, rows=rows, notes=notes)]


def _at_target(records: Sequence[Record], hook: str, metric: str) -> float:
    """The median over the seeds of gradwire's trainings; NaN if one missed the target."""
    group = [r for r in records if r["hook"] == hook and r.implementation == GRADWIRE]
    values = to_target(group, metric)
    return median(values) if values else float("nan")
