"""`HookState`: what a hook keeps between steps, and how it averages a bucket. See docs/writing-a-hook.md.

A state has options, memory by parameter name, and a step count. The handshake between the ranks, checkpoints for any
world size, resynchronization after errors, pickling and telemetry follow from the declaration of its memory.
"""

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from types import NoneType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Steps, Transport, Workspace, executor_for
from gradwire.comm.store_collectives import named_barrier
from gradwire.comm.torch_internals import default_group
from gradwire.compress import Gradients, cast_all_reduce
from gradwire.hooks._bucket import (
    bucket_dtype,
    check_process_group,
    ddp_hook,
    is_sparse,
    needs_state,
    reduce_bucket,
    zero_copy,
)
from gradwire.hooks._handshake import HookSettings, copied, digest
from gradwire.hooks._parameter_names import ParameterNames, compressible_parameters, is_number, plain_name
from gradwire.hooks._state_validation import MAX_COUNT, check_count, check_memory, check_model
from gradwire.hooks._types import GradBucket
from gradwire.hooks.telemetry import Observed
from gradwire.kernels import SegmentTable, as_real, compute_dtype, gradient_layout, layout_in_dtype, memory_order

__all__ = ["HookState", "Memory", "Step", "hook_for"]

# How long a rank waits for the others. `state_dict` times out early: a waiting rank is usually the only caller.
STATE_DICT_TIMEOUT = timedelta(seconds=10)
PREPARE_TIMEOUT = timedelta(minutes=2)
ERRORS = "errors"  # the entry with error memory

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Memory(NamedTuple):
    """The declaration of a tensor that a state keeps for each parameter.

    Attributes:
        merge: how the tensors of all ranks become one in a checkpoint. "sum": a resumed rank gets its share, the sum
            divided by the world size. "mean": each rank gets the mean. "same": all ranks have equal tensors.
        dtype: dtype of the tensor; None for fp32, or fp64 for fp64 gradients.
        shape: function from the real gradient to the shape of the tensor; by default the gradient's shape.
    """

    merge: Literal["sum", "mean", "same"] = "sum"
    dtype: torch.dtype | None = None
    shape: Callable[[Tensor], Sequence[int]] = lambda gradient: gradient.shape


class BucketMemory:
    """The declared memory of a bucket's parameters: ``memory["errors"]`` is a list of tensors, one per parameter.

    Attributes:
        layout: layout of the gradients.
    """

    def __init__(self, layout: SegmentTable, tensors: Mapping[str, list[Tensor]]) -> None:
        self.layout = layout
        self._tensors = tensors

    def __getitem__(self, entry: str) -> list[Tensor]:
        return self._tensors[entry]


def _zeros(declared: Memory, layout: Tensor, device: torch.device) -> Tensor:
    """The declared tensor of a parameter whose real gradient is like ``layout``, before its first step."""
    return torch.zeros(
        tuple(declared.shape(layout)), dtype=declared.dtype or compute_dtype(layout.dtype), device=device
    )


class Step(NamedTuple):
    """A bucket in one step, as an algorithm gets it.

    Attributes:
        source: the gradients, and their layout in a flat buffer.
        target: the tensors that receive the mean; may be ``source``.
        memory: what `HookState.prepare` has returned.
        iteration: number of the step.
        transport: the collectives. Await them: every rank must issue the same ones in the same order.
        workspace: provides wire buffers.
    """

    source: Gradients
    target: Gradients
    memory: Any
    iteration: int
    transport: Transport
    workspace: Workspace

    @property
    def gradients(self) -> list[Tensor]:
        """One real tensor per parameter; a complex gradient is a tensor of pairs."""
        return self.source.each(self.memory.layout)

    @property
    def results(self) -> list[Tensor]:
        """The tensors that receive the mean, like `gradients`; may be the same memory."""
        return self.target.each(self.memory.layout)


Algorithm = Callable[[Step], Steps[None]]


def hook_for(kind: type["HookState"]) -> Callable[[Hook], Hook]:
    """Decorate a hook ``hook(state, bucket)`` that calls ``state.run``, for states of type ``kind``.

    The hook reads and writes gradients in place on gradwire's DDP. It raises TypeError for another state.
    """
    return lambda hook: zero_copy(ddp_hook(needs_state(kind))(hook))


@functools.cache
def _options_of(kind: type, local: frozenset[str]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of the options that must be equal on all ranks, and a function that reads their values."""
    names = tuple(each.name for each in fields(kind) if each.name not in local) if kind is not NoneType else ()
    if len(names) > 1:
        return names, operator.attrgetter(*names)
    return names, lambda options: tuple(getattr(options, name) for name in names)


class HookState(Observed, HookSettings):
    """Base class of hook states: options, memory by parameter name, and a step count, for one model.

    A subclass declares `memory` and has an algorithm, which its hook passes to `run`. Memory named "errors" is error
    memory: the part of earlier gradients that was not applied yet. With ``merge="sum"`` its unit is the mean gradient,
    with ``merge="mean"`` the gradient of one rank.

    Args:
        hook: name of the hook.
        process_group: the ranks to average over; None for the model's.
        options: a frozen dataclass with values that must be equal on all ranks; None without options. Its field
            ``start_iter``, if there is one, is the number of plain steps before the first compressed one.

    Attributes:
        memory: declarations by name of the entry in a checkpoint.
        local_options: names of the options that may differ between ranks.
        options: the options. May be replaced between two steps, equally on all ranks.
        process_group: the ranks to average over; None for the model's.
        iter: number of steps so far, equal on all ranks, which compare it after an assignment.
    """

    memory: ClassVar[Mapping[str, Memory]] = {}
    local_options: ClassVar[frozenset[str]] = frozenset()
    follows_model = False  # whether the process group is that of the model for which the state was registered

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None = None, options: Any = None) -> None:
        super().__init__(hook)
        self._names = ParameterNames(self)
        self.options = options
        self.process_group = process_group
        self._iter = 0
        self._latest_index: int | None = None  # index of the latest bucket
        self._is_counted = True  # whether ``iter`` includes the latest step
        self._settings_of_buckets: dict[str, object] | None = None
        self._is_loaded = False  # whether the memory is from a checkpoint
        self._fits_model = True  # whether the loaded memory was compared with the model's names
        self._patterns_match = False  # whether every name pattern in the options is known to match a parameter
        self._prepared: dict[str, Any] | None = None  # the result of `state_dict` until the next step
        self._has_announced_start = False
        self._tensors: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.memory}  # by parameter name
        self._loaded: dict[str, dict[str, Tensor]] = {
            entry: {} for entry in self.memory
        }  # merged values of a checkpoint that no step has used yet
        self._memory_of: dict[tuple[str, ...], BucketMemory] = {}  # by parameter names

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._option_values().items())
        return f"{type(self).__name__}(iter={self.iter}, {options})"

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to average over; None for the model's."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_process_group(process_group)
        self._process_group, self.follows_model = process_group, False
        self._pass_on(process_group)

    def _pass_on(self, process_group: dist.ProcessGroup | None) -> None:
        """Assign a new process group to the states that this one consists of."""

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.process_group or default_group()

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
        self._names.bind(module)
        self._check_patterns()

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:
        """The names of the bucket's parameters, or numbers if they are not known.

        Raises:
            RuntimeError: `needs_names`, and the names are not known.
        """
        if hasattr(bucket, "parameter_names"):  # a bucket of gradwire's DDP
            return tuple(map(plain_name, bucket.parameter_names()))
        return self._names.of(bucket, self.needs_names())

    def needs_names(self) -> str | None:
        """The option or call that needs names, as the subject of an error message; None if numbers suffice."""
        return None

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first name pattern in the options that matches none of the names; None if all match."""
        return None

    def _check_patterns(self) -> None:
        """Raise ValueError if a pattern matches no parameter, once all names are known."""
        if not self._names.is_complete:
            return
        names = sorted(self._names.known())
        if (unmatched := self.unmatched_pattern(names)) is not None:
            numbered = all(is_number(name) for name in names)
            remedy = "Call state.bind(model), which names them, or use" if numbered else "Correct or remove it:"
            raise ValueError(
                f"{unmatched} matches none of the model's {len(names)} parameters, {', '.join(names[:5])}, ... "
                f"{remedy} patterns of whole names as in `fnmatch`, such as '*.weight'."
            )
        self._patterns_match = True

    # Steps.

    @property
    def iter(self) -> int:
        """Number of steps so far."""
        return self._iter

    @iter.setter
    def iter(self, iteration: int) -> None:
        check_count("iter", iteration)
        self.continue_at(iteration)
        self.expect_handshake()

    @property
    def start_iteration(self) -> int:
        """The first compressed step."""
        return getattr(self.options, "start_iter", 0)

    def continue_at(self, iteration: int) -> None:
        """Let ``iteration`` be the number of the next step."""
        self._iter, self._is_counted = iteration, True

    def begins_step(self, bucket: GradBucket) -> bool:
        """Whether ``bucket`` is the first of its step. Call it once for every bucket, before anything else.

        If the last bucket of the step before was skipped or went to another hook, that step is counted now.
        """
        index, latest = bucket.index(), self._latest_index
        self._latest_index = index
        if latest is not None and index > latest:  # the buckets of a step come in order, but any may be skipped
            return False
        if not self._is_counted:
            self.count_step()
        return True

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step if ``bucket``, which raised no error, is its last."""
        self._is_counted = False
        if bucket.is_last():
            self.count_step()

    def count_step(self) -> None:
        """Count a step that has ended."""
        self._iter, self._is_counted = min(self._iter + 1, MAX_COUNT), True
        if self.memory:
            self._names.close()

    def run(self, bucket: GradBucket, algorithm: Algorithm) -> Future[Tensor]:
        """Average a bucket with ``algorithm``, in bucket order; the future has the result.

        Steps before `start_iteration`, and sparse gradients, take the plain all-reduce.

        Args:
            bucket: the gradients, of either DDP. Overwritten with their mean.
            algorithm: an ``async`` function of a `Step`. It reads ``step.gradients``, awaits collectives of
                ``step.transport``, and writes the mean into ``step.results``, with the same bits on all ranks.

        Raises:
            RuntimeError: the ranks have different hooks, options, step counts or memory.
            ValueError: the state belongs to another model, or its loaded memory does not fit the model.
        """
        self._prepared = None
        self.begins_step(bucket)
        group, iteration = self.agree(bucket, self._process_group, self._recorder), self._iter
        if not self._has_announced_start:
            self._announce_start()
        self._apply_options()
        names = self.parameter_names(bucket)
        self._names.note(names, bucket)
        if not self._patterns_match:
            self._check_patterns()
        compresses = iteration >= self.start_iteration and not is_sparse(bucket)
        memory = self.prepare(bucket, names, group) if compresses else None

        def steps(source: Gradients, target: Gradients, transport: Transport, workspace: Workspace) -> Steps[None]:
            if memory is None:
                return cast_all_reduce(source, target, source.table.dtype, transport, workspace)
            return algorithm(Step(source, target, memory, iteration, transport, workspace))

        self.maybe_increase_iter(bucket)
        return reduce_bucket(group, bucket, steps, self.hook_name, recorder=self._recorder)

    def _announce_start(self) -> None:
        """Log when compression starts, at the first call and on the first rank, if it has not started yet."""
        start = self.start_iteration
        if not self._has_announced_start and self.iter < start and dist.get_rank(self._group) == 0:
            # Two plain steps are no surprise: DDP rebuilds its buckets after the first.
            level = logging.INFO if start <= 2 else logging.WARNING
            text = "%s compresses from step %d on, and sends gradients in full until then."
            logging.getLogger(type(self).__module__).log(level, text, self.hook_name, start)
        self._has_announced_start = True

    # Options.

    def _option_values(self) -> dict[str, Any]:
        return {each.name: getattr(self.options, each.name) for each in fields(self.options)} if self.options else {}

    def settings(self) -> dict[str, object]:
        """The hook and its options, which must be equal on all ranks."""
        kind: type = type(self.options)
        names, values = _options_of(kind, self.local_options)
        return {"hook": self.hook_name, **dict(zip(names, values(self.options), strict=True))}

    def _apply_options(self) -> None:
        """Apply options that were assigned or modified since the last step: make buckets anew, which keep the errors.

        Raises:
            ValueError: an option has the wrong type or is out of range.
        """
        if self._settings_of_buckets != (settings := self.settings()):
            if self.options is not None:
                self.options = replace(self.options)  # validates: dictionaries may have been modified in place
            self._settings_of_buckets, self._patterns_match = copied(settings), False
            self.drop_buckets()

    # Memory.

    def tensors(self, entry: str) -> dict[str, Tensor]:
        """This rank's memory by parameter name, with its share of a checkpoint that no step has used yet."""
        loaded = self._loaded[entry]
        return self._trained(entry) | {name: self._share(entry, each, self._group) for name, each in loaded.items()}

    def _trained(self, entry: str) -> dict[str, Tensor]:
        """This rank's memory that a step has used, by parameter name."""
        return dict(self._tensors[entry])

    def prepare(self, bucket: GradBucket, names: tuple[str, ...], group: dist.ProcessGroup) -> Any:
        """The memory of a bucket in a compressed step, allocated at its first one.

        Returns:
            A `BucketMemory`, or an object of a subclass's own with an attribute ``layout``; None to send the bucket
            uncompressed.
        """
        dtype = bucket_dtype(bucket)
        kept = self._memory_of.get(names)
        if kept is not None and kept.layout.dtype == dtype:
            return kept
        self._check_loaded(names)
        layouts = [layout_in_dtype(as_real(gradient_layout(each)), dtype) for each in bucket.parameters()]
        tensors = {
            entry: [self._tensor(entry, name, layout, group) for name, layout in zip(names, layouts, strict=True)]
            for entry in self.memory
        }
        members = set(names)  # a bucket that shared a parameter with this one no longer exists
        self._memory_of = {key: each for key, each in self._memory_of.items() if members.isdisjoint(key)}
        made = self._memory_of[names] = BucketMemory(SegmentTable(layouts), tensors)
        return made

    def _tensor(self, entry: str, name: str, layout: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The tensor of a parameter: its loaded share, that of earlier buckets, or zeros."""
        tensors, zeros = self._tensors[entry], _zeros(self.memory[entry], layout, layout.device)
        if name in self._loaded[entry]:
            tensors[name] = self._share(entry, self._loaded[entry].pop(name), group)
        kept = tensors.get(name, zeros)
        if kept.shape != zeros.shape:
            raise ValueError(
                f"The error memory of {name} has shape {tuple(kept.shape)}, its gradient {tuple(zeros.shape)}. "
                "Load the state of this model, or begin with a new one."
            )
        tensors[name] = kept.to(zeros.device, zeros.dtype)
        return tensors[name]

    def _share(self, entry: str, merged: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's part of a tensor of a checkpoint."""
        return merged / group.size() if self.memory[entry].merge == "sum" else merged.clone()

    def drop_buckets(self) -> None:
        """Drop all buckets, and keep their errors for those that follow."""
        self._memory_of = {}

    def _check_loaded(self, names: Sequence[str]) -> None:
        """Raise ValueError, before anything is sent, if the loaded memory does not fit the parameters known so far."""
        errors = self._loaded.get(ERRORS, {})
        if self._is_loaded:
            check_loaded_names(errors, names)
        if self._names.is_complete and not self._fits_model:
            check_model(errors, self._names.known())
            self._fits_model = True

    def residuals(self) -> Sequence[Tensor]:
        """This rank's error memory, for `metrics`."""
        return list(self._tensors.get(ERRORS, {}).values())

    @property
    def error_memory_bytes(self) -> int:
        """Bytes of the error memory on this rank."""
        return sum(error.nbytes for error in self.residuals())

    def take_back(self, name: str, gradient: Tensor) -> None:
        """Keep a reduced gradient that was not applied, for the next step, if the state has error memory.

        gradwire's DistributedDataParallel calls it for results of a failed step, and for a parameter that no rank used
        in a step: its ``.grad`` stays unchanged, although error feedback of earlier steps may have reduced to a nonzero
        gradient.

        Args:
            name: parameter name.
            gradient: the reduced gradient minus this rank's contribution.
        """
        error = self._tensors.get(ERRORS, {}).get(plain_name(name))
        if error is not None:
            error.add_(self._share(ERRORS, as_real(gradient), self._group))

    # Checkpoints.

    def prepare_checkpoint(self) -> None:
        """Collect the errors of all ranks, and keep the copy for `state_dict` until the next step.

        A collective call: every rank must make it, between two steps. Afterwards, any rank may call
        `state_dict` alone, for trainers that save on rank 0. The copy takes CPU memory on every rank.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within two
                minutes.

        Examples:
            >>> state.prepare_checkpoint()
            >>> if dist.get_rank() == 0:
            ...     torch.save({"model": model.state_dict(), "hook": state.state_dict()}, path)
        """
        self._prepared = None
        self._check_can_be_saved()
        named_barrier(self._group, f"{type(self).__name__}.prepare_checkpoint()", timeout=PREPARE_TIMEOUT)
        self._prepared = self._collected()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain CPU tensors and numbers, for ``torch.load(weights_only=True)``.

        A collective call: every rank must make it, between two steps. The result is equal on all
        ranks. Between `prepare_checkpoint` and the next step, any rank may call it alone: it then
        returns the prepared copy, and two such calls share tensors.

        Every parameter with a dense gradient has an entry even before the first step, so that
        ``torch.distributed.checkpoint`` can load: register the hook or `bind` the model before you
        load.

        Raises:
            RuntimeError: the parameter names are not known, or a rank has not called it within ten
                seconds. A later call on all ranks works.
        """
        if self._prepared is not None:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._prepared.items()}
        self._check_can_be_saved()
        try:
            named_barrier(self._group, f"{type(self).__name__}.state_dict()", timeout=STATE_DICT_TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} To save on some ranks only, call state.prepare_checkpoint() on every rank, then "
                "state.state_dict() where you save."
            ) from error
        return self._collected()

    def _check_can_be_saved(self) -> None:
        """Raise RuntimeError if a checkpoint would hold numbers instead of names, or no entries."""
        self._names.search()
        self._names.require(f"A checkpoint of a {type(self).__name__}")
        if self._names.module is None and self.iter == 0 and not self._is_loaded:
            raise RuntimeError(
                f"This {type(self).__name__} has no model yet, so the entries of its checkpoint are not known. "
                f"Register it with model.register_comm_hook(state, {self.hook_name}), or call state.bind(model), "
                "before it is saved or loaded."
            )

    def _collected(self) -> dict[str, Any]:
        """A new `state_dict`. A collective call."""
        return {"iter": self.iter, **{entry: self._merged(entry) for entry in self.memory}}

    def _merged(self, entry: str) -> dict[str, Tensor]:
        """The tensors of all ranks, merged as declared, on the CPU."""
        merge, own = self.memory[entry].merge, self.tensors(entry)
        if merge == "same":
            merged = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        else:
            divisor = self._group.size() if merge == "mean" else 1
            merged = sum_over_ranks(own, self.process_group, self._names.parameters(), divisor)
        module = self._names.module
        for parameter, name in compressible_parameters(module).items() if module is not None else ():
            if name not in merged and self.keeps(entry, name, gradient_layout(parameter)):
                merged[name] = _zeros(self.memory[entry], as_real(parameter), torch.device("cpu"))
        return merged

    def keeps(self, entry: str, name: str, layout: Tensor) -> bool:
        """Whether a parameter, whose gradient is like ``layout``, will have this memory, under the current options."""
        return True

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with any buckets and on any world size.

        Memory is checked against the parameters; if those are not known yet, before the first compressed step.

        Raises:
            ValueError: an entry is missing, has the wrong type, dtype or shape, is not finite, or is out of range. The
                message names the entry. The state is not modified.
        """
        self._check_state(state_dict)
        self._loaded = {
            entry: {name: tensor.detach().clone() for name, tensor in state_dict[entry].items()}
            for entry in self.memory
        }
        self._tensors, self._prepared = {entry: {} for entry in self.memory}, None
        self.drop_buckets()
        self.iter = state_dict["iter"]
        self._is_loaded, self._fits_model = True, False

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError unless a `state_dict` is whole and fits the parameters known so far."""
        layouts = {name: as_real(gradient_layout(each)) for name, each in self._names.known().items()}
        shapes = {
            entry: {name: tuple(declared.shape(layout)) for name, layout in layouts.items()}
            for entry, declared in self.memory.items()
        }
        limited = [entry for entry, declared in self.memory.items() if declared.dtype is not None]
        check_memory(state_dict, type(self).__name__, shapes, limited)
        if self._names.is_complete:
            check_model(state_dict.get(ERRORS, {}), self._names.known())

    def replicated(self) -> dict[str, object]:
        """The number of steps; after a load also digests of memory that is the same on all ranks, and their number."""
        facts: dict[str, object] = {"iter": self.iter}
        for entry, declared in self.memory.items() if self._is_loaded_anew else ():
            facts[f"loaded {entry}"] = len(self._loaded[entry])
            if declared.merge == "same":
                facts[f"digest of {entry}"] = digest(self.tensors(entry))
        return facts

    def replicated_state(self) -> dict[str, Any]:
        """The part of the state that is equal on all ranks: numbers and tensors, in dictionaries with string keys."""
        same = [entry for entry, declared in self.memory.items() if declared.merge == "same"]
        return {"iter": self.iter, **{entry: self.tensors(entry) for entry in same}}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Continue from the `replicated_state` of another rank; keep this rank's error memory."""
        for entry, tensors in replicated.items():
            if entry in self.memory:
                self._tensors[entry] = {name: tensor.clone() for name, tensor in tensors.items()}
                self._loaded[entry] = {}
        self._prepared = None
        self.drop_buckets()
        self.iter = replicated["iter"]

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: options and this rank's memory, without the process group, as in PyTorch's hook states."""
        return {
            "options": self._option_values(),
            "iter": self.iter,
            "memory": {entry: self._trained(entry) for entry in self.memory},
            "loaded": self._loaded,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, **state["options"])  # type: ignore[misc]
        self._tensors, self._loaded = state["memory"], state["loaded"]
        self._is_loaded, self._fits_model = True, False
        self.iter = state["iter"]


def sum_over_ranks(
    tensors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None, parameters: Sequence[Tensor], divisor: int
) -> dict[str, Tensor]:
    """The sums over the ranks of ``tensor / divisor``, as new tensors on the CPU. A collective call.

    Args:
        tensors: this rank's tensors by parameter name; the same names and shapes on all ranks.
        process_group: the ranks; None for the model's.
        parameters: parameters of the model, if it is known. The collectives run on their device.
        divisor: 1 for the sum, the world size for the mean.
    """
    if not tensors:
        return {}
    device = next(iter([*parameters, *tensors.values()])).device
    executor = executor_for(process_group, device)
    sums: dict[str, Tensor] = executor.submit(lambda _: _summed(tensors, executor.transport, device, divisor)).wait()
    return sums


async def _summed(
    tensors: Mapping[str, Tensor], transport: Transport, device: torch.device, divisor: int
) -> dict[str, Tensor]:
    sums = {}
    for name in sorted(tensors):
        total = tensors[name].to(device) / divisor
        await transport.all_reduce(memory_order(total))
        sums[name] = total.contiguous().cpu()
    return sums


def check_loaded_names(loaded: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise ValueError if a loaded memory has names and a bucket has numbers, or vice versa."""
    if loaded and set(loaded).isdisjoint(names):
        numbered = [all(is_number(name) for name in some) for some in (loaded, names)]
        if numbered[0] != numbered[1]:
            raise ValueError(
                f"The loaded state has an entry {min(loaded)!r}, this bucket has {names[0]!r}: parameter names were "
                "known in only one of the two runs. Call state.bind(model) before the first step in both."
            )
