"""The report of `gradwire advise` and of ``gradwire run --advise``, in the terminal and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Any

import torch
from rich.console import Console

from gradwire.bench.record import format_bytes
from gradwire.bench.tables import Table, count, format_bandwidth, print_tables
from gradwire.bench.timing import bench_device
from gradwire.planner.accuracy import (
    ACCURACY_NOTE,
    LOSS_GAPS,
    MARK,
    MARK_NOTE,
    accuracy_of,
    is_aggressive,
    measured_accuracy,
)
from gradwire.planner.hook_registry import CAST, HOOKS, PLAIN, display_name
from gradwire.planner.measurement import Measurement
from gradwire.planner.recommend import WORTHWHILE, Advice, Prediction
from gradwire.version import __version__

NOISY = 2.0  # spread of the model's step times above which predictions are not to be trusted
_COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "hook": lambda each: display_name(each.hook) + MARK * is_aggressive(each.hook),
    "step (ms)": lambda each: f"{1e3 * each.step_seconds:.1f}",
    "vs. no hook": lambda each: f"{each.speed_up:.2f}x",
    f"vs. {CAST}": lambda each: f"{each.speed_up_over_bf16:.2f}x",
    "pays below": lambda each: "" if each.hook == PLAIN else _break_even(each.break_even),
    "sent per step": lambda each: format_bytes(each.payload_bytes),
    "extra memory": lambda each: format_bytes(each.memory_bytes),
    "loss gap": lambda each: f"{LOSS_GAPS[each.hook].adamw:+.3f}" if each.hook in LOSS_GAPS else "",
    "with Muon": lambda each: f"{LOSS_GAPS[each.hook].muon:+.3f}" if each.hook in LOSS_GAPS else "",
}
_SCHEMA = 2  # of the JSON file; rises when an entry changes its meaning or goes
_WITH_OPTIMIZER = "step: forward, backward, gradient exchange and optimizer"
_WITHOUT_OPTIMIZER = (
    "step: forward, backward and gradient exchange, without the optimizer. To include it, return (model, loss, "
    "optimizer) from the job"
)


def print_advice(
    measured: Measurement, advice: Advice, seconds: float, console: Console | None = None, price: float | None = None
) -> None:
    """Print the model, the network, the predictions, the recommendation, and the code to register the hook.

    With a ``price`` per GB sent between nodes, also print what the traffic of 1,000 steps costs.
    """
    console = console or Console()
    model, link = measured.model, measured.link
    latency = max(cost.latency for cost in link.costs.values())
    buckets = count(len(model.ready), "bucket")
    how, digits = ("measured", 2) if measured.is_link_measured else ("given", 6)
    bandwidth = format_bandwidth(link.bandwidth, digits)
    optimizer = "" if model.optimizer is None else f"optimizer {1e3 * model.optimizer:.3g} ms, "
    lines = [
        f"Model:    {format_bytes(model.gradient_bytes)} of gradients in {buckets}",
        f"Compute:  forward {1e3 * model.forward:.3g} ms, backward {1e3 * model.backward:.3g} ms, {optimizer}"
        f"with {count(measured.threads, 'CPU thread')}",
        f"Network:  {count(link.world_size, 'rank')} on {count(link.nodes, 'node')}, "
        f"{bandwidth} per {'node' if link.nodes > 1 else 'rank'} {how}",
        f"Latency:  {1e3 * latency:.2g} ms for the smallest collective",
        f"Measured in {seconds:.0f} s.",
    ]
    if model.spread > NOISY:
        lines.append(
            f"NOISE: the slowest step of the model took {model.spread:.2g} times as long as the fastest. Stop other "
            "programs on these machines, and repeat."
        )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    ranked = sorted(advice.predictions, key=lambda each: each.step_seconds)
    styles = ["bold" if each.hook == advice.recommended else "" for each in ranked]
    console.print()
    columns = dict(_COLUMNS)
    if price is not None:
        columns["1,000 steps cost"] = lambda each: f"{price * each.network_bytes / 1e6:,.2f}"
    rows = [[cell(each) for cell in columns.values()] for each in ranked]
    notes = [
        _WITHOUT_OPTIMIZER if model.optimizer is None else _WITH_OPTIMIZER,
        ACCURACY_NOTE,
        *([MARK_NOTE] if any(is_aggressive(each.hook) for each in ranked) else []),
    ]
    print_tables([Table(title="", headers=list(columns), rows=rows, styles=styles, notes=notes)], console)
    console.print(_recommendation(advice), style="bold", highlight=False, markup=False)
    if code := HOOKS[advice.recommended].code:
        console.print(f"\n{code}", highlight=False, markup=False, soft_wrap=True)


def _recommendation(advice: Advice) -> str:
    text = f"{advice.headline}: {advice.reason}."
    if advice.buckets is not None:
        cap_mb, step_seconds = advice.buckets
        text += f" Pass bucket_cap_mb={cap_mb} to DistributedDataParallel: the gradients then travel in fewer "
        text += f"messages, and a step should take {1e3 * step_seconds:.1f} ms."
    if advice.recommended != PLAIN:
        text += f" {accuracy_of(advice.recommended)}"
    fastest = max(advice.predictions, key=lambda each: each.speed_up)
    (recommended,) = [each for each in advice.predictions if each.hook == advice.recommended]
    if is_aggressive(fastest.hook) and fastest.speed_up >= WORTHWHILE * recommended.speed_up:
        why = measured_accuracy(fastest.hook) or "its loss was not measured"
        text += f" {fastest.hook} would be {fastest.speed_up:.2f}x as fast as without a hook, but {why}: compare loss "
        text += "curves before you use it."
    return text


def _break_even(bandwidth: float | None) -> str:
    if bandwidth is None:
        return "never"
    return "always" if math.isinf(bandwidth) else format_bandwidth(bandwidth)


def to_json(measured: Measurement, advice: Advice) -> str:
    """Measurement, predictions and recommendation as JSON.

    The break-even bandwidth is null if a hook never pays off, and "always" if it pays off at every bandwidth.
    """
    predictions = [
        asdict(each)
        | {
            "break_even": "always" if each.break_even == math.inf else each.break_even,
            "loss_gap": LOSS_GAPS[each.hook]._asdict() if each.hook in LOSS_GAPS else None,
            "is_aggressive": is_aggressive(each.hook),
        }
        for each in advice.predictions
    ]
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "gradwire": __version__,
        "torch": torch.__version__,
        "device": str(bench_device()),
        "recommended": advice.recommended,
        "reason": advice.reason,
        "bucket_cap_mb": None if advice.buckets is None else advice.buckets.cap_mb,
        "code": HOOKS[advice.recommended].code,
        "predictions": predictions,
        "measurement": _plain(asdict(measured)),
    }
    return json.dumps(content, indent=1)


def _plain(value: Any) -> Any:
    """Named tuples as objects with their names, members of an enumeration by their names."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
