"""The compression of `gradwire run`: hooks and attachments for the models of a script that knows nothing of them."""

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.cli.run_advise import measured_script, on_ddp_init
from gradwire.hooks._bucket import GradBucket
from gradwire.hooks._decorators import CommHook
from gradwire.hooks.default_hooks import CastState
from gradwire.hooks.hook_state import HookSettings, HookState
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.hook_registry import HOOKS, PLAIN, QUANTIZED, Registration
from gradwire.planner.jobs import JobError
from gradwire.planner.model_probe import STEPS, ScriptProbe
from gradwire.planner.recommend import advise
from gradwire.sharded import ReduceScatterOptions, attach
from gradwire.sharded.attachment import is_attached
from gradwire.sharded.torch_internals import on_root_init, parameter_groups

AUTO = "auto"
CHOICES = (AUTO, *(name for name in HOOKS if name not in ("none", "noop", "allreduce")))
OBSERVED_STEPS = 10  # one step in as many is measured
COMPARED_STEPS = 1000  # one step in as many is compared with the exact mean, which takes two uncompressed exchanges
WARM_UP = 2 * OBSERVED_STEPS  # compressed steps before a comparison, in which the exchange is measured
STRETCH = 10  # steps in a row with or without compression; the first is not timed
BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: torch_hooks.allreduce_hook,  # type: ignore[attr-defined]
    dist.BuiltinCommHookType.FP16_COMPRESS: torch_hooks.fp16_compress_hook,  # type: ignore[attr-defined]
}
# Wire formats of FSDP2's reduce-scatter by the hook that sends the same bits
WITHIN = {"bf16": "bf16", "fp16": "fp16"} | QUANTIZED


class HookReplacedWarning(UserWarning):
    """The script has registered a hook of its own, which is used instead of the one on the command line."""


class Compression:
    """The compressed exchange of one model, and what was measured of it on this rank.

    Args:
        model: the model as the script made it.
        hook: one of `CHOICES`.
        group: the ranks that average its gradients.
        start: the first step to compress.
    """

    def __init__(self, model: nn.Module, hook: str, group: dist.ProcessGroup | None, start: int) -> None:
        self.hook_name, self.model_name = hook, type(model).__name__
        self.numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.n_steps = 0
        self.is_left_to_script = False  # whether the script compresses the gradients itself
        self.summary = ""  # what "auto" has chosen, and why
        self.place = ""  # what `attach` has compressed
        self.comparison_end = 0  # the step after the comparison of `--measure`
        self.has_metrics = True  # whether compressed steps are measured
        self.can_compare = True  # whether `--measure` has an effect
        self.metrics: dict[str, list[float]] = {}  # values in the measured steps, by name
        self.stretches: list[tuple[bool, float]] = []  # whether compressed, seconds per step
        self.step_seconds: list[float] = []  # of compressed steps outside of stretches
        self._probe: ScriptProbe | None = None  # measures the first steps of "auto"
        self._state: Any = None  # of the hook; None sends gradients in full
        self.first_compressed = start  # the first compressed step
        self._began: float | None = None  # the time of the previous step, or of the second one of this stretch

    def release(self) -> None:
        """Drop the state of the hook, and read its last measurements: the model is gone, or has another hook."""
        if self._state is not None and not self.is_left_to_script:
            self._state.stop_observing()
        self._state = self._probe = None

    def _report(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value)


class DDPCompression(Compression):
    """The hook of one DistributedDataParallel.

    Args:
        ddp: the model, wrapped in PyTorch's class.
        hook, start: as in `Compression`; "auto" first measures `STEPS` steps.
        measure: number of steps in which stretches with and without compression alternate; 0 for none.
    """

    def __init__(self, ddp: TorchDDP, hook: str, start: int, measure: int) -> None:
        super().__init__(ddp.module, hook, ddp.process_group, start)
        self._group, self._module = ddp.process_group, weakref.ref(ddp.module)
        self._hook: CommHook = torch_hooks.allreduce_hook
        if hook == AUTO:
            self.first_compressed = max(start, STEPS + 2)
            self._probe = ScriptProbe(ddp, self._choose, averages=True)
        else:
            self._take(hook, start)
        self._first = self.first_compressed + WARM_UP
        self._end = self._first + measure // STRETCH * STRETCH
        self.comparison_end = self._end + 1 if measure else 0

    def _take(self, hook: str, start: int) -> None:
        """Compress with a hook from step ``start`` on, counted from now."""
        self._state, self._hook = _registration(hook, self._group, start)
        if isinstance(self._state, HookState) and (module := self._module()) is not None:
            self._state.bind(module)

    def register(self, state: object, hook: Callable[..., Any]) -> None:
        """Leave the gradients to the hook that the script registers."""
        if self._probe is not None:
            self._probe.remove()
        self.release()
        self._state, self._hook, self.is_left_to_script = state, hook, True

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket."""
        if self.is_left_to_script:
            return self._hook(self._state, bucket)
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
            self._take(chosen, max(2, self.first_compressed - self.n_steps))
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
            self._state.observe(every=OBSERVED_STEPS, exact_every=COMPARED_STEPS, report=self._report)
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
        self.is_left_to_script = is_attached(model)
        if self.is_left_to_script:
            return
        if any(group.replicas is not None for group in parameter_groups(model)):
            attachment = attach(model, *_registration(hook, None, start))
            self._state = attachment.state
        else:
            attachment = attach(model, within=_within(hook))
            self.has_metrics, self.first_compressed = False, 0
        self.place, self.can_compare = attachment.report, False
        attachment.step_ends.append(self._end_step)

    def _end_step(self) -> None:
        now = time.perf_counter()
        self.n_steps += 1
        if self.n_steps == self.first_compressed and self._state is not None:
            self._state.observe(every=OBSERVED_STEPS, exact_every=COMPARED_STEPS, report=self._report)
        if self._began is not None and self.n_steps > self.first_compressed:
            self.step_seconds.append(now - self._began)
        self._began = now


def _within(hook: str) -> ReduceScatterOptions:
    """The wire format of a hook for FSDP2's reduce-scatter, below 6 bits with error feedback."""
    entry = WITHIN.get(hook)
    if entry is None:
        raise ValueError(
            f"--hook {hook} averages between replicas, and this model is sharded by fully_shard over a 1-D mesh, which "
            f"has none. Choose one of {', '.join(WITHIN)}, or shard over a 2-D mesh (replicate, shard)."
        )
    return ReduceScatterOptions(wire=entry, use_error_feedback=WIRE_FORMATS[entry].bits < 6)


def _registration(hook: str, group: dist.ProcessGroup | None, start: int) -> Registration:
    """State and hook for a process group; the state can be observed."""
    registration = HOOKS[hook].make(group, start)
    assert registration is not None
    state, function = registration
    return state if isinstance(state, HookSettings) else CastState(group), function


@contextmanager
def compressed(hook: str, start: int = 2, measure: int = 0) -> Iterator[list[Compression]]:
    """Meanwhile, models of PyTorch's DistributedDataParallel get a hook when they are made (see `on_ddp_init`), and
    models of FSDP2 an attachment before their first forward; yields their list.
    """
    made: list[Compression] = []
    of: WeakKeyDictionary[TorchDDP, DDPCompression] = WeakKeyDictionary()
    register = TorchDDP.register_comm_hook
    register_builtin: Any = TorchDDP._register_builtin_comm_hook

    def compress(ddp: TorchDDP) -> None:
        compression = of[ddp] = DDPCompression(ddp, hook, start, measure)
        register(ddp, compression, DDPCompression.reduce)
        ddp._comm_hooks.clear()  # for the Python reducer only; copies and pickles of the model would hold the state
        weakref.finalize(ddp, compression.release)
        made.append(compression)

    @wraps(register)
    def register_comm_hook(self: TorchDDP, state: object, hook: Callable[..., Any]) -> None:
        compression = of.get(self)
        if compression is None:
            register(self, state, hook)
            return
        if compression.is_left_to_script:
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

    with (
        mock.patch.object(TorchDDP, "register_comm_hook", register_comm_hook),
        mock.patch.object(TorchDDP, "_register_builtin_comm_hook", register_builtin_comm_hook),
        on_ddp_init(compress),
        on_root_init(attach_root),
    ):
        yield made
