"""`reduce_bucket`: run an algorithm on the gradients of a bucket, in bucket order.

A bucket of PyTorch's DDP is one flat buffer. A bucket of gradwire's DDP is a list of gradients. A hook marked with
`zero_copy` reads and writes these gradients directly if the reducer calls it. If a wrapper calls it, the same hook gets
the flat buffer and returns it, as PyTorch's hooks do.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import Transport, Workspace, connections_of, executor_for, in_ranges
from gradwire.comm.torch_internals import default_group, is_initialized_group
from gradwire.compress import Gradients, sparse_all_reduce
from gradwire.hooks._arguments import is_gradwire_hook
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks._samples import Algorithm
from gradwire.hooks._types import GradBucket
from gradwire.hooks._wrappers import registered_wrappers
from gradwire.hooks.telemetry import Observed
from gradwire.kernels import SegmentTable, flatten, is_capturing

Tables = dict[tuple[int, int, torch.dtype], SegmentTable]  # by bucket index, number of elements and dtype
Hook = TypeVar("Hook", bound=Callable[..., object])

# Not an attribute of the hook: functools.wraps would copy it to a user's wrapper, which expects flat buffers.
_zero_copy_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()

# Tables of flat buckets, kept from step to step.
_tables_of: weakref.WeakKeyDictionary[Transport, Tables] = weakref.WeakKeyDictionary()


def zero_copy(hook: Hook) -> Hook:
    """Mark a hook as zero-copy: it gets its gradients from `bucket_work`, so they need not be in a flat buffer."""
    _zero_copy_hooks.add(hook)
    return hook


def is_zero_copy(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `zero_copy`."""
    return any(marked is hook for marked in _zero_copy_hooks)  # a hook need not be hashable


class ModelBucket(Protocol):
    """What gradwire's buckets, and copies of them, know of their DistributedDataParallel.

    Attributes:
        process_group: its ranks; None before the reducer launches the bucket.
        hook_has_groups: whether the registered hook is not gradwire's, and may have process groups of its own.
        model_parameters: all parameters that it averages.
    """

    process_group: dist.ProcessGroup | None
    hook_has_groups: bool
    model_parameters: Sequence[torch.Tensor]


def _is_in_model(bucket: GradBucket | ModelBucket) -> TypeGuard[ModelBucket]:
    return hasattr(bucket, "model_parameters")


class ZeroCopyBucket(ModelBucket, Protocol):
    """The interface of gradwire's buckets in addition to PyTorch's.

    Attributes:
        device: of the gradients.
        zero_copy: whether `source` and `target` may be used; else the bucket is a flat buffer.
    """

    device: torch.device
    zero_copy: bool

    def source(self) -> Gradients:
        """The gradients."""

    def target(self) -> Gradients:
        """The tensors that receive the mean of the gradients."""

    def empty_buffer(self) -> torch.Tensor:
        """A flat tensor for the mean of the gradients, as the value of the hook's future instead of `target`."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in order."""

    def parameter_names(self) -> list[str]:
        """The names of the parameters, in order."""


def is_zero_copy_bucket(bucket: GradBucket | ZeroCopyBucket) -> TypeGuard[ZeroCopyBucket]:
    """Whether ``bucket`` is gradwire's own."""
    return hasattr(bucket, "zero_copy")


class BucketWork(NamedTuple):
    """The tensors of a bucket that an algorithm reads and writes.

    Attributes:
        source: the gradients.
        target: the tensors that get the result; may be ``source``.
        result: the value of the hook's future: the flat buffer, or the first tensor of ``target``.
    """

    source: Gradients
    target: Gradients
    result: torch.Tensor


def is_sparse(bucket: GradBucket) -> bool:
    """Whether the bucket is one sparse gradient, which `reduce_bucket` averages uncompressed."""
    return not is_zero_copy_bucket(bucket) and bucket.buffer().is_sparse


def bucket_device(bucket: GradBucket) -> torch.device:
    """The device of the bucket's gradients."""
    return bucket.device if is_zero_copy_bucket(bucket) else bucket.buffer().device


def bucket_dtype(bucket: GradBucket) -> torch.dtype:
    """The real dtype of the bucket's gradients, or of the buffer that a wrapper has set instead."""
    if is_zero_copy_bucket(bucket) and bucket.zero_copy:
        return bucket.parameters()[0].dtype.to_real()
    return bucket.buffer().dtype


def bucket_work(bucket: GradBucket, tables: Tables) -> BucketWork:
    """The tensors of ``bucket``: its gradients if it is zero-copy, else its flat buffer.

    Args:
        bucket: of either DDP.
        tables: layouts of flat buckets; a missing one is added.
    """
    if is_zero_copy_bucket(bucket) and bucket.zero_copy:
        target = bucket.target()
        return BucketWork(bucket.source(), target, target.tensors[0])
    buffer = bucket.buffer()
    key = (bucket.index(), buffer.numel(), buffer.dtype)
    if key not in tables:
        tables[key] = SegmentTable([buffer])
    flat = Gradients([buffer], tables[key])
    return BucketWork(flat, flat, buffer)


def _layout(bucket: GradBucket) -> dict[str, object]:
    """The facts about a bucket that must be equal on all ranks, for a handshake."""
    kind = "sparse gradients" if is_sparse(bucket) else "gradients"
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    return {
        "bucket": f"{bucket.index()}, the last" if bucket.is_last() else bucket.index(),
        kind: f"{bucket_dtype(bucket)} on {bucket_device(bucket).type}",
        "parameters of the bucket": len(shapes),
        **{f"shape of its parameter {i}": shape for i, shape in enumerate(shapes)},
    }


def agree(
    settings: HookSettings,
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    observed: Observed | None = None,
) -> dist.ProcessGroup:
    """Compare ``settings`` with the other ranks, once per model. Every hook calls it before anything else.

    Args:
        settings: of the hook.
        process_group: the ranks; None for the DistributedDataParallel's. PyTorch's does not tell them: there it
            is the default group, which must have the same ranks. On gradwire's, a group of the same ranks is replaced
            by the model's.
        bucket: the current bucket.
        observed: the hook's state, whose telemetry must be equal on all ranks too; None without a state.

    Returns:
        The process group to average over.

    Raises:
        RuntimeError: the ranks run different hooks, or one with different options; see `gradwire.hooks._handshake`.
        ValueError: the DistributedDataParallel has other ranks.
    """
    group = _group_of(bucket, process_group) if _is_in_model(bucket) else process_group or default_group()

    def facts() -> tuple[Sequence[torch.Tensor], dict[str, object]]:
        layout = _layout(bucket)
        if _is_in_model(bucket):
            return bucket.model_parameters, layout
        return _parameters_in_pytorchs_ddp(bucket, group, process_group is None), layout

    settings.agree(group, bucket, facts, observed._recorder if observed is not None else None)
    return group


def _group_of(bucket: ModelBucket, chosen: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group that a hook on gradwire's DistributedDataParallel uses."""
    own = bucket.process_group
    if own is None:  # no reducer has launched it
        return chosen or default_group()
    if chosen is None or chosen is own or not is_initialized_group(chosen):
        return own
    if bucket.hook_has_groups:
        return chosen
    check_same_ranks(chosen, own, "hook's process group")
    return own


def _parameters_in_pytorchs_ddp(
    bucket: GradBucket, group: dist.ProcessGroup, is_default: bool
) -> Sequence[torch.Tensor]:
    """All parameters of the model of a bucket of PyTorch's DDP, as far as that is found.

    Raises:
        ValueError: the DDP averages over other ranks than ``group``, which nobody has chosen.
    """
    parameters = bucket.parameters()
    wrappers = [ddp for ddp in registered_wrappers(None, parameters) if not hasattr(ddp, "resynchronize")]
    # Those whose hook is gradwire's: another one may have process groups of its own.
    checked = [ddp for ddp in wrappers if is_default or any(is_gradwire_hook(hook) for hook, _ in ddp._comm_hooks)]
    if checked and not any(have_same_ranks(group, ddp.process_group) for ddp in checked):
        check_same_ranks(group, checked[0].process_group, "default group" if is_default else "hook's process group")
    return list(wrappers[0].module.parameters()) if len(wrappers) == 1 else parameters


def have_same_ranks(group: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two process groups have the same ranks, in any order."""
    return set(dist.get_process_group_ranks(group)) == set(dist.get_process_group_ranks(other))


def check_same_ranks(group: dist.ProcessGroup, of_wrapper: dist.ProcessGroup, what: str) -> None:
    """Raise ValueError unless a hook averages over the ranks of its DistributedDataParallel."""
    ranks, wanted = map(dist.get_process_group_ranks, (group, of_wrapper))
    if not have_same_ranks(group, of_wrapper):
        raise ValueError(
            f"The {what} has ranks {ranks}, the DistributedDataParallel {wanted}: its gradients would be averaged over "
            "other ranks than its parameters. Pass the hook or its state the process group of the model, "
            "model.process_group."
        )


def reduce_bucket(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    algorithm: Algorithm,
    name: str,
    *,
    divisor: int | None = None,
    observed: Observed | None = None,
) -> Future[torch.Tensor]:
    """Run ``algorithm(source, target, transport, workspace)`` on a bucket, in bucket order; the future has its result.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: of either DDP. A sparse gradient is averaged without the algorithm.
        algorithm: an ``async`` function that awaits its collectives.
        name: of the hook, for profiler ranges.
        divisor: of a sparse gradient, by default the world size.
        observed: the hook's state, which may measure this step.
    """
    executor = executor_for(process_group, bucket_device(bucket))
    transport, workspaces = executor.transport, executor.workspaces
    work = bucket_work(bucket, _tables_of.setdefault(transport, {})) if not is_sparse(bucket) else None
    gradient = bucket.buffer() if work is None else work.result
    is_first, is_last = bucket.index() == 0, bucket.is_last()
    recorder = observed._recorder if observed is not None and not is_capturing(gradient.device) else None
    measured = recorder.recorder(bucket) if recorder is not None else None

    async def task(workspace: Workspace) -> torch.Tensor:
        if is_first:
            for each in workspaces:
                each.start_step()
        if work is None:
            steps = sparse_all_reduce(gradient, transport, divisor or transport.world_size)
            result = await (steps if measured is None else measured.uncompressed(steps, gradient.device))
        else:
            run = algorithm if measured is None else measured.observed(algorithm)
            await run(work.source, work.target, transport, workspace)
            result = work.result
        if is_last and measured is not None:
            measured.finish(gradient.device)
        return result

    ranges = f"gradwire::{name}, bucket {bucket.index()}"
    future = executor.submit(lambda workspace: in_ranges(task(workspace), ranges))
    if is_last:
        executor.finish()
    return cast("Future[torch.Tensor]", future)


def all_reduce_on_cpu(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Start the all-reduce of the mean of a dense bucket on a CPU; the future holds the flat mean.

    Everything but the flattening happens in gloo's threads. A task in the executor, whose thread competes with the
    backward for the interpreter lock, would gain nothing: there is nothing to compute behind the collective.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: of either DDP.
    """
    device, connections = bucket_device(bucket), connections_of(process_group)
    transport = connections.transport("backward", device)
    if bucket.index() == 0:
        connections.start_step()
    source, target, result = bucket_work(bucket, _tables_of.setdefault(transport, {}))
    if is_zero_copy_bucket(bucket) and bucket.zero_copy and target.flat is None:
        result = bucket.empty_buffer()
    wire = torch.view_as_real(result).view(-1) if result.is_complex() else result
    flatten(source.tensors, wire, table=source.table, scale=1 / transport.world_size)

    def finished(future: Future[object]) -> torch.Tensor:
        future.value()  # raises what gloo has raised
        return result

    return transport.start_all_reduce(wire).then(finished)
