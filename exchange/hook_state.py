"""`HookState`: options and memory of a hook, and `HookState.run`, which averages a bucket. See docs/writing-a-hook.md.

A state has options, memory by parameter name, and a step count. The handshake between the ranks, checkpoints for any
world size, resynchronization after errors, pickling and telemetry follow from the declaration of its memory.

In `run`, a bucket goes through `Handshake.agree`, which compares the settings of the ranks, once;
`StateMemory.memory_of`, which finds its memory; and `reduce_bucket`, which runs the algorithm. On a GPU, `replayed`
repeats recorded steps.
"""

import functools
import io
import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Algorithm, Connections, GroupTransport, Transport, connections_of
from gradwire.comm.store_collectives import RanksMissing, named_barrier
from gradwire.comm.torch_internals import EndCallback
from gradwire.compress import Step, cast_all_reduce
from gradwire.compress.memory import BucketMemory, Memory, MemoryByName
from gradwire.exchange.bucket import Bucket, GradBucket
from gradwire.exchange.compilation import EarlyCompilation
from gradwire.exchange.decorators import ddp_hook, described, zero_copy
from gradwire.exchange.memory import Scaler, StateDict, StateMemory
from gradwire.exchange.names import ParameterNames, check_patterns
from gradwire.exchange.plans import replayed
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import HookSettings
from gradwire.exchange.telemetry import Telemetry
from gradwire.validation import MAX_COUNT, check_count, check_counts, check_entries, check_whole_number

__all__ = ["BucketMemory", "HookSettings", "HookState", "Memory", "Step", "hook_for"]

CHECK_EVERY = 1000  # steps per check of the error memory
PREPARE_TIMEOUT = timedelta(minutes=2)
STATE_DICT_TIMEOUT = timedelta(seconds=10)  # early: a waiting rank is usually the only caller

Hook = TypeVar("Hook", bound=Callable[..., Any])


def hook_for(kind: type["HookState"]) -> Callable[[Hook], Hook]:
    """Decorate a hook ``hook(state, bucket)`` that calls ``state.run``, for states of type ``kind``.

    The hook reads and writes gradients in place on gradwire's DDP. It raises TypeError for another state.

    Raises:
        TypeError: ``kind`` is not a subclass of `HookState`.
    """
    if not (isinstance(kind, type) and issubclass(kind, HookState)):
        raise TypeError(f"hook_for was given {kind!r}; expected the class of the state: @hook_for(MyState).")
    return lambda hook: zero_copy(ddp_hook(kind)(hook))


@functools.cache
def _options_reader(kind: type, local: frozenset[str]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of the options that must be equal on all ranks, and a function that returns their values."""
    names = tuple(each.name for each in fields(kind) if each.name not in local)
    # With a single name, attrgetter returns the value itself, not a tuple.
    values = operator.attrgetter("__class__.__name__", *names) if names else lambda options: (kind.__name__,)
    return ("options", *names), values


class StepCount:
    """Counts steps. The buckets of a step come in order, but any of them may be skipped.

    Attributes:
        ended: number of steps that have ended.
        is_open: whether a bucket of the next step has come, and its last one has not.
    """

    def __init__(self) -> None:
        self.ended, self.is_open = 0, False
        self._latest = 0  # position of the latest bucket

    def begins(self, position: int) -> bool:
        """Note a bucket; returns whether it is the first one of a step."""
        is_first, self._latest = not self.is_open or position <= self._latest, position
        return is_first

    def end(self) -> None:
        """Count a step."""
        self.ended, self.is_open = min(self.ended + 1, MAX_COUNT), False

    def number(self, position: int) -> int:
        """Number of the step to which a bucket at this position would belong."""
        return self.ended + (self.is_open and position <= self._latest)


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
    steps: StepCount

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
        self.steps = StepCount()
        self._check: Telemetry | None = None  # measures one step of many, while nobody observes the state
        self._late_end = EndCallback()  # `_end_open_step`, at the end of a backward without a last bucket
        self._start = first_compressed_step(options)
        self._counts: dict[str, list[int]] = {}  # further numbers of a checkpoint by entry, equal on all ranks
        self._applied: dict[str, object] | None = None  # settings for which the buckets were made
        self._patterns_match = False  # whether every name pattern in the options is known to match a parameter
        self._compilation = EarlyCompilation()
        self._prepared_checkpoint: StateDict | None = None  # the result of `state_dict` until the next step

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
        return self.steps.ended

    @iter.setter
    def iter(self, iteration: int) -> None:
        check_count("iter", iteration)
        self.steps.ended, self.steps.is_open = iteration, False
        self.handshake.expect()

    def run(self, bucket: GradBucket | Bucket, algorithm: Callable[[Step], Algorithm[None]]) -> Future[Tensor]:
        """Average a bucket with ``algorithm``, in bucket order; the future has the result.

        Steps before the option ``start_iter``, and sparse gradients, take the plain all-reduce.

        Args:
            bucket: the gradients, of either DDP. Overwritten with their mean.
            algorithm: an ``async`` function of a `Step`. It reads ``step.gradients``, awaits collectives of
                ``step.transport``, and writes the mean into ``step.results``, with the same bits on all ranks.

        Raises:
            RuntimeError: the ranks have different hooks, options, step counts, memory or loss scales, or options need
                parameter names that are not known.
            ValueError: the state belongs to another model, or its loaded memory does not fit the model.
        """
        bucket = Bucket.of(bucket, self.bucket_order)
        if bucket.ends_late:
            self._late_end.queue(self._end_open_step)
        begins = self._begin_bucket(bucket.position)
        names = bucket.names or self.names.in_bucket(bucket, self._needs_names)
        connections = self.handshake.agree(self, bucket, self._process_group, names)
        if begins:
            self._match_scale(connections)
        if (future := replayed(self, bucket, connections, algorithm, self.steps.ended)) is not None:
            return future
        if not self._patterns_match:
            self.names.note(names, bucket)
            if self.names.is_complete:
                check_patterns(self.options, self.names.known())
                self._patterns_match = True
        iteration, memory = self.steps.ended, None
        if not bucket.is_sparse:
            if iteration >= self._start:
                memory = self.prepare(bucket, names, connections.group)
            elif self.compiles_early:
                self._compilation.compile(bucket, names, connections, algorithm, self.make_bucket, iteration)
        self._count_bucket(bucket, memory)
        chosen = cast_all_reduce if memory is None else algorithm
        return reduce_bucket(connections, bucket, chosen, self, memory=memory, iteration=iteration, names=names)

    def _variant(self, number: int) -> Hashable:
        return number >= self._start, self._is_checked(number)

    def _begin_bucket(self, position: int) -> bool:
        self._prepared_checkpoint = None
        if begins := self.steps.begins(position):
            self._begin_step()
        return begins

    def _match_scale(self, connections: Connections) -> None:
        self.memory.match_scale(connections)

    def _count_bucket(self, bucket: Bucket, memory: Any) -> None:
        self.steps.is_open = True
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
        return self.memory.memory_of(bucket, names, group)

    def _begin_step(self) -> None:
        self._end_open_step()
        self._check_errors()

    def _is_checked(self, number: int) -> bool:
        """Whether step ``number`` compares the error memory with the gradient, to warn if it is large."""
        return number % CHECK_EVERY == CHECK_EVERY - 1 and number >= self._start and "errors" in self.memory.declared

    def _check_errors(self) -> None:
        """Report the latest check, and prepare the check of this step."""
        if self._check is not None:
            self._check.flush()  # warns
        elif self._is_checked(self.iter):
            self._check = Telemetry(self, every=1, exact_every=1)

    def _measurer(self, number: int) -> Telemetry | None:
        """The measurements of step ``number``: those of `observe`, else those of the check of the error memory."""
        return self.telemetry or (self._check if self._is_checked(number) else None)

    def _end_open_step(self) -> None:
        """End a step, if one is open, whose last bucket was skipped or went to another hook."""
        if self.steps.is_open:
            self._count_step()

    def _count_step(self) -> None:
        self.steps.end()
        if self.memory.declared:
            self.names.is_closed = True

    # Options.

    def _compared_options(self) -> dict[str, object]:
        if self.options is None:
            return {"hook": self.hook_name}
        kind: type = type(self.options)
        names, values = _options_reader(kind, self.local_options)
        return {"hook": self.hook_name, **dict(zip(names, values(self.options), strict=True))}

    def _apply_settings(self, settings: dict[str, object]) -> None:
        """Validate options that were assigned or modified since the last step, and drop the buckets: new ones start
        from their errors. The handshake calls it on all ranks.
        """
        if self._applied == settings:
            return
        if self.options is not None:
            self.options = replace(self.options)  # validates: dictionaries may have been modified in place
        self._start = first_compressed_step(self.options)
        self._compilation.restart(self._start)
        self.memory.drop_buckets()
        self.handshake.revoke()
        is_first, self._applied, self._patterns_match = self._applied is None, settings, False
        if is_first and self.iter < self._start and dist.get_rank(self._group) == 0:
            # Two plain steps are the usual default, because DDP rebuilds its buckets after the first: no warning.
            level = logging.INFO if self._start <= 2 else logging.WARNING
            text = "%s compresses from step %d on, and sends gradients in full until then."
            logging.getLogger(type(self).__module__).log(level, text, self.hook_name, self._start)

    # Memory.

    def make_bucket(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        names: Sequence[str],
        transport: Transport,
        earlier: MemoryByName,
    ) -> BucketMemory | None:
        """The memory of a new bucket, which starts from that of earlier ones, or from zeros.

        Args:
            parameters: tensors in the layouts of the gradients, which may be complex.
            dtype: real dtype of the gradients.
            names: parameter names.
            transport: transport of the algorithm.
            earlier: memory of earlier buckets, by entry and parameter name. Not modified.

        Returns:
            A `BucketMemory`; None to send the bucket uncompressed.
        """
        return self.memory.declared_memory(parameters, dtype, names, earlier)

    def follow_scaler(self, scaler: Scaler | None) -> None:
        """Multiply the error memory by the same factor as the scale of a gradient scaler whenever that changes.

        Errors are parts of earlier gradients, in the scale of their step. Without this, they count twice or half after
        a change of the scale by 2. With it, nothing is rounded if the factor is a power of two.

        The scale is read before the first bucket of each step. On a GPU, the host waits there for the forward pass, as
        it does in ``scaler.step``. If the scale has changed on any rank, the ranks compare theirs: if they differ, or
        if some ranks follow no scaler, that step raises RuntimeError on every rank.

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
        self._prepared_checkpoint = None
        self._prepared_checkpoint = self._collected("prepare_checkpoint()", PREPARE_TIMEOUT)

    def state_dict(self) -> StateDict:
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
        if self._prepared_checkpoint is not None:
            return {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in self._prepared_checkpoint.items()
            }
        try:
            return self._collected("state_dict()", STATE_DICT_TIMEOUT)
        except RanksMissing as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error

    def merge_shards(self, saved: StateDict, shards: Sequence[dist.ProcessGroup]) -> StateDict:
        """Merge the entries of a `state_dict` that have no shape over the shards of a model. A collective call.

        Raises:
            NotImplementedError: they depend on the shards.
        """
        raise NotImplementedError(
            f"The {', '.join(saved)} of {type(self).__name__} cannot be loaded with another number of shards. Save "
            "state.state_dict() of every rank in a separate file, and resume with the same mesh."
        )

    def _collected(self, call: str, timeout: timedelta) -> StateDict:
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
        connections = connections_of(group)
        named_barrier(group, f"{kind}.{call}", timeout, connections.check_peers)
        self.memory.match_scale(connections)
        self._initialize(self.names.compressible())
        entries = {entry: self.memory.merged(entry) for entry in self.memory.declared}
        return {"iter": self.iter, **entries, **self._counts}

    def _initialize(self, parameters: Mapping[Tensor, str]) -> None:
        """Before a checkpoint: allocate memory that no step has used and zeros cannot stand for."""

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
        self._prepared_checkpoint = None
        self._counts = {entry: list(saved[entry]) for entry in self._counts}
        self.iter = saved["iter"]

    def _handshake_facts(self) -> dict[str, object]:
        """The number of steps; after a load also numbers of tensors, and digests of those equal on all ranks."""
        return {"iter": self.iter, **(self.memory.loaded_facts() if self.handshake.is_loaded_anew else {})}

    def replicated_state(self) -> StateDict:
        """The part of the state that is equal on all ranks: numbers and tensors, in dictionaries with string keys."""
        return {"iter": self.iter, **self._counts, **self.memory.replicated()}

    def load_replicated_state(self, replicated: StateDict) -> None:
        """Continue from the `replicated_state` of another rank; keep this rank's error memory."""
        self.memory.restore(replicated)
        self._restored(replicated)

    def __getstate__(self) -> StateDict:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch's hook states."""
        self.memory.match_scale()
        own = {entry: self.memory.trained(entry) for entry in self.memory.declared}
        memory = {"iter": self.iter, **own, **self._counts}
        return {"options": option_values(self.options), "memory": memory, "loaded": self.memory.loaded}

    def __setstate__(self, state: StateDict) -> None:
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


def option_values(options: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; empty for None."""
    return {each.name: getattr(options, each.name) for each in fields(options)} if options is not None else {}


def share_hook_state(state: HookState, transport: GroupTransport, source: int, device: torch.device) -> None:
    """Load the replicated part of the hook state of rank ``source`` on every rank. A collective call."""
    saved = io.BytesIO()
    if transport.rank == source:
        torch.save(state.replicated_state(), saved)
    size = torch.tensor([saved.tell()], device=device)
    transport.wait(transport.broadcast(size, source))
    content = bytearray(saved.getvalue() if transport.rank == source else int(size))
    message = torch.frombuffer(content, dtype=torch.uint8)  # shares the memory of `content`
    sent = message.to(device)
    transport.wait(transport.broadcast(sent, source))
    message.copy_(sent)
    state.load_replicated_state(torch.load(io.BytesIO(content), weights_only=True))
