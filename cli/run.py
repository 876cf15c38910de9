"""``gradwire run`` and ``python -m gradwire.run``: compress the gradients of a training script without changing it.

Every DistributedDataParallel that the script makes gets a hook, and every model of FSDP2, HSDP and `replicate` an
attachment. A hook that the script registers itself wins. At the end, rank 0 reports bytes and times. Needs torch only.
"""

import argparse
import math
import os
import runpy
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.bench.record import format_bytes
from gradwire.cli import missing_packages
from gradwire.cli.run_advise import AdviceGiven, advised, fail, is_left_alone, measured_script, reduce
from gradwire.hooks._bucket import GradBucket
from gradwire.hooks._decorators import CommHook
from gradwire.hooks.default_hooks import CastState
from gradwire.hooks.hook_state import HookSettings, HookState
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.hook_registry import HOOKS, QUANTIZED, Registration
from gradwire.planner.jobs import JobError
from gradwire.planner.probe import PLAIN
from gradwire.planner.recommend import advise
from gradwire.planner.script_probe import STEPS, ScriptProbe
from gradwire.sharded import ReduceScatterOptions, attach
from gradwire.sharded.attachment import is_attached
from gradwire.sharded.torch_internals import on_root_init, parameter_groups

AUTO = "auto"
CHOICES = (AUTO, *(name for name in HOOKS if name not in ("none", "noop", "allreduce")))
OBSERVED_STEPS = 10  # one step in as many is measured
WARM_UP = 2 * OBSERVED_STEPS  # compressed steps before a comparison, in which the exchange is measured
STRETCH = 10  # steps in a row with or without compression; the first is not timed
MIN_PAIRS = 5  # of a stretch with and one without compression
POWER = 1.96 + 0.84  # standard errors by which a difference must exceed 0 to be shown in four of five runs
MOST_STEPS = 1_000_000  # that a report suggests
BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: torch_hooks.allreduce_hook,  # type: ignore[attr-defined]
    dist.BuiltinCommHookType.FP16_COMPRESS: torch_hooks.fp16_compress_hook,  # type: ignore[attr-defined]
}
# Wire formats of FSDP2's reduce-scatter by the hook that sends the same bits
WITHIN = {"bf16": "bf16", "fp16": "fp16"} | QUANTIZED
_PATCHED = ("__init__", "register_comm_hook", "_register_builtin_comm_hook")


class HookReplacedWarning(UserWarning):
    """The script has registered a hook of its own, which is used instead of the one on the command line."""


class Compression:
    """The compressed exchange of one model, and what was measured of it on this rank.

    Args:
        model: the model as the script made it.
        hook: one of `CHOICES`.
        group: the ranks that average its gradients.
        start: the first step to compress; "auto" first measures `STEPS` steps.
    """

    def __init__(self, model: nn.Module, hook: str, group: dist.ProcessGroup | None, start: int) -> None:
        self.hook_name, self.model_name = hook, type(model).__name__
        self.numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.n_steps = 0
        self.is_scripts = False  # the script compresses the gradients itself
        self.summary = ""  # what "auto" has chosen, and why
        self.place = ""  # what `attach` has compressed
        self.comparison_end = 0  # the step after the comparison of `--measure`
        self.has_metrics = True  # whether compressed steps are measured
        self.can_compare = True  # whether `--measure` has an effect
        self.metrics: dict[str, list[float]] = {}  # values in the measured steps, by name
        self.stretches: list[tuple[bool, float]] = []  # whether compressed, seconds per step
        self.step_seconds: list[float] = []  # of compressed steps outside of stretches
        self._probe: ScriptProbe | None = None  # measures the first steps of "auto"
        self._state: Any = None
        self._hook: CommHook = torch_hooks.allreduce_hook
        if hook != AUTO:
            self._state, self._hook = _registration(hook, group, start)
        self.first_compressed = start if hook != AUTO else max(start, STEPS + 2)  # the first compressed step
        self._began: float | None = None  # the time of the previous step, or of the second one of this stretch

    def release(self) -> None:
        """Drop the state of the hook, and read its last measurements: the model is gone, or has another hook."""
        if self._state is not None:
            self._state.stop_observing()
        self._state = self._probe = None

    def _report(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value)


class DDPCompression(Compression):
    """The hook of one DistributedDataParallel.

    Args:
        ddp: the model, wrapped in PyTorch's class.
        hook, start: as in `Compression`.
        measure: number of steps in which stretches with and without compression alternate; 0 for none.
    """

    def __init__(self, ddp: TorchDDP, hook: str, start: int, measure: int) -> None:
        super().__init__(ddp.module, hook, ddp.process_group, start)
        self.scripts: tuple[Any, Callable[..., Any]] | None = None  # state and hook that the script has registered
        self._group = ddp.process_group
        if isinstance(self._state, HookState):
            self._state.bind(ddp)
        if hook == AUTO:
            self._probe = ScriptProbe(ddp, self._choose, averages=True)
        self._first = self.first_compressed + WARM_UP
        self._end = self._first + measure // STRETCH * STRETCH
        self.comparison_end = self._end + 1 if measure else 0

    def register(self, state: object, hook: Callable[..., Any]) -> None:
        """Leave the gradients to the hook that the script registers."""
        self.scripts, self.is_scripts = (state, hook), True
        if self._probe is not None:
            self._probe.remove()
        self.release()

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket."""
        if self.scripts is not None:
            state, hook = self.scripts
            return cast("Future[torch.Tensor]", hook(state, bucket))
        if bucket.index() == 0:
            self._begin_step(bucket.buffer().device)
        if self._probe is not None:
            return self._probe.reduce(bucket)
        if self._state is None or self._is_plain(self.n_steps - 1):
            return torch_hooks.allreduce_hook(self._group, bucket)
        return self._hook(self._state, bucket)

    def _choose(self, probe: ScriptProbe) -> None:
        """Take the hook that `gradwire advise` would recommend for this model. A collective call."""
        self._probe = None
        parameters = [each for spec in probe.specs for each in spec.parameters]
        gradients = [parameter.grad for parameter in parameters]
        devices = [probe.device] if probe.device.type == "cuda" else []
        try:
            if self.world_size < dist.get_world_size():
                raise JobError(f"the model has {self.world_size} of {dist.get_world_size()} ranks")
            with torch.random.fork_rng(devices):
                advice = advise(measured_script(probe))
            chosen, self.summary = advice.recommended, f"auto: {advice.headline}: {advice.reason}"
        except JobError as error:
            chosen, self.summary = PLAIN, f"auto: gradients are sent in full: {error}"
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if chosen != PLAIN:
            self.hook_name = chosen
            self._state, self._hook = _registration(chosen, self._group, max(2, self.first_compressed - self.n_steps))
        if self.rank == 0:
            print(f"gradwire run: {self.model_name}: {self.summary}", file=sys.stderr, flush=True)

    def _is_plain(self, step: int) -> bool:
        """Whether a step sends its gradients in full: stretches in the order A B B A, so that a drift cancels out."""
        return self._first <= step < self._end and (step - self._first) // STRETCH % 4 in (0, 3)

    def _begin_step(self, device: torch.device) -> None:
        step, now = self.n_steps, time.perf_counter()
        self.n_steps += 1
        if self._probe is not None or self._state is None:
            return
        is_compared = self._first < self._end
        if step == self.first_compressed or (is_compared and step == self._end):
            self._state.observe(every=OBSERVED_STEPS, report=self._report)
        elif is_compared and step == self._first:
            self._state.stop_observing()  # it takes time in compressed steps only
        if is_compared and self._first <= step <= self._end:
            position = (step - self._first) % STRETCH
            if position > 1:
                return
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)  # the host runs ahead of the device
                now = time.perf_counter()
            if position == 0 and step > self._first and self._began is not None:
                self.stretches.append((not self._is_plain(step - 1), (now - self._began) / (STRETCH - 1)))
        elif self._began is not None and step > self.first_compressed:
            self.step_seconds.append(now - self._began)
        self._began = now


class ShardedCompression(Compression):
    """The attachment of one model of FSDP2, HSDP or `replicate`. Args: as in `Compression`.

    Raises:
        ValueError: the hook is "auto"; or it has no wire format for FSDP2's reduce-scatter, and the model no replicas.
    """

    def __init__(self, model: nn.Module, hook: str, start: int) -> None:
        if hook == AUTO:
            raise ValueError(
                "--hook auto measures models of DistributedDataParallel, and this one is of fully_shard or replicate. "
                "Name a hook; gradwire advise compares them for HSDP's replicas."
            )
        super().__init__(model, hook, None, start)
        self.is_scripts = is_attached(model)
        if self.is_scripts:
            self.release()
            return
        if any(group.replicas is not None for group in parameter_groups(model)):
            attachment = attach(model, self._state, self._hook)
            self._state = attachment.state
        else:
            attachment = attach(model, within=_within(hook))
            self._state, self.has_metrics, self.first_compressed = None, False, 0
        self.place, self.can_compare = attachment.report, False
        attachment.step_ends.append(self._end_step)

    def _end_step(self) -> None:
        now = time.perf_counter()
        self.n_steps += 1
        if self.n_steps == self.first_compressed and self._state is not None:
            self._state.observe(every=OBSERVED_STEPS, report=self._report)
        if self._began is not None and self.n_steps > self.first_compressed:
            self.step_seconds.append(now - self._began)
        self._began = now


def _within(hook: str) -> ReduceScatterOptions:
    """The wire format of a hook for FSDP2's reduce-scatter, below 8 bits with error feedback."""
    entry = WITHIN.get(hook)
    if entry is None:
        raise ValueError(
            f"--hook {hook} averages between replicas, and this model is sharded by fully_shard over a 1-D mesh, which "
            f"has none. Choose one of {', '.join(WITHIN)}, or shard over a 2-D mesh (replicate, shard)."
        )
    return ReduceScatterOptions(wire=entry, use_error_feedback=WIRE_FORMATS[entry].bits < 8)


def _registration(hook: str, group: dist.ProcessGroup | None, start: int) -> Registration:
    """State and hook for a process group; the state can be observed."""
    registration = HOOKS[hook].make(group, start)
    assert registration is not None
    state, function = registration
    return state if isinstance(state, HookSettings) else CastState(group), function


@contextmanager
def compressed(hook: str, start: int = 2, measure: int = 0) -> Iterator[list[Compression]]:
    """Meanwhile, models that are wrapped in PyTorch's DistributedDataParallel get a hook, and models of FSDP2 an
    attachment before their first forward; yields their list.

    The classes stay the same, also for modules that have imported them. A model whose wrapper has a hook from the start
    (``mixed_precision``), compiled autograd's Python reducer and gradwire's own class are left alone.
    """
    made: list[Compression] = []
    of: WeakKeyDictionary[TorchDDP, DDPCompression] = WeakKeyDictionary()
    initialize, register, register_builtin = (getattr(TorchDDP, name) for name in _PATCHED)

    @wraps(initialize)
    def __init__(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if is_left_alone(self):
            return
        compression = of[self] = DDPCompression(self, hook, start, measure)
        register(self, compression, reduce)
        self._comm_hooks.clear()  # for the Python reducer only; copies and pickles of the model would hold the state
        weakref.finalize(self, compression.release)
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
        if isinstance(state, HookState):
            state.bind(self)
        compression.register(state, hook)
        name = getattr(hook, "__qualname__", repr(hook))
        warnings.warn(
            f"The script registers {name} on its {compression.model_name}, so gradwire run leaves this model to it: "
            f"--hook {compression.hook_name} is not used there.",
            HookReplacedWarning,
            stacklevel=2,
        )

    @wraps(register_builtin)
    def register_builtin_comm_hook(self: TorchDDP, kind: Any) -> None:
        if self in of:
            register_comm_hook(self, self.process_group, BUILTIN[kind])
        else:
            register_builtin(self, kind)

    def attach_root(model: nn.Module) -> None:
        if any(parameter.requires_grad for parameter in model.parameters()):
            made.append(ShardedCompression(model, hook, start))
            if measure:
                made[-1].place += "; --measure has no effect: it compares steps of DDP"

    for name, method in zip(_PATCHED, (__init__, register_comm_hook, register_builtin_comm_hook), strict=True):
        setattr(TorchDDP, name, method)
    try:
        with on_root_init(attach_root):
            yield made
    finally:
        for name, method in zip(_PATCHED, (initialize, register, register_builtin), strict=True):
            setattr(TorchDDP, name, method)


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
    if compression.is_scripts:
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
    compression.release()
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
    if "residual_ratio" in values:
        ratios = compression.metrics["residual_ratio"]
        first, last = ratios[0], ratios[-1]
        advice = "it should level off" if last < 1 else "above 1: compare the loss with that of a run without the hook"
        yield f"  error / gradient     {first:.3g} at first, {last:.3g} at the end (norms); {advice}"


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


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gradwire")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--hook", choices=CHOICES, metavar="HOOK", help=f"one of {', '.join(CHOICES)}")
    what.add_argument(
        "--advise",
        action="store_true",
        help=f"measure the script for {STEPS} steps, print the step time with every hook as gradwire advise does, and "
        "end the script",
    )
    group.add_argument("--start", type=_at_least(2), default=2, metavar="STEP", help="first step to compress (2)")
    group.add_argument(
        "--measure",
        type=_at_least(2 * STRETCH * MIN_PAIRS),
        default=0,
        metavar="STEPS",
        help=f"over STEPS steps, at least {2 * STRETCH * MIN_PAIRS}, alternate {STRETCH} compressed and {STRETCH} "
        "plain steps, and report the speed-up",
    )


def _check_choice(parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """End the program unless there is ``--hook`` or ``--advise`` before the script; ``arguments`` are the script's."""
    if options.hook is not None or options.advise:
        return
    for name in (each.partition("=")[0] for each in arguments):
        if name in ("--hook", "--advise"):
            parser.error(
                f"{name} stands after the script's name, so it is an option of the script. Options of {parser.prog} "
                f"stand before the script's name: {parser.prog} --hook int4 train.py"
            )
    parser.error("one of the arguments --hook --advise is required")


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
        usage="%(prog)s (--hook HOOK | --advise) [options] script ...",
        description="Train with an unchanged script of DDP, FSDP2 or HSDP, and compress its gradients.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    _check_choice(parser, options, options.arguments)
    if options.advise and options.measure:
        parser.error("--measure compares a hook with plain steps; --advise takes no hook")
    if options.advise and (missing := missing_packages("cli")):
        parser.error(f'--advise needs {", ".join(missing)}. In a checkout of gradwire, run: pip install ".[cli]"')
    if not options.module and not Path(options.script).exists():
        parser.error(f"there is no script {options.script}")
    sys.argv = [options.script, *options.arguments]
    if not options.module and not sys.flags.safe_path:
        sys.path[0] = str(Path(options.script).resolve().parent)  # as `python SCRIPT` does
    if options.advise:
        try:
            with advised():
                _run_script(options)
        except SystemExit as end:
            if isinstance(end, AdviceGiven) or end.code not in (None, 0):
                raise
        fail(f"the script ended before the {STEPS + 1} steps of DistributedDataParallel that --advise takes")
    with compressed(options.hook, options.start, options.measure) as made:
        try:
            _run_script(options)
        finally:
            error = sys.exc_info()[1]
            has_ended = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            rank = made[0].rank if made else int(os.environ.get("RANK", "0"))
            if rank == 0 and (made or has_ended):
                print(report(made), file=sys.stderr, flush=True)


def _run_script(options: argparse.Namespace) -> None:
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")


def options() -> argparse.ArgumentParser:
    """The options of ``gradwire run``: torchrun's, and those of `main`."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.allow_abbrev = "gradwire run", False
    parser.description = "torchrun, with compressed gradients for an unchanged script of DDP, FSDP2 or HSDP."
    parser.usage = "gradwire run [options of torchrun] (--hook HOOK | --advise) [options] script ..."
    _add_options(parser)
    return parser


def launch(arguments: Sequence[str]) -> None:
    """``gradwire run``: start `main` with a script in each process of torchrun."""
    parser = options()
    given = parser.parse_args(arguments)
    _check_choice(parser, given, given.training_script_args)
    if given.no_python:
        parser.error("--no-python starts a program that is not a Python script; gradwire run needs a script")
    given.run_path = False  # `main` runs the script in this way
    own = ["--advise"] if given.advise else ["--hook", given.hook]
    own += ["--start", str(given.start)]
    own += ["--measure", str(given.measure)] if given.measure else []
    own += ["--module"] if given.module else []
    given.training_script_args = [*own, given.training_script, *given.training_script_args]
    given.training_script, given.module = "gradwire.run", True
    torchrun.run(given)
