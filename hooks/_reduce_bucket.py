"""What every hook does: find the bucket's gradients, run an algorithm in order, and hand back the result.

A bucket of PyTorch's DDP is one flat buffer. A bucket of gradwire's is a list of gradients, read and written where
they lie, when the reducer itself calls a hook marked with `zero_copy`. Called by anybody else's wrapper, the same hook
sees the flat buffer and returns it, as PyTorch's would.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import Executor, Steps, Transport, Workspace, executor_for
from gradwire.comm.torch_internals import default_group
from gradwire.compress import Gradients, sparse_all_reduce
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks._types import GradBucket
from gradwire.kernels import SegmentTable

Tables = dict[tuple[int, int, torch.dtype], SegmentTable]  # by bucket index, number of elements and dtype
Algorithm = Callable[[Gradients, Gradients, Transport, Workspace], Steps[None]]
Hook = TypeVar("Hook", bound=Callable[..., object])

# Not an attribute of the function: functools.wraps would copy that to a user's wrapper, which expects flat buffers.
_zero_copy_hooks: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()

# Layouts of flat buckets, kept from step to step.
_tables_of: weakref.WeakKeyDictionary[Executor, Tables] = weakref.WeakKeyDictionary()


def zero_copy(hook: Hook) -> Hook:
    """Mark a hook that asks for a bucket's gradients through `bucket_work`, and so may take them where they lie."""
    _zero_copy_hooks.add(hook)
    return hook


def is_zero_copy(hook: Callable[..., object]) -> bool:
    """Whether ``hook`` is marked by `zero_copy`."""
    return any(marked is hook for marked in _zero_copy_hooks)  # a hook need not be hashable


class ZeroCopyBucket(Protocol):
    """What gradwire's bucket has besides PyTorch's interface."""

    device: torch.device
    zero_copy: bool

    def source(self) -> Gradients:
        """The gradients where they lie."""

    def target(self) -> Gradients:
        """Where their mean goes."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in order."""

    def parameter_names(self) -> list[str]:
        """Their names."""


def is_zero_copy_bucket(bucket: GradBucket | ZeroCopyBucket) -> TypeGuard[ZeroCopyBucket]:
    """Whether ``bucket`` is gradwire's own."""
    return hasattr(bucket, "zero_copy")


class BucketWork(NamedTuple):
    """A bucket as an algorithm takes it.

    Attributes:
        source: the gradients to read.
        target: where the result goes, on the same memory or not.
        result: the tensor that the hook's future holds: the flat buffer, or one of the gradients that were written.
    """

    source: Gradients
    target: Gradients
    result: torch.Tensor


def is_sparse(bucket: GradBucket) -> bool:
    """Whether it holds the sparse gradient of one parameter, which no hook compresses: see `reduce_bucket`."""
    return not is_zero_copy_bucket(bucket) and bucket.buffer().is_sparse


def bucket_device(bucket: GradBucket) -> torch.device:
    """Where the bucket's gradients are."""
    return bucket.device if is_zero_copy_bucket(bucket) else bucket.buffer().device


def bucket_dtype(bucket: GradBucket) -> torch.dtype:
    """The real dtype of the bucket's gradients, or of the buffer that a wrapper has put in their place."""
    if is_zero_copy_bucket(bucket) and bucket.zero_copy:
        return bucket.parameters()[0].dtype.to_real()
    return bucket.buffer().dtype


def bucket_work(bucket: GradBucket, tables: Tables) -> BucketWork:
    """The gradients of ``bucket``: where they lie if it lends them, else its flat buffer, whose table is kept."""
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
    """What ranks must agree on about a bucket, in words."""
    kind = "sparse gradients" if is_sparse(bucket) else "gradients"
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    return {
        "bucket": f"{bucket.index()}, the last" if bucket.is_last() else bucket.index(),
        kind: f"{bucket_dtype(bucket)} on {bucket_device(bucket).type}",
        "parameters of the bucket": len(shapes),
        **{f"shape of its parameter {i}": shape for i, shape in enumerate(shapes)},
    }


def agree(settings: HookSettings, process_group: dist.ProcessGroup | None, bucket: GradBucket) -> None:
    """Compare ``settings`` with the other ranks', unless that was done. `reduce_bucket` calls it.

    A hook that remembers something about the bucket before it reduces that calls this first.

    Raises:
        RuntimeError: the ranks run different hooks, or one with different options; see `gradwire.hooks._handshake`.
    """
    group = process_group if process_group is not None else default_group()
    settings.agree(group, bucket, partial(_layout, bucket))


def reduce_bucket(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    algorithm: Algorithm,
    divisor: int | None = None,
    settings: HookSettings | None = None,
) -> Future[torch.Tensor]:
    """Run ``algorithm(source, target, transport, workspace)`` on a bucket in its turn; the future holds its result.

    An algorithm is an ``async`` function that awaits its collectives. A sparse gradient is averaged as it is: divided
    by ``divisor``, by default the number of ranks. ``settings`` are the hook's, which all ranks must share; None for
    one that has nothing to compare.

    Raises:
        RuntimeError: the ranks run different hooks, or one with different options; see `gradwire.hooks._handshake`.
    """
    if settings is not None:
        agree(settings, process_group, bucket)
    executor = executor_for(process_group, bucket_device(bucket))
    transport, workspaces = executor.transport, executor.workspaces
    work = bucket_work(bucket, _tables_of.setdefault(executor, {})) if not is_sparse(bucket) else None
    gradient = bucket.buffer() if work is None else work.result
    is_first = bucket.index() == 0

    async def task(workspace: Workspace) -> torch.Tensor:
        if is_first:
            for each in workspaces:
                each.start_step()
        if work is None:
            return await sparse_all_reduce(gradient, transport, divisor or transport.world_size)
        await algorithm(work.source, work.target, transport, workspace)
        return work.result

    return cast("Future[torch.Tensor]", executor.submit(task))
