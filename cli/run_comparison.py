"""The comparison of `gradwire run`: stretches of steps with and without the hook, and the answer that they give."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

STRETCH = 10  # steps in a row with or without compression; the first is not timed
MIN_PAIRS = 5  # of a stretch with and one without compression
LEAST_STEPS = 2 * STRETCH * MIN_PAIRS  # of a comparison
POWER = 1.96 + 0.84  # z for 95 % confidence plus z for 80 % power
MOST_STEPS = 1_000_000  # that an answer suggests


class Comparison:
    """Stretches with and without compression, in the order A B B A, so that a drift cancels out.

    Args:
        hook: name of the hook.
        first: the first step that is compared.
        n_steps: number of steps, at least `LEAST_STEPS`; a multiple of `STRETCH` is used.

    Attributes:
        end: the step after the last one that is compared.
        stretches: whether compressed, and seconds per step, in order.
    """

    def __init__(self, hook: str, first: int, n_steps: int) -> None:
        self.hook = hook
        self.first = first
        self.end = first + n_steps // STRETCH * STRETCH
        self.stretches: list[tuple[bool, float]] = []
        self._began = 0.0  # the time of the second step of this stretch

    def is_plain(self, step: int) -> bool:
        """Whether a step sends its gradients in full."""
        return self.first <= step < self.end and (step - self.first) // STRETCH % 4 in (0, 3)

    def begin(self, step: int, device: torch.device) -> None:
        """Note the time at the first exchange of a step, from `first` to `end`."""
        position = (step - self.first) % STRETCH
        if position > 1:
            return
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)  # the host runs ahead of the device
        now = time.perf_counter()
        if position == 0 and step > self.first:
            self.stretches.append((not self.is_plain(step - 1), (now - self._began) / (STRETCH - 1)))
        self._began = now

    def answer(self) -> str:
        """Whether the hook makes steps faster, with the interval."""
        found = speed_up(self.stretches)
        if found is None:
            return f"not measured: the comparison takes {self.end + 1} steps"
        facts = (
            f"{1e3 * found.own:.3g} ms a step instead of {1e3 * found.plain:.3g} ms (95 % interval of the speed-up "
            f"{found.low:.3g} to {found.high:.3g}, {found.pairs} pairs of {STRETCH} steps)"
        )
        if found.low > 1:
            return f"{self.hook} is faster here ({found.ratio:.3g} times): {facts}"
        if found.high < 1:
            return f"{self.hook} is slower here ({found.ratio:.3g} times): run without it; {facts}"
        steps = found.deciding_steps
        more = (
            f"not even {MOST_STEPS:,} steps would decide it"
            if steps > MOST_STEPS
            else f"about {steps:,} steps would decide it: --measure {steps}"
        )
        return f"no difference shown between {self.hook} and no hook ({found.ratio:.3g} times): {facts}; {more}"


class SpeedUp(NamedTuple):
    """Steps with a hook compared with plain steps."""

    plain: float  # seconds per step without the hook, geometric mean
    own: float  # seconds per step with the hook
    ratio: float  # plain / own
    low: float  # 95 % interval of the ratio
    high: float
    pairs: int  # pairs of stretches
    deciding_steps: float  # that would show the ratio to differ from 1 in four of five runs, to two digits


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
