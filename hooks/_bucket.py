"""`Bucket`, a bucket of either DDP, and `reduce_bucket`, which averages it.

PyTorch's DDP passes one flat buffer per bucket; gradwire's passes a list of gradients. A hook marked with `zero_copy`
reads and writes these gradients directly if the reducer calls it; if a wrapper calls it, it gets the flat buffer and
returns it, as PyTorch's hooks do. Either way, `Gradients` has one tensor per parameter.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.comm import Algorithm, Connections, Task, Transport, Workspace
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.compress import Gradients, Step, is_repeatable, sparse_all_reduce
from gradwire.compress.memory import BucketMemory
from gradwire.hooks._plans import Plans, Settings
from gradwire.kernels import SegmentTable, as_real, gradient_layout, is_capturing, layout_in_dtype

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket

else:  # PyTorch compares the annotation of a hook with this class
    from torch.distributed import GradBucket

CommHook = Callable[[Any, GradBucket], Future[torch.Tensor]]
Hook = TypeVar("Hook", bound=Callable[..., object])

logger = logging.getLogger("gradwire.hooks")

FAILED = "%s failed in bucket %s:"

# Not an attribute of the hook: functools.wraps would copy it to a user's wrapper, which expects flat buffers.
_zero_copy_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
_gradwire_hooks: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

# Layouts of buckets, by transport and first parameter.
_layouts_of: weakref.WeakKeyDictionary[Transport, WeakIdKeyDictionary] = weakref.WeakKeyDictionary()


def kept_layouts(transport: Transport, bucket: "Bucket") -> dict[object, Any]:
    """Layouts of this bucket alone, kept from step to step: their tables of addresses serve one bucket in flight."""
    by_parameter = _layouts_of.get(transport)
    if by_parameter is None:
        by_parameter = _layouts_of[transport] = WeakIdKeyDictionary()
    kept: dict[object, Any] = by_parameter.setdefault(bucket.first, {})
    return kept


def zero_copy(hook: Hook) -> Hook:
    """Mark a hook as zero-copy: it gets its gradients from `Bucket.work`, so they need not be in a flat buffer."""
    _zero_copy_hooks.add(hook)
    return hook


def is_zero_copy(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `zero_copy`."""
    return any(marked is hook for marked in _zero_copy_hooks)  # a hook need not be hashable


class BucketWork(NamedTuple):
    """The tensors of a bucket that an algorithm reads and writes."""

    source: Gradients  # the gradients
    target: Gradients  # the tensors that receive the mean; may be ``source``
    result: torch.Tensor  # the value of the hook's future: the flat buffer, or the first tensor of ``target``


class Bucket:
    """A bucket as gradwire's hooks see it.

    gradwire's own buckets derive from it, and keep the attributes up to date. `Bucket.of` adapts those of PyTorch's DDP
    and of other callers.

    Attributes:
        position: position in the order of launch.
        is_final: whether no bucket after it is launched in this backward.
        device: device of the gradients.
        dtype: real dtype of the gradients, or of the buffer that a wrapper has set instead.
        is_sparse: whether the bucket is one sparse gradient, which `reduce_bucket` averages uncompressed.
        zero_copy: whether `work` may return the gradients themselves; else they are in a flat buffer.
        first: the first parameter, by which a handshake knows the model.
        layouts: shape and strides of each gradient.
        names: plain names of the parameters; None if the bucket does not know them.
        process_group: the ranks to average over; None if they are not known.
        note_use: set if the model has a user's hook. Each of gradwire's hooks that the user's hook calls passes its
            settings and process group.
        model_number: number of the model's exchange on the process group, equal on all ranks.
        n_passes: number of synchronized forwards of the model; 0 if it must not be compared.
        model_parameters: all parameters of the model that are averaged; None on PyTorch's DDP.
        divisor: number of ranks with inputs left, by which the default reduction divides; 0 if it is not known.
        plans: the recorded steps of the bucket; None: those of the settings for PyTorch's DDP.
    """

    position: int
    is_final: bool
    device: torch.device
    dtype: torch.dtype
    first: torch.Tensor
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]]
    is_sparse = False
    zero_copy = False
    names: tuple[str, ...] | None = None
    process_group: dist.ProcessGroup | None = None
    note_use: Callable[[Any, dist.ProcessGroup], None] | None = None
    model_number = 0
    n_passes = 0
    model_parameters: Sequence[torch.Tensor] | None = None
    divisor = 0
    plans: Plans | None = None

    @staticmethod
    def of(bucket: Any) -> "Bucket":
        """The bucket itself if it is gradwire's, else a `TorchBucket`."""
        return bucket if isinstance(bucket, Bucket) else TorchBucket(bucket)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        raise NotImplementedError

    def buffer(self) -> torch.Tensor:
        """The gradients as one flat tensor; complex ones as real pairs. Or the sparse gradient."""
        raise NotImplementedError

    def empty_buffer(self) -> torch.Tensor:
        """A flat tensor for the mean of the gradients, as the value of the hook's future instead of the target."""
        return self.buffer()

    def work(self, transport: Transport | None = None, layout: SegmentTable | None = None) -> BucketWork:
        """The tensors of a dense bucket: the gradients if it is zero-copy, else the flat buffer.

        ``transport`` keeps the layout of the flat buffer; None: it is made anew. ``layout`` is that of the gradients in
        the buffer, if it must be taken apart.
        """
        buffer = self.buffer()
        if layout is not None and layout.numel != buffer.numel():
            raise ValueError(
                f"The bucket has {buffer.numel()} elements, its memory is for {layout.numel}. A state serves one model "
                "only: create a new state for each model."
            )
        tables = {} if transport is None else kept_layouts(transport, self)
        key = (self.position, buffer.numel(), buffer.stride(), buffer.dtype, buffer.device)
        if key not in tables:
            tables[key] = SegmentTable([buffer])
        flat = Gradients([buffer], tables[key], layout)
        return BucketWork(flat, flat, buffer)

    def real_layouts(self) -> list[torch.Tensor]:
        """Real tensors with the shapes, strides, dtype and device of the gradients."""
        return [layout_in_dtype(as_real(gradient_layout(each)), self.dtype) for each in self.parameters()]


class TorchBucket(Bucket):
    """A bucket of PyTorch's DDP, in one backward."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket, self._buffer, self._parameters = bucket, bucket.buffer(), bucket.parameters()
        self.position, self.is_final, self.first = bucket.index(), bucket.is_last(), self._parameters[0]
        self.device, self.dtype, self.is_sparse = self._buffer.device, self._buffer.dtype, self._buffer.is_sparse

    @functools.cached_property
    def layouts(self) -> Sequence[tuple[torch.Size, tuple[int, ...]]]:  # type: ignore[override]
        """Shape and strides of each gradient; made only for a state with memory."""
        return [(parameter.shape, parameter.stride()) for parameter in self._parameters]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer


def reduce_bucket(
    connections: Connections,
    bucket: Bucket,
    algorithm: Callable[[Step], Algorithm[None]],
    settings: Settings,
    *,
    memory: Any = None,
    iteration: int = 0,
    names: tuple[str, ...] = (),
    divisor: int | None = None,
) -> Future[torch.Tensor]:
    """Run ``algorithm(step)`` on a bucket, in bucket order; the future has its result.

    Args:
        connections: those on the process group of the ranks to average over.
        bucket: the bucket. A sparse gradient is averaged without the algorithm, by ``divisor`` or the world size.
        algorithm: an ``async`` function that awaits its collectives.
        settings: those of the hook.
        memory, iteration, names: of the `Step`. On PyTorch's DDP, `Step.gradients` needs a `BucketMemory`.
    """
    name, telemetry = settings.hook_name, settings.telemetry
    device, position, is_final = bucket.device, bucket.position, bucket.is_final
    executor = connections.executor(device)
    transport = executor.transport
    n_passes = -1 if isinstance(executor, StreamExecutor) else bucket.n_passes  # on a GPU, the host would have to wait
    work: BucketWork | None = None
    if bucket.is_sparse:
        result = bucket.buffer()
    else:
        work = bucket.work(transport, memory.layout if isinstance(memory, BucketMemory) else None)
        result = work.result
    # Not in the task: `sample` calls the user's report, which must run in the training thread.
    sample = telemetry.sample(position) if telemetry is not None and not is_capturing(device) else None

    def begin(workspace: Workspace) -> Algorithm[Any]:
        if position == 0:
            executor.start_step()
        transport.n_passes = n_passes
        steps: Algorithm[Any]
        if work is None:
            steps = sparse_all_reduce(result, transport, divisor or transport.world_size)
        else:
            steps = algorithm(Step(work.source, work.target, memory, iteration, transport, workspace, names))
        return steps if sample is None else sample.measured(steps, is_final, device, work and work[:2], transport)

    # PyTorch's DDP raises "Unable to cast ... to Tensor", without a traceback.
    log = functools.partial(logger.exception, FAILED, name, position) if isinstance(bucket, TorchBucket) else None
    task = Task(begin, f"gradwire::{name}, bucket {position}", result, log)
    if isinstance(executor, StreamExecutor) and work is not None and telemetry is None and is_repeatable(algorithm):
        plans = bucket.plans or settings._plans.setdefault(bucket.first, Plans())
        plan = plans.to_record(bucket, settings, executor, connections.group, work, memory, iteration)
        future = executor.submit(task, plan)
    else:
        future = executor.submit(task)
    if is_final:
        executor.finish()
    return cast("Future[torch.Tensor]", future)


def replayed(
    settings: Settings,
    bucket: Bucket,
    connections: Connections,
    algorithm: Callable[[Step], Algorithm[None]],
    number: int = 0,
) -> Future[torch.Tensor] | None:
    """The future of a bucket whose recorded step is repeated; None if there is none that fits: see `reduce_bucket`."""
    plans = bucket.plans or (settings._plans.get(bucket.first) if settings._plans.data else None)
    if plans is None or plans.settings is not settings or bucket.is_sparse or not is_repeatable(algorithm):
        return None  # a user's hook may call several of gradwire's
    return cast("Future[torch.Tensor] | None", plans.replay(bucket, connections, number))


def all_reduce_on_cpu(connections: Connections, bucket: Bucket) -> Future[torch.Tensor]:
    """Start the all-reduce of the mean of a dense bucket on a CPU; the future holds the flat mean.

    Nothing is computed after it, so a task in the executor's thread would only compete for the interpreter lock.
    """
    transport = connections.transport("backward", bucket.device)
    if bucket.position == 0:
        connections.start_step()
    source, target, result = bucket.work(transport)
    if target.flat is None:
        result = bucket.empty_buffer()
    wire = torch.view_as_real(result).view(-1) if result.is_complex() else result
    source.flatten(wire, scale=1 / transport.world_size)

    def finished(future: Future[object]) -> torch.Tensor:
        future.value()  # raises gloo's error
        return result

    return transport.start_all_reduce(wire).then(finished)


def described(value: object) -> str:
    """A value for an error message: short values in full, others by type."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"an object of type {type(value).__qualname__}"


def check_process_group(value: object, argument: str = "process_group") -> None:
    """Raise TypeError unless ``value`` is a process group or None."""
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{argument} is {described(value)}; expected a torch.distributed.ProcessGroup, as dist.new_group() returns "
            "it, or None for the model's process group."
        )


def _check_state(hook_name: str, state: object, kinds: tuple[type, ...]) -> None:
    if dist.ProcessGroup in kinds:
        check_process_group(state, f"The state of {hook_name}")
        return
    kind = kinds[0]
    # PyTorch has some of gradwire's names, too.
    what = f"{'a gradwire' if kind.__module__.startswith('gradwire.') else 'an instance of'} {kind.__name__}"
    raise TypeError(
        f"The state of {hook_name} is {described(state)}; expected {what}: "
        f"model.register_comm_hook({kind.__name__}(process_group), {hook_name})."
    )


def ddp_hook(*kinds: type) -> Callable[[Hook], Hook]:
    """Decorate a hook: raise TypeError for a state of another class than ``kinds``, or without a bucket.

    Without ``kinds``, any state is accepted. With ``ProcessGroup`` among them, None is accepted, too.
    """

    def decorate(hook: Hook) -> Hook:
        names = list(inspect.signature(hook).parameters)

        @functools.wraps(hook)
        def checked(*arguments: Any, **named: Any) -> Any:
            state = arguments[0] if arguments else named.get(names[0])
            if kinds and not isinstance(state, kinds):
                _check_state(checked.__name__, state, kinds)
            bucket = arguments[1] if len(arguments) > 1 else named.get("bucket")
            if len(arguments) > len(names) or not (hasattr(bucket, "buffer") and hasattr(bucket, "parameters")):
                raise TypeError(
                    f"{checked.__name__} was called with {described(bucket)} in place of a bucket of gradients. It is "
                    "a communication hook for DistributedDataParallel, of PyTorch or of gradwire; neither "
                    "FullyShardedDataParallel nor compiled autograd's Python reducer can call it."
                )
            return hook(*arguments, **named)

        _gradwire_hooks.add(checked)
        return cast("Hook", checked)

    return decorate


def is_gradwire_hook(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is one of gradwire's, a 16-bit wrapper included."""
    return any(each is hook for each in _gradwire_hooks)  # a hook need not be hashable
