"""The compression of `gradwire run`: hooks and attachments for the models of a script that knows nothing of them."""

import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from gradwire.cli.run_comparison import Comparison
from gradwire.comm.forks import in_this_process
from gradwire.exchange.bucket import GradBucket
from gradwire.exchange.decorators import CommHook
from gradwire.exchange.handshake import compare_settings
from gradwire.exchange.hook_state import HookState
from gradwire.hooks.by_name import NONE, QUANTIZED, hook_named
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.hook_registry import PLAIN
from gradwire.planner.jobs import JobError
from gradwire.planner.model_probe import STEPS, ScriptProbe
from gradwire.planner.recommend import advise
from gradwire.sharded import Attachment, attach
from gradwire.sharded.attachment import is_attached
from gradwire.sharded.torch_internals import on_root_init, parameter_groups

AUTO = "auto"
OBSERVED_STEPS = 10  # one step in as many is measured
COMPARED_STEPS = 1000  # one step in as many is compared with the exact mean
WARM_UP = 2 * OBSERVED_STEPS  # compressed steps before a comparison, in which the exchange is measured
BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: torch_hooks.allreduce_hook,  # type: ignore[attr-defined]
    dist.BuiltinCommHookType.FP16_COMPRESS: torch_hooks.fp16_compress_hook,  # type: ignore[attr-defined]
}


class HookReplacedWarning(UserWarning):
    """The script has registered a hook of its own, which is used instead of the one on the command line."""


class CompressedModel:
    """The compressed exchange of one model, and what was measured of it on this rank.

    Args:
        model: the model as the script made it.
        hook: the name of a hook, or "auto".
        group: the ranks that average its gradients.
        start: the first step to compress.
        measure: number of steps in which stretches with and without compression alternate; 0 for none.
    """

    def __init__(self, model: nn.Module, hook: str, group: dist.ProcessGroup | None, start: int, measure: int) -> None:
        self.hook_name = hook
        self.model_name = type(model).__name__  # with a number if it is not the first of its class
        self.numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.n_steps = 0
        self.is_left_to_script = False  # whether the script compresses the gradients itself
        self.summary = ""  # what "auto" has chosen, and why
        self.attached = ""  # what `attach` has compressed
        self.metrics: dict[str, list[float]] = {}  # values in the measured steps, by name
        self.step_seconds: list[float] = []  # of compressed steps outside of a comparison
        self.first_compressed, self._measure = start, measure
        self.comparison: Comparison | None = None
        self._state: Any = None  # of the hook; None if it has none, or before "auto" has chosen one
        self._began: float | None = None  # the time of the previous step

    def release(self) -> None:
        """Drop the state of the hook, and read its last measurements: the model is gone, or has another hook."""
        if self._state is not None and not self.is_left_to_script:
            self._state.stop_observing()
        self._state = None

    def _compare(self) -> None:
        """Compare steps after a warm-up, if asked to."""
        if self._measure:
            self.comparison = Comparison(self.hook_name, self.first_compressed + WARM_UP, self._measure)

    @property
    def _is_plain(self) -> bool:
        """Whether this step sends its gradients in full, for the comparison."""
        return self.comparison is not None and self.comparison.is_plain(self.n_steps - 1)

    def _begin_step(self, device: torch.device) -> None:
        """Measure, at the first exchange of a step."""
        step, now, comparison = self.n_steps, time.perf_counter(), self.comparison
        self.n_steps += 1
        is_compared = comparison is not None and comparison.first <= step <= comparison.end
        if self._state is not None:
            if step == self.first_compressed or (comparison is not None and step == comparison.end):
                self._state.observe(every=OBSERVED_STEPS, exact_every=COMPARED_STEPS, report=self._report)
            elif comparison is not None and step == comparison.first:
                self._state.stop_observing()  # it takes time in compressed steps only
        if comparison is not None and is_compared:
            comparison.begin(step, device)
            if step == comparison.end and self.rank == 0:
                print(f"gradwire run: {self.model_name}: {comparison.answer()}", file=sys.stderr, flush=True)
        elif self._began is not None and step > self.first_compressed:
            self.step_seconds.append(now - self._began)
        self._began = now

    def _report(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value)


class DDPCompression(CompressedModel):
    """The hook of one DistributedDataParallel.

    Args:
        ddp: the model, wrapped in PyTorch's class.
        hook, start, measure: as in `CompressedModel`; "auto" first measures `STEPS` steps.
    """

    def __init__(self, ddp: TorchDDP, hook: str, start: int, measure: int) -> None:
        super().__init__(ddp.module, hook, ddp.process_group, start, measure)
        self._group, self._module = ddp.process_group, weakref.ref(ddp.module)
        self._hook: CommHook = torch_hooks.allreduce_hook
        self._probe: ScriptProbe | None = None  # measures the first steps of "auto"
        if hook == AUTO:
            self.first_compressed = max(start, STEPS + 2)
            self._probe = ScriptProbe(ddp, self._choose, averages=True)
        else:
            self._take(hook, start)

    def _take(self, hook: str, start: int) -> None:
        """Compress with a hook from step ``start`` on, counted from now."""
        self._state, self._hook = hook_named(hook).registration(self._group, start)
        if isinstance(self._state, HookState) and (module := self._module()) is not None:
            self._state.bind(module)
        self._compare()

    def release(self) -> None:
        super().release()
        self._probe = None

    def register(self, state: object, hook: Callable[..., Any]) -> None:
        """Leave the gradients to the hook that the script registers."""
        if self._probe is not None:
            self._probe.remove()
        self.release()
        self._state = state
        self._hook = hook
        self.is_left_to_script = True

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket."""
        if self.is_left_to_script:
            return self._hook(self._state, bucket)
        if bucket.index() == 0:
            self._begin_step(bucket.buffer().device)
        if self._probe is not None:
            return self._probe.reduce(bucket)
        if self._state is None or self._is_plain:
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


class ShardedCompression(CompressedModel):
    """The attachment of one model of FSDP2, HSDP or `replicate`. Args: as in `CompressedModel`.

    Raises:
        ValueError: the hook is "auto"; or it has no wire format for FSDP2's reduce-scatter, and the model no replicas.
    """

    def __init__(self, model: nn.Module, hook: str, start: int, measure: int) -> None:
        if hook == AUTO:
            raise ValueError(
                "--hook auto measures models of DistributedDataParallel, and this one is of fully_shard or replicate. "
                "Name a hook; gradwire advise compares them for HSDP's replicas."
            )
        super().__init__(model, hook, None, start, measure)
        self._attachment: Attachment | None = None
        self.is_left_to_script = is_attached(model)
        if self.is_left_to_script:
            return
        self._attachment = attachment = _attach(model, hook, start)
        self._state, self.attached, exchange = attachment.state, attachment.report, attachment.exchange
        if self._state is None:
            self.first_compressed = 0
        self._compare()
        assert exchange is not None

        def begin() -> None:
            self._begin_step(exchange.device)
            exchange.is_plain = self._is_plain

        exchange.step_begins.append(begin)

    def release(self) -> None:
        super().release()
        before, sent = self._attachment.within_bytes if self._attachment is not None else (0, 0)
        if sent:
            self._report({"gradient_bytes": before, "sent_bytes": sent})


def _attach(model: nn.Module, hook: str, start: int) -> Attachment:
    """Attach a hook by name: between replicas from step ``start`` on, or within FSDP2's reduce-scatter."""
    if any(group.replicas is not None for group in parameter_groups(model)):
        return attach(model, *hook_named(hook).registration(None, start))
    if hook_named(hook).options.get("wire", hook) not in WIRE_FORMATS:
        raise ValueError(
            f"--hook {hook} averages between replicas, and this model is sharded by fully_shard over a 1-D mesh, which "
            f"has none. Choose one of {', '.join(['bf16', 'fp16', *QUANTIZED])}, or shard over a 2-D mesh (replicate, "
            "shard)."
        )
    return attach(model, hook)


@contextmanager
def compressed(hook: str, start: int = 2, measure: int = 0) -> Iterator[list[CompressedModel]]:
    """Meanwhile, models of PyTorch's DistributedDataParallel get a hook when they are made (see `on_ddp_init`), and
    models of FSDP2 an attachment before their first forward; yields their list.
    """
    made: list[CompressedModel] = []
    n_models: Counter[str] = Counter()
    of: WeakKeyDictionary[TorchDDP, DDPCompression] = WeakKeyDictionary()
    register = TorchDDP.register_comm_hook
    register_builtin: Any = TorchDDP._register_builtin_comm_hook

    def agree(groups: Iterable[dist.ProcessGroup]) -> None:
        """Raise on every rank unless all have the same hook and options."""
        settings = {"hook": f"gradwire run --hook {hook}", "--start": str(start), "--measure": str(measure)}
        for group in dict.fromkeys(groups):
            compare_settings(group, settings, again=False)

    def keep(compression: CompressedModel) -> None:
        name = compression.model_name
        n_models[name] += 1
        if n_models[name] > 1:
            compression.model_name = f"{name} {n_models[name]}"
        made.append(compression)

    def compress(ddp: TorchDDP) -> None:
        agree([ddp.process_group])
        if hook == NONE:
            return
        compression = of[ddp] = DDPCompression(ddp, hook, start, measure)
        register(ddp, compression, DDPCompression.reduce)
        ddp._comm_hooks.clear()  # for the Python reducer only; copies and pickles of the model would hold the state
        weakref.finalize(ddp, in_this_process(compression.release))
        keep(compression)

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
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        agree(each for group in parameter_groups(model) for each in group.process_groups())
        if hook != NONE:
            keep(ShardedCompression(model, hook, start, measure))

    with (
        mock.patch.object(TorchDDP, "register_comm_hook", register_comm_hook),
        mock.patch.object(TorchDDP, "_register_builtin_comm_hook", register_builtin_comm_hook),
        on_ddp_init(compress),
        on_root_init(attach_root),
    ):
        yield made
