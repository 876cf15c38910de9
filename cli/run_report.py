"""What `gradwire run` prints at the end: bytes, times and errors of every model, and whether steps became faster."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradwire.bench.record import format_bytes
from gradwire.cli.run_compression import AUTO, OBSERVED_STEPS, STRETCH, Compression
from gradwire.hooks.telemetry import LARGEST_DELAY

MIN_PAIRS = 5  # of a stretch with and one without compression
POWER = 1.96 + 0.84  # standard errors by which a difference must exceed 0 to be shown in four of five runs
MOST_STEPS = 1_000_000  # that a report suggests


def report(made: Sequence[Compression]) -> str:
    """The text that rank 0 prints at the end: the measurements of each model of `compressed`."""
    if not made:
        return (
            "gradwire run: this process trained no model of torch.nn.parallel.DistributedDataParallel, fully_shard or "
            "replicate, so gradwire run has compressed nothing. It leaves gradwire.DistributedDataParallel to the "
            "script, and does not cover FSDP1, nor processes that the script starts itself."
        )
    return "\n".join(line for each in made for line in _lines(each))


def _lines(compression: Compression) -> Iterator[str]:
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
    yield from (f"  {line}" for line in (compression.place, compression.summary) if line)
    if compression.step_seconds:
        yield f"  time of a step       {1e3 * statistics.median(compression.step_seconds):.3g} ms"
    yield from _exchange(compression)
    yield _speed(compression)


def _exchange(compression: Compression) -> Iterator[str]:
    """Bytes, times and errors of the exchange: medians over the measured steps."""
    values = {name: statistics.median(found) for name, found in compression.metrics.items()}
    if not values:
        ended = f"the script ended too early; one compressed step in {OBSERVED_STEPS} is measured"
        reason = ended if compression.has_metrics else "the reduce-scatter has no telemetry"
        yield f"  sent in a step       not measured: {reason}"
        return
    before, sent = values["gradient_bytes"], values["sent_bytes"]
    fewer = f": {before / sent:.3g} times fewer bytes" if 0 < sent < before else ""
    yield f"  sent in a step       {format_bytes(sent)} instead of {format_bytes(before)}{fewer}"
    parts = ", ".join(f"{name} {values[f'{name}_ms']:.3g} ms" for name in ("encode", "wire", "decode"))
    yield f"  of the exchange      {parts}; summed over the buckets, which overlap with each other and the backward"
    if "delayed_ratio" in values:
        delay = compression.metrics["delayed_ratio"][-1]
        advice = "as it should be" if delay <= LARGEST_DELAY else "above 1: use a higher rank or more bits"
        yield f"  error / gradient     {delay:.3g} in the last comparison (norms of means over the ranks); {advice}"
    elif "residual_ratio" in values:
        ratios = compression.metrics["residual_ratio"]
        shown = f"{ratios[0]:.3g} at first, {ratios[-1]:.3g} at the end (norms on this rank)"
        yield f"  error / gradient     {shown}; it should level off"


def _speed(compression: Compression) -> str:
    """Whether the hook makes steps faster, as far as it was measured."""
    hook = compression.hook_name
    if not compression.comparison_end:
        how = "add --measure 200" if compression.can_compare else "compare with the step time without gradwire"
        return f"  speed                not measured: {hook} may make steps faster or slower; {how}"
    found = speed_up(compression.stretches)
    if found is None:
        return f"  measured             nothing: --measure needs {compression.comparison_end} steps here"
    text = (
        f"  measured             {found.verdict}: {1e3 * found.plain:.3g} ms a step without {hook}, "
        f"{1e3 * found.own:.3g} ms with it, {found.ratio:.3g} times as fast (95 % interval {found.low:.3g} to "
        f"{found.high:.3g}, {found.pairs} pairs of {STRETCH} steps)"
    )
    if found.verdict != UNDECIDED:
        return text
    if found.deciding_steps > MOST_STEPS:
        return f"{text}; not even {MOST_STEPS:,} steps would decide it"
    return f"{text}; about {found.deciding_steps:,} steps would decide it: --measure {found.deciding_steps}"


UNDECIDED = "no difference shown"


class SpeedUp(NamedTuple):
    """Steps with a hook compared with plain steps."""

    plain: float  # seconds per step without the hook, geometric mean
    own: float  # seconds per step with the hook
    ratio: float  # plain / own
    low: float  # 95 % interval of the ratio
    high: float
    pairs: int  # pairs of stretches
    deciding_steps: float  # that would show the ratio to differ from 1 in four of five runs, to two digits

    @property
    def verdict(self) -> str:
        """The answer that the interval allows."""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else UNDECIDED


def speed_up(stretches: Sequence[tuple[bool, float]]) -> SpeedUp | None:
    """The speed-up with Student's interval, from pairs of neighboring stretches; None for fewer than `MIN_PAIRS`.

    Args:
        stretches: whether compressed, and seconds per step, in order.
    """
    logs = [[math.log(seconds) for is_compressed, seconds in stretches if is_compressed == kind] for kind in (0, 1)]
    pairs = list(zip(*logs, strict=False))
    n = len(pairs)
    if n < MIN_PAIRS:
        return None
    gains = [plain - own for plain, own in pairs]
    gain, spread = statistics.fmean(gains), statistics.stdev(gains)
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    plain, own = (math.exp(statistics.fmean(each)) for each in zip(*pairs, strict=True))
    deciding = 2 * STRETCH * (POWER * spread / gain) ** 2 if gain else math.inf
    low, high = math.exp(gain - half), math.exp(gain + half)
    return SpeedUp(plain, own, math.exp(gain), low, high, n, _rounded_up(deciding))


def _rounded_up(number: float) -> float:
    """The next whole number with two digits and zeros."""
    if not 1 <= number < math.inf:
        return number
    unit = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return unit * math.ceil(number / unit)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, within 1 % from 3 degrees of freedom on (Cornish-Fisher expansion)."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
