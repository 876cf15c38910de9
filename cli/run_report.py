"""What `gradwire run` prints at the end: bytes, times and errors of every model, and whether steps became faster."""

import statistics
from collections.abc import Iterator, Sequence

from gradwire.bench.record import format_bytes
from gradwire.cli.run_compression import AUTO, OBSERVED_STEPS, CompressedModel
from gradwire.exchange.telemetry import LARGEST_DELAY
from gradwire.planner.accuracy import measured_accuracy


def report(made: Sequence[CompressedModel]) -> str:
    """The text that rank 0 prints at the end: the measurements of each model of `compressed`."""
    if not made:
        return (
            "gradwire run: this process trained no model of torch.nn.parallel.DistributedDataParallel, fully_shard or "
            "replicate, so gradwire run has compressed nothing. It leaves gradwire.DistributedDataParallel to the "
            "script, and does not cover FSDP1, nor processes that the script starts itself."
        )
    return "\n".join(line for each in made for line in _lines(each))


def _lines(compression: CompressedModel) -> Iterator[str]:
    hook = compression.hook_name
    ranks, steps = compression.world_size, compression.n_steps
    yield (
        f"gradwire run: {hook} on {compression.model_name}, {compression.numel:,} parameters, "
        f"{ranks} rank{'s' * (ranks != 1)}, {steps:,} step{'s' * (steps != 1)}"
    )
    if compression.is_left_to_script:
        yield "  not used: the script compresses its gradients itself"
        return
    if steps == 0:
        yield "  the script has trained no step"
        return
    if hook == AUTO and compression.summary:
        yield f"  {compression.summary}"
        return
    if steps <= compression.first_compressed:
        yield f"  nothing was compressed: that begins after {compression.first_compressed} steps"
        return
    if ranks == 1:
        yield "  one rank sends nothing; the bytes are those that each of several ranks would send"
    yield from (f"  {line}" for line in (compression.attached, compression.summary) if line)
    if compression.step_seconds:
        yield f"  time of a step       {1e3 * statistics.median(compression.step_seconds):.3g} ms"
    yield from _exchange(compression)
    comparison = compression.comparison
    speed = f"not measured: {hook} may make steps faster or slower" if comparison is None else comparison.answer()
    yield f"  speed                {speed}"


def _exchange(compression: CompressedModel) -> Iterator[str]:
    """Bytes, times and errors of the exchange, medians over the measured steps; and a measured loss of the hook."""
    values = {name: statistics.median(found) for name, found in compression.metrics.items()}
    if not values:
        reason = f"the script ended too early; one compressed step in {OBSERVED_STEPS} is measured"
        yield f"  sent in a step       not measured: {reason}"
        return
    before, sent = values["gradient_bytes"], values["sent_bytes"]
    fewer = f": {before / sent:.3g} times fewer bytes" if 0 < sent < before else ""
    yield f"  sent in a step       {format_bytes(sent)} instead of {format_bytes(before)}{fewer}"
    if "wire_ms" in values:
        parts = ", ".join(f"{name} {values[f'{name}_ms']:.3g} ms" for name in ("encode", "wire", "decode"))
        yield f"  of the exchange      {parts}; summed over the buckets, which overlap with each other and the backward"
    if "delayed_ratio" in values:
        delay = compression.metrics["delayed_ratio"][-1]
        advice = "at most 1" if delay <= LARGEST_DELAY else "above 1: use a higher rank or more bits"
        yield f"  error / gradient     {delay:.3g} in the last comparison (norms of means over the ranks); {advice}"
    elif "residual_ratio" in values:
        ratios = compression.metrics["residual_ratio"]
        shown = f"{ratios[0]:.3g} at first, {ratios[-1]:.3g} at the end (norms on this rank)"
        yield f"  error / gradient     {shown}; it should level off"
    hook = compression.hook_name
    if "wire_ms" in values and (accuracy := measured_accuracy(hook)):  # not of a reduce-scatter
        yield f"  accuracy             compare the loss with that of a run without a hook; {hook} {accuracy}"
