"""``gradwire run`` and ``python -m gradwire.run``: compress the gradients of a training script without changing it.

Every DistributedDataParallel that the script makes gets a hook. A hook that the script registers itself wins. At the
end, rank 0 reports bytes and times. Needs torch only.
"""

import argparse
import math
import os
import random
import runpy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.hooks._bucket import CommHook, GradBucket
from gradwire.hooks.auto_hook import AutoState, auto_hook
from gradwire.hooks.default_hooks import CastState, allreduce_hook
from gradwire.hooks.hook_state import HookState
from gradwire.hooks.telemetry import Observed
from gradwire.planner.hook_registry import HOOKS, Registration
from gradwire.reducer import DistributedDataParallel as OurDDP

AUTO = "auto"
CHOICES = (AUTO, *(name for name in HOOKS if name not in ("none", "noop", "allreduce")))
OBSERVED_STEPS = 10  # one step in as many is measured
WARM_UP = 10  # steps before the first comparison
STRETCH = 10  # steps in a row with or without compression; the first is not timed
MIN_PAIRS = 3  # of a stretch with and one without compression
RESAMPLES = 2000  # of the bootstrap


class HookReplacedWarning(UserWarning):
    """The script has registered a hook of its own, which is used instead of the one on the command line."""


class Compression:
    """The hook of one DistributedDataParallel, and what was measured of it on this rank.

    Args:
        ddp: the model, wrapped in PyTorch's class.
        hook: one of `CHOICES`.
        start: the first step to compress.
        measure: number of steps in which stretches with and without compression alternate; 0 for none.
    """

    def __init__(self, ddp: TorchDDP, hook: str, start: int, measure: int) -> None:
        self.hook_name, self.model_name = hook, type(ddp.module).__name__
        self.numel = sum(parameter.numel() for parameter in ddp.parameters() if parameter.requires_grad)
        self.world_size = dist.get_world_size(ddp.process_group)
        self.scripts: Registration | None = None  # state and hook that the script has registered
        self.metrics: dict[str, list[float]] = {}  # values in the measured steps, by name
        self.stretches: list[tuple[bool, float]] = []  # whether compressed, seconds per step
        self.step_seconds: list[float] = []  # of compressed steps outside of stretches
        self._state: Any
        self._hook: CommHook
        self._state, self._hook = _registration(hook, ddp.process_group, start)
        self._plain = CastState(ddp.process_group)
        if isinstance(self._state, HookState):
            self._state.bind(ddp)
        self._state.observe(every=OBSERVED_STEPS, report=self._report)
        self._first = max(start, WARM_UP)
        if isinstance(self._state, AutoState):
            self._first += (1 + self._state.repeats) * len(self._state.candidates)
        self._end = self._first + measure // STRETCH * STRETCH
        self._n_steps = 0
        self._began: float | None = None  # the time of the previous step, or of the second one of this stretch

    @property
    def n_steps(self) -> int:
        """Number of steps so far."""
        return self._n_steps

    @property
    def summary(self) -> str | None:
        """What `auto_hook` has chosen, if it chooses."""
        return self._state.summary() if isinstance(self._state, AutoState) else None

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket."""
        if self.scripts is not None:
            state, hook = self.scripts
            return hook(state, bucket)
        if bucket.index() == 0:
            self._begin_step(bucket.buffer().device)
        if self._is_plain(self._n_steps - 1):
            return allreduce_hook(self._plain, bucket)
        return self._hook(self._state, bucket)

    def _is_plain(self, step: int) -> bool:
        """Whether a step sends its gradients in full: stretches in the order A B B A, so that a drift cancels out."""
        return self._first <= step < self._end and (step - self._first) // STRETCH % 4 in (0, 3)

    def _begin_step(self, device: torch.device) -> None:
        step, now = self._n_steps, time.perf_counter()
        if self._first <= step <= self._end and self._first < self._end:
            position = (step - self._first) % STRETCH
            if position in (0, 1) and device.type == "cuda":  # the host runs ahead of the device
                torch.cuda.synchronize(device)
                now = time.perf_counter()
            if position == 0 and step > self._first and self._began is not None:
                self.stretches.append((not self._is_plain(step - 1), (now - self._began) / (STRETCH - 1)))
            if position in (0, 1):
                self._began = now
        else:
            if self._began is not None and step > self._first:
                self.step_seconds.append(now - self._began)
            self._began = now
        self._n_steps += 1

    def _report(self, metrics: Any) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value)


def _registration(hook: str, group: dist.ProcessGroup, start: int) -> Registration:
    """State and hook for a process group; the state can be observed."""
    if hook == AUTO:
        return AutoState(group), auto_hook
    registration = HOOKS[hook].make(group, start)
    assert registration is not None
    state, function = registration
    return state if isinstance(state, Observed) else CastState(group), function


def _reduce(compression: Compression, bucket: GradBucket) -> Future[torch.Tensor]:
    return compression.reduce(bucket)


@contextmanager
def compressed(hook: str, start: int = 2, measure: int = 0) -> Iterator[list[Compression]]:
    """Meanwhile, models that are wrapped in PyTorch's DistributedDataParallel get a hook; yields their list.

    The class stays the same, also for modules that have imported it. A model whose wrapper has a hook from the start
    (``mixed_precision``) and gradwire's own class are left alone.
    """
    made: list[Compression] = []
    of: WeakKeyDictionary[TorchDDP, Compression] = WeakKeyDictionary()
    initialize, register = TorchDDP.__init__, TorchDDP.register_comm_hook

    @wraps(initialize)
    def __init__(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if isinstance(self, OurDDP) or self._comm_hooks:
            return
        compression = of[self] = Compression(self, hook, start, measure)
        register(self, compression, _reduce)
        made.append(compression)

    @wraps(register)
    def register_comm_hook(self: TorchDDP, state: object, hook: Callable[..., Any]) -> None:
        compression = of.get(self)
        if compression is None:
            register(self, state, hook)
            return
        if compression.scripts is not None:
            raise RuntimeError("register_comm_hook was called twice; DistributedDataParallel takes one hook.")
        self._check_comm_hook(hook)
        compression.scripts = state, hook
        name = getattr(hook, "__qualname__", repr(hook))
        warnings.warn(
            f"The script registers {name} on its {compression.model_name}, so gradwire run leaves this model to it: "
            f"--hook {compression.hook_name} is not used there.",
            HookReplacedWarning,
            stacklevel=2,
        )

    TorchDDP.__init__, TorchDDP.register_comm_hook = __init__, register_comm_hook  # type: ignore[method-assign]
    try:
        yield made
    finally:
        TorchDDP.__init__, TorchDDP.register_comm_hook = initialize, register  # type: ignore[method-assign]


def report(made: Sequence[Compression]) -> str:
    """What `compressed` has measured on this rank."""
    if not made:
        return (
            "gradwire run: the script wrapped no model in torch.nn.parallel.DistributedDataParallel, so nothing was "
            "compressed. With FSDP2 or HSDP, call gradwire.attach(model, state) in the script."
        )
    return "\n".join(line for each in made for line in _lines(each))


def _lines(compression: Compression) -> Iterator[str]:
    hook, median = compression.hook_name, statistics.median
    yield (
        f"gradwire run: {hook} on {compression.model_name}, {compression.numel:,} parameters, "
        f"{compression.world_size} ranks, {compression.n_steps:,} steps"
    )
    if compression.scripts is not None:
        yield "  not used: the script has registered a hook of its own"
        return
    if compression.summary is not None:
        yield f"  {compression.summary}"
    values = {name: median(found) for name, found in compression.metrics.items()}
    if not values:
        yield f"  too few steps to measure: one in {OBSERVED_STEPS} is"
        return
    before, sent = values["gradient_bytes"], values["sent_bytes"]
    fewer = f": {before / sent:.3g} times fewer bytes" if 0 < sent < before else ""
    yield f"  sent in a step       {_bytes(sent)} instead of {_bytes(before)}{fewer}"
    if compression.step_seconds:
        yield f"  time of a step       {1e3 * median(compression.step_seconds):.3g} ms"
    parts = ", ".join(f"{name} {values[f'{name}_ms']:.3g} ms" for name in ("encode", "wire", "decode"))
    yield f"  of the exchange      {parts}; summed over the buckets, which overlap with each other and the backward"
    if "residual_ratio" in values:
        first, *_, last = 2 * compression.metrics["residual_ratio"]
        yield f"  error / gradient     {first:.3g} at first, {last:.3g} at the end (norms); it should level off"
    if compression.stretches:
        yield _comparison(compression.stretches, hook)


def _comparison(stretches: Sequence[tuple[bool, float]], hook: str) -> str:
    """The gain, with an interval: each stretch without compression is compared with the one beside it."""
    seconds = {kind: [time for is_compressed, time in stretches if is_compressed == kind] for kind in (True, False)}
    gains = [math.log(plain / own) for plain, own in zip(seconds[False], seconds[True], strict=False)]
    if len(gains) < MIN_PAIRS:
        return f"  the script ended before {MIN_PAIRS} pairs of stretches were timed: no comparison"
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(gains, k=len(gains))) for _ in range(RESAMPLES))
    low, high = (math.exp(means[int(share * RESAMPLES)]) for share in (0.025, 0.975))
    plain, own = (1e3 * statistics.median(seconds[kind]) for kind in (False, True))
    return (
        f"  measured             {plain:.3g} ms a step without {hook}, {own:.3g} ms with it: "
        f"{math.exp(statistics.fmean(gains)):.3g} times as fast (95 % interval {low:.3g} to {high:.3g}, "
        f"{len(gains)} pairs of {STRETCH} steps)"
    )


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gradwire")
    group.add_argument("--hook", required=True, choices=CHOICES, metavar="HOOK", help=f"one of {', '.join(CHOICES)}")
    group.add_argument("--start", type=_at_least(0), default=2, metavar="STEP", help="first step to compress (2)")
    group.add_argument(
        "--measure",
        type=_at_least(2 * STRETCH * MIN_PAIRS),
        default=0,
        metavar="STEPS",
        help=f"for so many steps, at least {2 * STRETCH * MIN_PAIRS}, alternate between {STRETCH} steps with and "
        "without compression, and report the gain",
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of steps, at least {least}")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m gradwire.run``, in each process that torchrun, or another launcher, has started."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.run",
        description="Run a training script, with a hook on every DistributedDataParallel that it makes.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    sys.argv = [options.script, *options.arguments]
    if not options.module and not sys.flags.safe_path:
        sys.path[0] = str(Path(options.script).resolve().parent)  # as `python SCRIPT` does
    with compressed(options.hook, options.start, options.measure) as made:
        try:
            if options.module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
        finally:
            has_failed = isinstance(sys.exc_info()[1], Exception)
            if int(os.environ.get("RANK", "0")) == 0 and (made or not has_failed):
                print(report(made), file=sys.stderr, flush=True)


def options() -> argparse.ArgumentParser:
    """The options of ``gradwire run``: torchrun's, and those of `main`."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.allow_abbrev = "gradwire run", False
    parser.description = "torchrun, with a hook on every DistributedDataParallel that the script makes."
    _add_options(parser)
    return parser


def launch(arguments: Sequence[str]) -> None:
    """``gradwire run``: start `main` with a script in each process of torchrun."""
    given = options().parse_args(arguments)
    own = ["--hook", given.hook, "--start", str(given.start)]
    own += ["--measure", str(given.measure)] if given.measure else []
    own += ["--module"] if given.module else []
    given.training_script_args = [*own, given.training_script, *given.training_script_args]
    given.training_script, given.module = "gradwire.run", True
    torchrun.run(given)
