"""`HookState`: options and memory of a hook, and `HookState.run`, which averages a bucket. See docs/writing-a-hook.md.

A state has options, memory by parameter name, and a step count. The handshake between the ranks, checkpoints for any
world size, resynchronization after errors, pickling and telemetry follow from the declaration of its memory.
"""

import functools
import io
import logging
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.comm import Algorithm, GroupTransport, IdleTransport, Transport, Workspace, executor_for, run_algorithm
from gradwire.compress import Gradients, cast_all_reduce
from gradwire.compress._validation import MAX_COUNT, check_count
from gradwire.compress.memory import Memory
from gradwire.hooks._bucket import (
    GradBucket,
    bucket_device,
    bucket_dtype,
    ddp_hook,
    is_number,
    is_sparse,
    plain_name,
    reduce_bucket,
    zero_copy,
)
from gradwire.hooks._checkpoint import option_values
from gradwire.hooks._guard import Guarded
from gradwire.kernels import dispatch, gradient_layout, is_capturing

__all__ = ["HookState", "Memory", "Step", "hook_for"]


def __dir__() -> list[str]:
    return __all__


Hook = TypeVar("Hook", bound=Callable[..., Any])
State = TypeVar("State", bound=type)


class Step(NamedTuple):
    """A bucket in one step, as an algorithm gets it.

    Attributes:
        gradients: one real tensor per parameter; a complex gradient is a tensor of pairs.
        results: the tensors that receive the mean, like ``gradients``; may be the same memory.
        names: parameter names.
        memory: the result of `HookState.prepare`.
        iteration: number of the step.
        transport: the collectives: ``await transport.all_reduce(tensor)`` sums a tensor over the ranks, in place. Every
            rank must await the same ones in the same order.
        workspace: provides wire buffers.
        source: the gradients again, for `Gradients.flatten`, which takes a flat buffer as it is.
        target: the results again, for `Gradients.unflatten`.
    """

    gradients: list[Tensor]
    results: list[Tensor]
    names: tuple[str, ...]
    memory: Any
    iteration: int
    transport: Transport
    workspace: Workspace
    source: Gradients
    target: Gradients

    def in_graphs(self, start: Callable[[], Algorithm[None]], variant: Hashable = None) -> Algorithm[None]:
        """Run an algorithm of ``memory`` in `PiecewiseGraphs`, or as it is where its kernels cannot be captured.

        ``memory`` has ``can_capture``, and ``refresh`` for the numbers on the device that a replay reads.

        Args:
            start: creates the algorithm.
            variant: the decisions of the host about this step.
        """
        graphs = self.workspace.graphs
        if graphs is None or not self.memory.can_capture:
            return start()
        is_in_place = all(map(operator.is_, self.gradients, self.results))
        refresh = functools.partial(self.memory.refresh, self.gradients, self.results, self.iteration)
        return graphs.run(self.memory, (is_in_place, variant), start, refresh)


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
    return ("options", *names), operator.attrgetter("__class__.__name__", *names)


class HookState(Guarded):
    """Base class of hook states: options, memory by parameter name, and a step count, for one model.

    A subclass declares `memory` and has an algorithm, which its hook passes to `run`. Memory named "errors" is error
    memory: the part of earlier gradients that was not applied yet. With ``merge="sum"`` its unit is the mean gradient,
    with ``merge="mean"`` the gradient of one rank.

    Args:
        hook: name of the hook.
        process_group: the ranks to average over; None for the model's.
        options: a frozen dataclass with values that must be equal on all ranks; None without options. Its field
            ``start_iter``, if there is one, is the number of plain steps before the first compressed one: 0 compresses
            from the first step on, before DDP rebuilds its buckets.

    Attributes:
        memory: declarations by name of the entry in a checkpoint.
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

    def __init__(self, hook: str, process_group: dist.ProcessGroup | None = None, options: Any = None) -> None:
        super().__init__(hook, process_group, options)
        self._iter = 0
        self._start = self.first_compressed_step
        self._latest_index: int | None = None  # index of the latest bucket
        self._is_counted = True  # whether ``iter`` includes the latest step
        self._applied: dict[str, object] | None = None  # settings for which the buckets were made
        self._patterns_match = False  # whether every name pattern in the options is known to match a parameter
        self._has_announced_start = False
        self._first_step: int | None = None  # of this object, whose buckets DDP will rebuild
        self._compiled: set[object] = set()  # names and dtypes of the buckets whose kernels are compiled

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
        self._names.bind(module)
        self._check_patterns()

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError unless the state fits a sharded model with these parameters, before `bind_layouts`."""
        self._names.check_names(names)
        self._check_patterns(names)

    def bind_layouts(self, layouts: Mapping[str, Tensor]) -> None:
        """Take the parameter names of a sharded model.

        Args:
            layouts: tensors in the layouts of this rank's gradients, by parameter name; empty for parameters that are
                not compressed on this rank.
        """
        self._names.bind_layouts(layouts)
        self._patterns_match = True

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:
        """The names of the bucket's parameters, or numbers if they are not known.

        Raises:
            RuntimeError: `needs_names`, and the names are not known.
        """
        if hasattr(bucket, "parameter_names"):  # a bucket of gradwire's DDP
            return tuple(map(plain_name, bucket.parameter_names()))
        return self._names.in_bucket(bucket, self.needs_names)

    def has_model(self) -> bool:
        """Whether a model is known that the state is registered on."""
        return self._names.is_complete or super().has_model()

    def needs_names(self) -> str | None:
        """The part of the options that needs parameter names, as the subject of an error; None if numbers suffice."""
        return None

    def unmatched_pattern(self, names: Iterable[str]) -> str | None:
        """The first name pattern in the options that matches none of the names; None if all match."""
        find = getattr(self.options, "unmatched_pattern", None)
        return find(names) if find is not None else None

    def _check_patterns(self, names: Iterable[str] | None = None) -> None:
        """Raise ValueError if a pattern matches none of ``names``, by default of the model's once all are known."""
        if names is None and not self._names.is_complete:
            return
        names = sorted(self._names.known() if names is None else names)
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

    def continue_at(self, iteration: int) -> None:
        """Set the number of the next step."""
        self._iter, self._is_counted = iteration, True

    def run(self, bucket: GradBucket, algorithm: Callable[[Step], Algorithm[None]]) -> Future[Tensor]:
        """Average a bucket with ``algorithm``, in bucket order; the future has the result.

        Steps before the option ``start_iter``, and sparse gradients, take the plain all-reduce.

        Args:
            bucket: the gradients, of either DDP. Overwritten with their mean.
            algorithm: an ``async`` function of a `Step`. It reads ``step.gradients``, awaits collectives of
                ``step.transport``, and writes the mean into ``step.results``, with the same bits on all ranks.

        Raises:
            RuntimeError: the ranks have different hooks, options, step counts or memory.
            ValueError: the state belongs to another model, or its loaded memory does not fit the model.
        """
        group, names = self.enter(bucket)
        iteration, memory = self._iter, None
        if not is_sparse(bucket) and not self.sends_in_full:
            if iteration >= self._start:
                memory = self.prepare(bucket, names, group)
            elif self.compiles_early:
                self._compile(bucket, names, group, algorithm)

        def on_tensors(
            source: Gradients, target: Gradients, transport: Transport, workspace: Workspace
        ) -> Algorithm[None]:
            if memory is None:
                return cast_all_reduce(source, target, source.table.dtype, transport, workspace)
            gradients = source.each()
            results = gradients if target.tensors is source.tensors else target.each()
            return algorithm(Step(gradients, results, names, memory, iteration, transport, workspace, source, target))

        self.maybe_increase_iter(bucket)
        layout = getattr(memory, "layout", None)
        return reduce_bucket(group, bucket, on_tensors, self.hook_name, layout=layout, recorder=self._recorder)

    def prepare(self, bucket: GradBucket, names: tuple[str, ...], group: dist.ProcessGroup) -> Any:
        """The memory of a bucket in a compressed step, kept from step to step.

        Returns:
            An object whose items are the declared memory, such as ``["errors"]``: a list with one tensor per parameter.
            None to send the bucket uncompressed.

        Raises:
            ValueError: loaded memory does not fit the model.
        """
        made_for = (bucket_dtype(bucket), group.size(), group.rank())
        kept = self._buckets.get(names)
        if kept is None or kept[0] != made_for:
            kept = self._buckets[names] = (made_for, self.new_bucket(bucket, names, group))
        return kept[1]

    def _compile(
        self,
        bucket: GradBucket,
        names: tuple[str, ...],
        group: dist.ProcessGroup,
        algorithm: Callable[[Step], Algorithm[None]],
    ) -> None:
        """Run two steps of ``algorithm`` on zeros, without collectives, in memory of their own, if Triton would compile
        for them. Two steps: alternating PowerSGD launches different kernels in odd ones.

        The buckets of the first step, of which one may hold the whole model, are left out: they are rebuilt.
        """
        device, key = bucket_device(bucket), (names, bucket_dtype(bucket))
        if self._first_step is None:
            self._first_step = self._iter
        if self._iter == self._first_step < self._start - 1 or key in self._compiled:
            return
        if not dispatch.use_triton(device) or dispatch.is_interpreted() or is_capturing(device):
            return
        self._compiled.add(key)
        with suppress(torch.OutOfMemoryError):  # the first compressed step compiles, then
            transport = IdleTransport(executor_for(group, device).transport)
            kept, self._tensors = self._tensors, {entry: {} for entry in self.memory}
            try:
                parameters = [gradient_layout(parameter) for parameter in bucket.parameters()]
                memory = self.make_bucket(parameters, bucket_dtype(bucket), names, transport)
            finally:
                self._tensors = kept
            if memory is None:
                return
            layout = memory.layout
            zeros = layout.views(torch.zeros(layout.numel, dtype=layout.dtype, device=device))
            gradients, workspace = Gradients(zeros, layout), Workspace(device)
            for number in (self._iter, self._iter + 1):
                step = Step(zeros, zeros, names, memory, number, transport, workspace, gradients, gradients)
                run_algorithm(algorithm(step), transport)

    def enter(self, bucket: GradBucket) -> tuple[dist.ProcessGroup, tuple[str, ...]]:
        """Compare the settings with the other ranks, and return the process group and the parameter names of a bucket.

        Call it once per bucket, before anything else, and `maybe_increase_iter` at the end.
        """
        self._prepared = None
        index, latest = bucket.index(), self._latest_index
        self._latest_index = index
        if latest is None or index <= latest:  # the buckets of a step come in order, but any may be skipped
            self.begin_step()
            self._step_in_progress = self._iter + 1
            if self._guard is not None:
                self._guard.begin_step(self._iter)
        group, names = self.agree(bucket, self._process_group), self.parameter_names(bucket)
        if not self._patterns_match:
            self._names.note(names, bucket)
            self._check_patterns()
        return group, names

    def begin_step(self) -> None:
        """Begin a step. The one before ends now if its last bucket was skipped or went to another hook."""
        if not self._is_counted:
            self.count_step()
        self.match_scale()

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step if ``bucket``, which raised no error, is its last."""
        self._is_counted = False
        if bucket.is_last():
            self.count_step()

    def count_step(self) -> None:
        """Count a step that has ended."""
        self._iter, self._is_counted = min(self._iter + 1, MAX_COUNT), True
        if self.memory:
            self._names.is_closed = True

    @property
    def sends_in_full(self) -> bool:
        """Whether the `guard` has turned compression off."""
        return self._guard is not None and self._guard.is_tripped

    # Options.

    def settings(self) -> dict[str, object]:
        """The hook and its options, which must be equal on all ranks."""
        if self.options is None:
            return {"hook": self.hook_name}
        kind: type = type(self.options)
        names, values = _compared_options(kind, self.local_options)
        return {"hook": self.hook_name, **dict(zip(names, values(self.options), strict=True))}

    def apply_settings(self, settings: dict[str, object]) -> None:
        """Apply options that were assigned or modified since the last step: new buckets, which start from the old
        errors. The handshake calls it on all ranks.

        Raises:
            ValueError: an option has the wrong type or is out of range.
        """
        if self._guard is not None:
            self._guard.restart()  # before, as after an error, ranks may have seen different checks
        if self._applied == settings:
            return
        if self.options is not None:
            self.options = replace(self.options)  # validates: dictionaries may have been modified in place
        self._start = self.first_compressed_step
        self._compiled.clear()
        self.drop_buckets()
        self.revoke_agreements()
        self._applied, self._patterns_match = settings, False
        if not self._has_announced_start and self.iter < self._start and dist.get_rank(self._group) == 0:
            # Two plain steps are the usual default, because DDP rebuilds its buckets after the first: no warning.
            level = logging.INFO if self._start <= 2 else logging.WARNING
            text = "%s compresses from step %d on, and sends gradients in full until then."
            logging.getLogger(type(self).__module__).log(level, text, self.hook_name, self._start)
        self._has_announced_start = True


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
