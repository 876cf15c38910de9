"""`HookState`: options and memory of a hook, and `HookState.run`, which averages a bucket. See docs/writing-a-hook.md.

A state has options, memory by parameter name, and a step count. The handshake between the ranks, checkpoints for any
world size, resynchronization after errors, pickling and telemetry follow from the declaration of its memory.
"""

import atexit
import functools
import io
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm import (
    Algorithm,
    Connections,
    GroupTransport,
    IdleTransport,
    Transport,
    Workspace,
    connections_of,
    run_algorithm,
)
from gradwire.comm.store_collectives import RanksMissing, named_barrier
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.compress import Gradients, Step, cast_all_reduce
from gradwire.compress._validation import (
    MAX_COUNT,
    check_count,
    check_counts,
    check_entries,
    check_whole_number,
)
from gradwire.compress.memory import BucketMemory, Memory, MemoryByName
from gradwire.hooks._bucket import (
    Bucket,
    GradBucket,
    check_process_group,
    ddp_hook,
    described,
    is_gradwire_hook,
    reduce_bucket,
    replayed,
    zero_copy,
)
from gradwire.hooks._handshake import Handshake, check_same_ranks
from gradwire.hooks._memory import Scaler, StateMemory
from gradwire.hooks._names import ParameterNames, check_patterns, registered_wrappers
from gradwire.hooks.telemetry import Report, Telemetry
from gradwire.kernels import (
    dispatch,
    gradient_layout,
    is_capturing,
)

__all__ = ["BucketMemory", "HookSettings", "HookState", "Memory", "Step", "hook_for"]


def __dir__() -> list[str]:
    return __all__


_PYTORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
PREPARE_TIMEOUT = timedelta(minutes=2)
STATE_DICT_TIMEOUT = timedelta(seconds=10)  # early: a waiting rank is usually the only caller

Hook = TypeVar("Hook", bound=Callable[..., Any])
State = TypeVar("State", bound=type)


def hook_for(kind: type["HookState"]) -> Callable[[Hook], Hook]:
    """Decorate a hook ``hook(state, bucket)`` that calls ``state.run``, for states of type ``kind``.

    The hook reads and writes gradients in place on gradwire's DDP. It raises TypeError for another state.

    Raises:
        TypeError: ``kind`` is not a subclass of `HookState`.
    """
    if not (isinstance(kind, type) and issubclass(kind, HookState)):
        raise TypeError(f"hook_for was given {kind!r}; expected the class of the state: @hook_for(MyState).")
    return lambda hook: zero_copy(ddp_hook(kind)(hook))


def with_option_attributes(options: type) -> Callable[[State], State]:
    """Decorate a state: every option is also an attribute, whose assignment validates all options together."""

    def option(name: str) -> property:
        def assign(state: Any, value: object) -> None:
            if "options" not in vars(state):
                raise AttributeError(
                    f"{name} is an option: pass it to super().__init__(), or assign it after that call."
                )
            state.options = replace(state.options, **{name: value})

        return property(operator.attrgetter(f"options.{name}"), assign)

    def decorate(kind: State) -> State:
        for each in fields(options):
            setattr(kind, each.name, option(each.name))
        return kind

    return decorate


@functools.cache
def _compared_options(kind: type, local: frozenset[str]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of the options that must be equal on all ranks, and a function that returns their values."""
    names = tuple(each.name for each in fields(kind) if each.name not in local)
    # With a single name, attrgetter returns the value itself, not a tuple.
    values = operator.attrgetter("__class__.__name__", *names) if names else lambda options: (kind.__name__,)
    return ("options", *names), values


class HookSettings:
    """The settings of a hook, which must be equal on all ranks, and its telemetry.

    States of hooks derive from this class; for a hook without a state, its module has an instance.

    Attributes:
        hook_name: name of the hook.
        handshake: the process groups that have agreed on the settings.
        telemetry: the measurements, while the state is observed; else None.
        names: the names of parameters; None if the hook needs none.
        memory: the memory by parameter name; None if the hook has none.
    """

    _serves_one_model = False  # whether the state takes the process group of the model that it is registered for
    _follows_model = False  # whether ``process_group`` was taken from the model

    telemetry: Telemetry | None = None
    names: ParameterNames | None = None
    memory: StateMemory | None = None
    _step_in_progress: int | None = None  # its number, from 1; None for a state that counts no steps

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None = None) -> None:
        self.hook_name = hook
        self.handshake = Handshake()
        self.process_group = process_group
        self._plans = WeakIdKeyDictionary()  # of buckets that have none of their own, by their first parameter

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to average over; None for the model's."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_process_group(process_group)
        self._process_group, self._follows_model = process_group, False
        self.handshake.revoke()

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._process_group or default_group()

    def _settings(self) -> dict[str, object]:
        """The hook's name and options, as plain values. Every bucket compares them, so this must be cheap."""
        return {"hook": self.hook_name}

    def _replicated(self) -> dict[str, object]:
        """Further values that a handshake compares: counters, and digests of loaded memory."""
        return {}

    def _apply_settings(self, settings: dict[str, object]) -> None:
        """Apply settings that all ranks have agreed on; they may have changed since the last step."""

    # Recorded steps; see `gradwire.hooks._plans`.

    def _step_of(self, position: int) -> int:
        """Number of the step to which a bucket at this position would belong now; 0 if steps are not counted."""
        return 0

    def _variant(self, number: int) -> Hashable:
        """What the host decides about step ``number``: a recorded step serves those of the same variant."""
        return None

    def _begin_bucket(self, position: int) -> None:
        """Note that a bucket is launched. The buckets of a step come in order, but any may be skipped."""

    def _count_bucket(self, bucket: Bucket, memory: Any) -> None:
        """Note that a bucket with this memory has raised no error."""

    # Telemetry. See docs/telemetry.md for the metrics.

    def observe(self, *, every: int = 50, exact_every: int = 0, report: Report | None = None) -> None:
        """Measure one in ``every`` steps from now on. Call it on every rank, between the same two steps.

        Measuring does not change the result of a step. It computes the norms of the result and the error memory, and
        reads them in a later step, without waiting for the device. The last ones are read when the state is released or
        the interpreter exits.

        Args:
            every: number of steps per measured step, at least 1.
            exact_every: number of steps per comparison with the exact mean; 0 for no comparisons. A comparison takes an
                uncompressed all-reduce in fp32 and two flat copies of each bucket. Must be equal on all ranks.
            report: called with the `metrics` of each measured step, in the training thread; see `to_jsonl`,
                `to_tensorboard` and `to_wandb`. Usually passed on one rank only. Its first exception is logged, with a
                traceback; none ends the training.

        Raises:
            ValueError: a number of steps is out of range.
        """
        check_whole_number("every", every, "a whole number of steps, at least 1", 1)
        check_whole_number("exact_every", exact_every, "a whole number of steps, at least 0", 0)
        if self.telemetry is not None:
            self.telemetry.close()
        self.telemetry = Telemetry(self, every, exact_every, report)
        # The latest function runs first: before a logger that was set up earlier ends.
        atexit.register(_stop_at_exit, weakref.ref(self))

    def stop_observing(self) -> None:
        """Report the steps measured so far, and stop measuring. Call it on every rank, between the same two steps."""
        if self.telemetry is not None:
            self._warn_if_unused(self.telemetry)
            self.telemetry.close()
        self.telemetry = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the latest measured step; empty before the first one has ended.

        Warns if no model uses the state.

        Raises:
            RuntimeError: `observe` was not called.
        """
        telemetry = self.telemetry
        if telemetry is None:
            raise RuntimeError(
                f"This {type(self).__name__} is not measured. Call state.observe() on every rank before the steps "
                "that you want to measure."
            )
        self._warn_if_unused(telemetry)
        telemetry.flush()
        return dict(telemetry.latest)

    def _warn_if_unused(self, telemetry: Telemetry) -> None:
        has_model = self.names is not None and self.names.is_complete
        if not telemetry.has_begun and not has_model and not registered_wrappers(self):
            warnings.warn(
                f"This {type(self).__name__} is observed, but has no model, so nothing is measured. Register it on the "
                "model: model.register_comm_hook(state, hook).",
                stacklevel=3,
            )

    def _device_counters(self) -> Mapping[str, Tensor]:
        """Further totals among the metrics, one element each."""
        return {}


@functools.cache
def settings_of(hook: str) -> HookSettings:
    """The settings of a hook without a state."""
    return HookSettings(hook)


def _stop_at_exit(state: weakref.ref[HookSettings]) -> None:
    if (observed := state()) is not None:
        observed.stop_observing()


class HookState(HookSettings):
    """Base class of hook states: options, memory by parameter name, and a step count, for one model.

    A subclass declares its memory and has an algorithm, which its hook passes to `run`. Memory named "errors" is error
    memory: the part of earlier gradients that was not applied yet. With ``merge="sum"`` its unit is the mean gradient,
    with ``merge="mean"`` the gradient of one rank.

    Args:
        hook: name of the hook.
        process_group: the ranks to average over; None for the model's.
        options: a frozen dataclass with values that must be equal on all ranks; None without options. Its field
            ``start_iter``, if there is one, is the number of plain steps before the first compressed one: 0 compresses
            from the first step on, before DDP rebuilds its buckets.
        memory: declarations by name of the entry in a checkpoint; None without memory.

    Attributes:
        memory: the tensors: ``memory.tensors("errors")`` are this rank's, by parameter name.
        names: the names of parameters.
        local_options: names of the options that may differ between ranks.
        compiles_early: whether plain steps run the algorithm once on zeros, for every bucket, so that Triton compiles
            its kernels then. The algorithm must change nothing but its `Step`.
        options: the options. May be replaced between two steps, equally on all ranks.
        process_group: the ranks to average over; None for the model's.
        iter: number of steps so far. Must be equal on all ranks, which compare it in the step after an assignment.

    Raises:
        TypeError: ``options`` is not a frozen dataclass, or ``process_group`` is not a process group.
        ValueError: ``start_iter`` is not a whole number, or is negative.
    """

    local_options: ClassVar[frozenset[str]] = frozenset()
    compiles_early: ClassVar[bool] = False
    _serves_one_model = True
    names: ParameterNames
    memory: StateMemory

    def __init__(
        self,
        hook: str,
        process_group: dist.ProcessGroup | None = None,
        options: Any = None,
        memory: Mapping[str, Memory] | None = None,
    ) -> None:
        super().__init__(hook, process_group)
        parameters = getattr(type(options), "__dataclass_params__", None)
        if options is not None and not getattr(parameters, "frozen", False):
            raise TypeError(f"options is {options!r}; expected an instance of a frozen dataclass, or None.")
        self.options = options
        self.names = ParameterNames(self)
        self.memory = StateMemory(self, memory or {})
        if type(self).make_bucket is HookState.make_bucket:
            for entry, declared in self.memory.declared.items():
                if declared.shape is None:
                    raise TypeError(
                        f"The memory {entry!r} of {type(self).__name__} is {declared!r}; expected a shape, such as "
                        "shape=lambda gradient: (gradient.numel(),). Only a class that overrides make_bucket may do "
                        "without."
                    )
        self._iter = 0
        self._start = first_compressed_step(options)
        self._counts: dict[str, list[int]] = {}  # further numbers of a checkpoint by entry, equal on all ranks
        self._latest_index: int | None = None  # index of the latest bucket
        self._is_counted = True  # whether ``iter`` includes the latest step
        self._applied: dict[str, object] | None = None  # settings for which the buckets were made
        self._patterns_match = False  # whether every name pattern in the options is known to match a parameter
        self._has_announced_start = False
        self._first_step: int | None = None  # of this object, whose buckets DDP will rebuild
        self._compiled: set[object] = set()  # names and dtypes of the buckets whose kernels are compiled
        self._prepared: dict[str, Any] | None = None  # the result of `state_dict` until the next step

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in option_values(self.options).items())
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    # Names of parameters.

    def bind(self, module: torch.nn.Module) -> None:
        """Take parameter names from ``module``.

        Rarely needed: gradwire's DDP binds the state when the hook is registered, and the model in
        PyTorch's DDP is found at the first step or checkpoint. It is not found if several models share
        parameters and your own hook passes the state on, or if ``gc.freeze()`` has hidden the DDP.
        Parameters are numbered then. Training works, but options by name and checkpoints raise. To prevent that, call
        `bind` before the first step, on every rank.

        Args:
            module: the model, wrapped or not.

        Raises:
            ValueError: the state is bound to another model or has trained without names, or a name pattern in the
                options matches no parameter of ``module``.
        """
        self.names.bind(module)
        check_patterns(self.options, self.names.known())

    def _needs_names(self) -> str | None:
        """The part of the options that needs parameter names, as the subject of an error; None if numbers suffice."""
        return None

    # Steps.

    @property
    def iter(self) -> int:
        """Number of steps so far."""
        return self._iter

    @iter.setter
    def iter(self, iteration: int) -> None:
        check_count("iter", iteration)
        self._iter, self._is_counted = iteration, True
        self.handshake.expect()

    def run(self, bucket: GradBucket | Bucket, algorithm: Callable[[Step], Algorithm[None]]) -> Future[Tensor]:
        """Average a bucket with ``algorithm``, in bucket order; the future has the result.

        Steps before the option ``start_iter``, and sparse gradients, take the plain all-reduce.

        Args:
            bucket: the gradients, of either DDP. Overwritten with their mean.
            algorithm: an ``async`` function of a `Step`. It reads ``step.gradients``, awaits collectives of
                ``step.transport``, and writes the mean into ``step.results``, with the same bits on all ranks.

        Raises:
            RuntimeError: the ranks have different hooks, options, step counts or memory, or options need parameter
                names that are not known.
            ValueError: the state belongs to another model, or its loaded memory does not fit the model.
        """
        bucket = Bucket.of(bucket)
        self._begin_bucket(bucket.position)
        names = bucket.names or self.names.in_bucket(bucket, self._needs_names)
        connections = self.handshake.agree(self, bucket, self._process_group, names)
        if (future := replayed(self, bucket, connections, algorithm, self._iter)) is not None:
            return future
        if not self._patterns_match:
            self.names.note(names, bucket)
            if self.names.is_complete:
                check_patterns(self.options, self.names.known())
                self._patterns_match = True
        iteration, memory = self._iter, None
        if not bucket.is_sparse:
            if iteration >= self._start:
                memory = self.prepare(bucket, names, connections.group)
            elif self.compiles_early:
                _compile(self, bucket, names, connections, algorithm)
        self._count_bucket(bucket, memory)
        chosen = cast_all_reduce if memory is None else algorithm
        return reduce_bucket(connections, bucket, chosen, self, memory=memory, iteration=iteration, names=names)

    def _step_of(self, position: int) -> int:
        """Number of the step to which a bucket at this position would belong now."""
        is_first = self._latest_index is None or position <= self._latest_index
        return self._iter + (is_first and not self._is_counted)

    def _variant(self, number: int) -> Hashable:
        """Whether step ``number`` is compressed."""
        return number >= self._start

    def _begin_bucket(self, position: int) -> None:
        """Begin a step at its first bucket."""
        self._prepared = None
        latest, self._latest_index = self._latest_index, position
        if latest is None or position <= latest:
            self._begin_step()
            self._step_in_progress = self._iter + 1

    def _count_bucket(self, bucket: Bucket, memory: Any) -> None:
        """Count the step at its last bucket."""
        self._is_counted = False
        if bucket.is_final:
            self._count_step()

    def prepare(self, bucket: Bucket, names: tuple[str, ...], group: dist.ProcessGroup) -> Any:
        """The memory of a bucket in a compressed step, kept from step to step.

        Returns:
            A `BucketMemory`, whose items are the declared memory, such as ``["errors"]``: a list with one tensor per
            parameter. None to send the bucket uncompressed.

        Raises:
            ValueError: loaded memory does not fit the model.
        """
        return self.memory.of_bucket(bucket, names, group)

    def _begin_step(self) -> None:
        """Begin a step. The one before ends now if its last bucket was skipped or went to another hook."""
        if not self._is_counted:
            self._count_step()
        if self.memory.scaler is not None:
            self.memory.match_scale()

    def _count_step(self) -> None:
        """Count a step that has ended."""
        self._iter, self._is_counted = min(self._iter + 1, MAX_COUNT), True
        if self.memory.declared:
            self.names.is_closed = True

    # Options.

    def _settings(self) -> dict[str, object]:
        """The hook and its options, which must be equal on all ranks."""
        if self.options is None:
            return {"hook": self.hook_name}
        kind: type = type(self.options)
        names, values = _compared_options(kind, self.local_options)
        return {"hook": self.hook_name, **dict(zip(names, values(self.options), strict=True))}

    def _apply_settings(self, settings: dict[str, object]) -> None:
        """Apply options that were assigned or modified since the last step: new buckets, which start from the old
        errors. The handshake calls it on all ranks.

        Raises:
            ValueError: an option has the wrong type or is out of range.
        """
        if self._applied == settings:
            return
        if self.options is not None:
            self.options = replace(self.options)  # validates: dictionaries may have been modified in place
        self._start = first_compressed_step(self.options)
        self._compiled.clear()
        self.memory.drop_buckets()
        self.handshake.revoke()
        self._applied, self._patterns_match = settings, False
        if not self._has_announced_start and self.iter < self._start and dist.get_rank(self._group) == 0:
            # Two plain steps are the usual default, because DDP rebuilds its buckets after the first: no warning.
            level = logging.INFO if self._start <= 2 else logging.WARNING
            text = "%s compresses from step %d on, and sends gradients in full until then."
            logging.getLogger(type(self).__module__).log(level, text, self.hook_name, self._start)
        self._has_announced_start = True

    # Memory.

    def make_bucket(
        self, parameters: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str], transport: Transport
    ) -> BucketMemory | None:
        """The memory of a new bucket, which starts from that of earlier ones, or from zeros.

        Args:
            parameters: tensors in the layouts of the gradients, which may be complex.
            dtype: real dtype of the gradients.
            names: parameter names.
            transport: transport of the algorithm.

        Returns:
            A `BucketMemory`; None to send the bucket uncompressed.
        """
        return self.memory.make_bucket(parameters, dtype, names)

    def follow_scaler(self, scaler: Scaler | None) -> None:
        """Multiply the error memory by the same factor as the scale of a gradient scaler whenever that changes.

        Errors are parts of earlier gradients, in the scale of their step. Without this, they count twice or half after
        a change of the scale by 2. With it, nothing is rounded if the factor is a power of two.

        The scale is read before the first bucket of each step. On a GPU, the host waits there for the forward pass, as
        it does in ``scaler.step``.

        Args:
            scaler: a ``torch.amp.GradScaler``, or another object with ``get_scale()``. It is not saved in checkpoints:
                save and load its own state. None to follow none.

        Raises:
            TypeError: ``scaler`` has no method ``get_scale``.

        Examples:
            >>> scaler = torch.amp.GradScaler()
            >>> state.follow_scaler(scaler)
        """
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler is {described(scaler)}; expected a torch.amp.GradScaler, or None.")
        self.memory.follow(scaler)

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(error.nbytes for error in self.memory.residuals())

    # Checkpoints.

    def prepare_checkpoint(self) -> None:
        """Collect the errors of all ranks, and keep the copy for `state_dict` until the next step.

        A collective call: every rank must make it, between two steps. Afterwards, any rank may call `state_dict` alone,
        for trainers that save on rank 0. The copy takes CPU memory on every rank.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within two minutes.

        Examples:
            >>> state.prepare_checkpoint()
            >>> if dist.get_rank() == 0:
            ...     torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        """
        self._prepared = None
        self._prepared = self._collected("prepare_checkpoint()", PREPARE_TIMEOUT)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain CPU tensors and numbers, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all ranks. Between
        `prepare_checkpoint` and the next step, any rank may call it alone: it then returns the prepared copy, and two
        such calls share tensors.

        Every parameter with a dense gradient has an entry even before the first step, so that
        ``torch.distributed.checkpoint`` can load: register the hook or `bind` the model before you load.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten seconds. A later
                call on all ranks works.
        """
        if self._prepared is not None:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._prepared.items()}
        try:
            return self._collected("state_dict()", STATE_DICT_TIMEOUT)
        except RanksMissing as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error

    def merge_shards(self, saved: dict[str, Any], shards: Sequence[dist.ProcessGroup]) -> dict[str, Any]:
        """Merge the entries of a `state_dict` that have no shape over the shards of a model. A collective call.

        Raises:
            NotImplementedError: they depend on the shards.
        """
        raise NotImplementedError(
            f"The {', '.join(saved)} of {type(self).__name__} cannot be loaded with another number of shards. Save "
            "state.state_dict() of every rank in a separate file, and resume with the same mesh."
        )

    def _collected(self, call: str, timeout: timedelta) -> dict[str, Any]:
        """A new `state_dict`, once every rank has made the same call."""
        kind, group = type(self).__name__, self._group
        self.names.search()
        self.names.require(f"A checkpoint of a {kind}")
        if not self.names.is_complete and self.iter == 0 and not self.memory.is_loaded:
            raise RuntimeError(
                f"This {kind} has no model yet, so the entries of its checkpoint are not known. Register it with "
                f"model.register_comm_hook(state, {self.hook_name}), or call state.bind(model), before it is saved or "
                "loaded."
            )
        named_barrier(group, f"{kind}.{call}", timeout, connections_of(group).check_peers)
        self.memory.match_scale()
        self._initialize(self.names.compressible())
        entries = {entry: self.memory.merged(entry) for entry in self.memory.declared}
        return {"iter": self.iter, **entries, **self._counts}

    def _initialize(self, parameters: Mapping[Tensor, str]) -> None:
        """Allocate memory, before it is saved, that no step has used yet and that does not start from zeros."""

    def _keeps(self, entry: str) -> bool:
        """Whether every parameter will have this memory, from zeros, under the current options."""
        return self.memory.declared[entry].shape is not None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size.

        Memory is checked against the parameters; if those are not known yet, before the first compressed step.

        Raises:
            ValueError: an entry is missing, has the wrong type, dtype or shape, is not finite, or is out of range. The
                message names the entry. The state is not modified.
        """
        check_entries(state_dict, type(self).__name__, ("iter", *self.memory.declared, *self._counts))
        check_count("iter", state_dict["iter"])
        for entry, counts in self._counts.items():
            check_counts(entry, state_dict[entry], len(counts))
        self.memory.check(state_dict)
        self.memory.load(state_dict)
        self._restored(state_dict)

    def _restored(self, saved: Mapping[str, Any]) -> None:
        """Take the counts that belong to restored memory."""
        self._prepared = None
        self._counts = {entry: list(saved[entry]) for entry in self._counts}
        self.iter = saved["iter"]

    def _replicated(self) -> dict[str, object]:
        """The number of steps; after a load also numbers of tensors, and digests of those equal on all ranks."""
        return {"iter": self.iter, **(self.memory.loaded_facts() if self.handshake.is_loaded_anew else {})}

    def replicated_state(self) -> dict[str, Any]:
        """The part of the state that is equal on all ranks: numbers and tensors, in dictionaries with string keys."""
        return {"iter": self.iter, **self._counts, **self.memory.replicated()}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Continue from the `replicated_state` of another rank; keep this rank's error memory."""
        self.memory.restore(replicated)
        self._restored(replicated)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch's hook states."""
        self.memory.match_scale()
        own = {entry: self.memory.trained(entry) for entry in self.memory.declared}
        memory = {"iter": self.iter, **own, **self._counts}
        return {"options": option_values(self.options), "memory": memory, "loaded": self.memory.loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = signature(type(self)).parameters  # pickles of earlier versions may have others
        self.__init__(None, **{name: value for name, value in state["options"].items() if name in known})  # type: ignore[misc]
        memory, loaded = state["memory"], state.get("loaded", {})  # pickles of earlier versions may lack "loaded"
        if "iter" in state:  # and have the step count here
            memory = {"iter": state["iter"], **memory}
        self.memory.restore(memory, loaded)
        self._restored(memory)

    def _check_shapes(self, memory: MemoryByName, layouts: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless loaded memory without a declared shape fits these gradients, by parameter name."""


def first_compressed_step(options: Any) -> int:
    """Number of the first compressed step: the option ``start_iter``, or 0 without it."""
    start: int = getattr(options, "start_iter", 0)
    check_whole_number("start_iter", start, "a whole number of steps, at least 0", 0)
    return start


def _compile(
    state: HookState,
    bucket: Bucket,
    names: tuple[str, ...],
    connections: Connections,
    algorithm: Callable[[Step], Algorithm[None]],
) -> None:
    """Run two steps of ``algorithm`` on zeros, without collectives, in memory of their own, if Triton would compile for
    them. Two steps: alternating PowerSGD launches different kernels in odd ones.

    The buckets of the first step, of which one may hold the whole model, are left out: they are rebuilt.
    """
    device, key, now = bucket.device, (names, bucket.dtype), state.iter
    if state._first_step is None:
        state._first_step = now
    if now == state._first_step < state._start - 1 or key in state._compiled:
        return
    if not dispatch.use_triton(device) or dispatch.is_interpreted() or is_capturing(device):
        return
    state._compiled.add(key)
    with suppress(torch.OutOfMemoryError):  # the first compressed step compiles, then
        transport = IdleTransport(connections.executor(device).transport)
        kept, state.memory = state.memory, StateMemory(state, state.memory.declared)
        try:
            parameters = [gradient_layout(parameter) for parameter in bucket.parameters()]
            memory = state.make_bucket(parameters, bucket.dtype, names, transport)
        finally:
            state.memory = kept
        if memory is None:
            return
        layout = memory.layout
        zeros = Gradients(layout.views(torch.zeros(layout.numel, dtype=layout.dtype, device=device)), layout)
        workspace = Workspace(device)
        for number in (now, now + 1):
            run_algorithm(algorithm(Step(zeros, zeros, memory, number, transport, workspace, names)), transport)


def option_values(options: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; empty for None."""
    return {each.name: getattr(options, each.name) for each in fields(options)} if options is not None else {}


def share_hook_state(state: HookState, transport: GroupTransport, source: int, rank: int, device: torch.device) -> None:
    """Load the replicated part of the hook state of rank ``source`` on every rank. A collective call."""
    saved = io.BytesIO()
    if rank == source:
        torch.save(state.replicated_state(), saved)
    size = torch.tensor([saved.tell()], device=device)
    transport.wait(transport.broadcast(size, source))
    content = bytearray(saved.getvalue() if rank == source else int(size))
    message = torch.frombuffer(content, dtype=torch.uint8)  # shares the memory of `content`
    sent = message.to(device)
    transport.wait(transport.broadcast(sent, source))
    message.copy_(sent)
    state.load_replicated_state(torch.load(io.BytesIO(content), weights_only=True))


def check_pairing(state: object, hook: Callable[..., Any]) -> None:
    """Raise TypeError for a hook of PyTorch's with a state of gradwire's."""
    module = getattr(hook, "__module__", None) or ""
    if module.startswith(_PYTORCHS_HOOKS) and isinstance(state, HookSettings):
        name, kind = getattr(hook, "__name__", "hook"), type(state)
        raise TypeError(
            f"{name} is from PyTorch, but its state is gradwire's {kind.__name__}, which PyTorch's hook cannot use. "
            f"Import the hook from gradwire too: from {kind.__module__} import {name}."
        )


def in_group(state: Any, hook: Callable[..., Any], group: dist.ProcessGroup) -> Any:
    """The state to call a registered hook with, which averages over the ranks of its DistributedDataParallel,
    ``group``.

    A state without a process group takes ``group``, and so does one with another group of the same ranks: all of a
    model's connections fail and start again together. A state that may serve several models, or that a user's hook may
    pass on to several of gradwire's, is left as it is: `Handshake.agree` chooses the group.

    Raises:
        ValueError: the state has or is a group of other ranks.
    """
    is_ours, has_group = is_gradwire_hook(hook), isinstance(state, HookSettings)
    if not has_group and not (is_ours and isinstance(state, dist.ProcessGroup)):
        return state
    chosen = state if not has_group else None if state._follows_model else state.process_group
    if chosen is not None and chosen is not group and is_initialized_group(chosen):
        if not is_ours:
            return state
        check_same_ranks(chosen, group, "hook's process group")
    if not has_group:
        return group
    if state._serves_one_model:
        state.process_group, state._follows_model = group, True
    return state
