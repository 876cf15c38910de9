"""Tables that help to choose, from the results of several benchmarks: hooks by speed and loss, and wire formats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gradwire.bench.converge import compressed_step_ms
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Metric, Record, unique
from gradwire.bench.tables import Table, count, find, format_number, format_rate, gap, median_of
from gradwire.bench.tasks import OPTIMIZERS, TRAINED_HOOKS
from gradwire.planner.hook_registry import display_name
from tools.rounding import BITS, GAIN, NORMAL, RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS, RING, STEPS_WORLD_SIZE, TWO_SHOT

LEFT_OUT = ("noop",)  # trains nothing
# By the hook of `long_runs`, the wire format and the all-reduce of `rounding`.
WIRES = {
    "none": ("fp32", RING),
    "int8": ("int8", TWO_SHOT),
    "int6": ("int6", TWO_SHOT),
    "int4": ("int4", TWO_SHOT),
    "int2": ("int2", TWO_SHOT),
    "sign": ("sign", TWO_SHOT),
}


def leading(converge: Sequence[Record], long_runs: Sequence[Record]) -> list[Table]:
    """A row per hook: step time over a slow link, and the loss after a long training."""
    step_ms = {}
    for record in converge:
        key = record["hook"], record.implementation
        step_ms[key] = compressed_step_ms([r for r in converge if (r["hook"], r.implementation) == key])
    plain_ms = step_ms["none", PYTORCH]
    rows = []
    for (hook, by), milliseconds in step_ms.items():
        if milliseconds is None or plain_ms is None or (hook == "none") == (by == GRADWIRE):
            continue
        if loss := _loss(long_runs, hook):
            rows.append([display_name(hook), f"{milliseconds:.0f}", f"{plain_ms / milliseconds:.1f}x", loss])
    trained = converge[0].provenance["settings"]
    headers = ["hook", "step time (ms)", "speed-up", _loss_header(long_runs)]
    notes = [
        f"step time: GPT with {trained['parameters']:,} parameters, {count(trained['hosts'], 'host')} with one rank "
        f"each, link: {format_rate(trained['rate'])}; speed-up: compared with PyTorch's DDP without a hook",
        _loss_note(long_runs),
    ]
    return [Table(title="Speed and loss of hooks", headers=headers, rows=rows, notes=notes)]


def hooks(network: Sequence[Record], long_runs: Sequence[Record]) -> list[Table]:
    """A row per hook of gradwire: bytes, speed-up at each link rate, loss after a long training."""
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
                _loss(long_runs, hook),
            ]
        )
    facts = network[0].provenance["settings"]
    notes = [
        f"sent: bytes per step, relative to no hook, at {format_rate(rates[0])}",
        f"speed-up: forward and backward, compared with PyTorch's DDP without a hook; "
        f"{count(facts['hosts'], 'host')}, {facts['model']}",
        f"{_loss_note(long_runs)}; empty for hooks that were not trained",
    ]
    headers = ["hook", "sent", *(f"speed-up, {format_rate(rate)}" for rate in rates), _loss_header(long_runs)]
    return [Table(title="Hooks of gradwire by link rate", headers=headers, rows=rows, notes=notes)]


def _of(network: Sequence[Record], rate: str, hook: str, implementation: str, metric: str) -> float:
    group = [r for r in network if r["rate"] == rate and r.case.get("hook") == hook]
    found = median_of(group, metric, implementation)
    assert found is not None, f"{metric} of {hook} at {rate}"
    return found


def optimizers(long_runs: Sequence[Record]) -> list[Table]:
    """A row per hook that was trained with several optimizers: the loss after a long training with each."""
    names = unique(record["optimizer"] for record in long_runs)
    hooks = [hook for hook in TRAINED_HOOKS if hook in {r["hook"] for r in long_runs if r["optimizer"] != names[0]}]
    rows = [[display_name(hook), *(_loss(long_runs, hook, optimizer) for optimizer in names)] for hook in hooks]
    facts = long_runs[0].provenance["settings"]
    title = f"Loss after {long_runs[0]['steps']:,} steps by optimizer"
    notes = [
        f"training loss of a GPT with {facts['parameters']:,} parameters, {count(long_runs[0].ranks, 'rank')}: no "
        "hook's, and for the others the difference to no hook with the same seed (nats; range over the seeds)"
    ]
    return [Table(title=title, headers=["hook", *(OPTIMIZERS[name] for name in names)], rows=rows, notes=notes)]


def _loss(long_runs: Sequence[Record], hook: str, optimizer: str = "adamw") -> str:
    """The training loss after trainings with a hook of gradwire: no hook's own, else the difference to it."""
    by = PYTORCH if hook == "none" else GRADWIRE
    trained = [record for record in long_runs if record["optimizer"] == optimizer]
    group = [record for record in trained if (record["hook"], record.implementation) == (hook, by)]
    return gap(trained, Metric.TRAINING_LOSS, -1)(group) if group else ""


def _loss_header(long_runs: Sequence[Record]) -> str:
    return f"loss after {long_runs[0]['steps']:,} steps"


def _loss_note(long_runs: Sequence[Record]) -> str:
    facts = long_runs[0].provenance["settings"]
    return (
        f"loss: training loss of a GPT with {facts['parameters']:,} parameters, AdamW, "
        f"{count(long_runs[0].ranks, 'rank')}: no hook's, and for the others the difference to no hook with the same "
        "seed (nats; range over the seeds)"
    )


def wire_formats(long_runs: Sequence[Record], rounding: Sequence[Record]) -> list[Table]:
    """A row per wire format: bits, the loss after a long training, errors and gain."""
    measured = rounding[0].provenance["settings"]
    rows = []
    for hook, (wire, exchange) in WIRES.items():
        own = [r for r in rounding if (r["wire"], r.implementation) == (wire, exchange)]
        errors = [
            find([r for r in own if r.ranks == STEPS_WORLD_SIZE], metric)
            for metric in (RELATIVE_ERROR, RELATIVE_ERROR_OF_STEPS)
        ]
        gains = [r.p50 for r in own if r.metric == GAIN and r["gradients"] != NORMAL and r.p50 is not None]
        bits = find(own, BITS)
        assert bits is not None and bits.p50 is not None
        rows.append(
            [
                display_name(hook),
                format_number(bits.p50),
                _loss(long_runs, hook),
                *("" if error is None or error.p50 is None else format_number(100 * error.p50) for error in errors),
                f"{fmean(gains):.3f}" if gains else "",
            ]
        )
    steps = f"error, {measured['steps']} steps (%)"
    notes = [
        _loss_note(long_runs),
        f"error: relative error of the mean gradient of {count(STEPS_WORLD_SIZE, 'rank')}; normally distributed "
        "gradients",
        f"error, {measured['steps']} steps: relative error of the mean over these steps; with error feedback if "
        "quantized",
        "gain: mean over recorded gradients of trainings",
    ]
    headers = ["hook", "bits per element", _loss_header(long_runs), "error (%)", steps, "gain"]
    return [Table(title="Wire formats", headers=headers, rows=rows, notes=notes)]
