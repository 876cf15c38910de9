"""Averages of a bucket: `reduce_bucket` with an algorithm, `quantized_reduction` in a wire format without a state, and
`all_reduce_on_cpu`, the plain average on a CPU.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.comm import Algorithm, Connections, Task, Transport, Workspace
from gradwire.comm.connections import BACKWARD
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.compress import (
    NodeBucket,
    Quantization,
    QuantizedBucket,
    Stamp,
    Step,
    is_repeatable,
    repeatable,
    sparse_all_reduce,
)
from gradwire.compress.memory import BucketMemory
from gradwire.exchange.bucket import Bucket, BucketWork, GradBucket, TorchBucket
from gradwire.exchange.plans import Plans, replayed
from gradwire.exchange.settings import HookSettings
from gradwire.kernels import WIRE_FORMATS, is_capturing
from gradwire.validation import check_whole_number

logger = logging.getLogger("gradwire.hooks")

FAILED = "%s failed in bucket %s:"


def reduce_bucket(
    connections: Connections,
    bucket: Bucket,
    algorithm: Callable[[Step], Algorithm[None]],
    settings: HookSettings,
    *,
    memory: Any = None,
    iteration: int | None = None,
    names: tuple[str, ...] = (),
    divisor: int | None = None,
) -> Future[torch.Tensor]:
    """Run ``algorithm(step)`` on a bucket, in bucket order; the future has its result.

    Args:
        connections: those on the process group of the ranks to average over.
        bucket: the bucket. A sparse gradient is averaged without the algorithm, by ``divisor`` or the world size.
        algorithm: an ``async`` function that awaits its collectives.
        settings: those of the hook.
        iteration: number of the step; None if the hook counts none.
        memory, names: of the `Step`. On PyTorch's DDP, `Step.gradients` needs a `BucketMemory`.
    """
    name, number = settings.hook_name, iteration or 0
    device, position, is_final, telemetry = bucket.device, bucket.position, bucket.is_final, settings._measurer(number)
    executor = connections.executor(device)
    transport = executor.transport
    # On a GPU, the host would have to wait.
    stamp = Stamp(-1 if isinstance(executor, StreamExecutor) else bucket.stamp, bucket.explain_stamps)
    work: BucketWork | None = None
    if bucket.is_sparse:
        result = bucket.buffer()
    else:
        work = bucket.work(transport, memory.layout if isinstance(memory, BucketMemory) else None)
        result = work.result
        if isinstance(bucket, TorchBucket):
            executor.keep([result])  # PyTorch's buffer: its DDP may be replaced after an error in a backward
    # Not in the task: `sample` calls the user's report, which must run in the training thread.
    sample = None
    if telemetry is not None and not is_capturing(device):
        sample = telemetry.sample(position, is_final, iteration)

    def begin(workspace: Workspace) -> Algorithm[Any]:
        if bucket.is_first:
            executor.start_step()
        steps: Algorithm[Any]
        if work is None:
            steps = sparse_all_reduce(result, transport, divisor or transport.world_size)
        else:
            step = Step(work.source, work.target, memory, number, transport, workspace, names, stamp, bucket.scale)
            steps = bucket.guarded(partial(algorithm, step), transport)
        if sample is not None:
            steps = sample.measured(steps, is_final, device, work and work[:2], memory, transport)
        return steps

    # PyTorch's DDP raises "Unable to cast ... to Tensor", without a traceback.
    log = partial(logger.exception, FAILED, name, position) if isinstance(bucket, TorchBucket) else None
    task = Task(begin, f"gradwire::{name}, bucket {position}", result, log)
    if isinstance(executor, StreamExecutor) and work is not None and telemetry is None and is_repeatable(algorithm):
        plans = bucket.plans or settings._plans.setdefault(bucket.first, Plans())
        plan = plans.to_record(bucket, settings, executor, connections.group, work, memory, number)
        future = executor.submit(task, plan)
    else:
        future = executor.submit(task)
    if is_final or bucket.ends_late:
        executor.finish()
    return cast("Future[torch.Tensor]", future)


def all_reduce_on_cpu(connections: Connections, bucket: Bucket) -> Future[torch.Tensor]:
    """Start the all-reduce of the mean of a dense bucket on a CPU; the future holds the flat mean.

    Nothing is computed after it, so a task in the executor's thread would only compete for the interpreter lock.
    """
    transport = connections.transport(BACKWARD, bucket.device)
    if bucket.is_first:
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


def check_local_size(value: object) -> None:
    """Raise ValueError unless ``value`` is "auto" or a number of ranks."""
    if value != "auto":
        check_whole_number("local_size", value, "'auto', or the number of ranks on each node, at least 1", 1)


def ranks_on_node(local_size: int | str, transport: Transport) -> int:
    """The number of consecutive ranks on each node, which divides the world size; that which they found for "auto"."""
    size = transport.local_size if isinstance(local_size, str) else local_size
    if transport.world_size % size != 0:
        raise ValueError(
            f"local_size is {size}, but {transport.world_size} ranks exchange gradients; expected a divisor of that "
            "number: every node has equally many ranks. Pass 'auto', or 1 to exchange among all ranks directly."
        )
    return size


def bucket_kind(options: Quantization) -> type[QuantizedBucket] | type[NodeBucket]:
    """The class of buckets that are averaged among all ranks directly, or on nodes of several ranks."""
    return NodeBucket if options.local_size > 1 else QuantizedBucket


@repeatable
def quantized(step: Step) -> Algorithm[None]:
    """The algorithm of a bucket of `bucket_kind`."""
    return step.memory.all_reduce(step)  # type: ignore[no-any-return]


def quantized_reduction(
    process_group: dist.ProcessGroup | None,
    bucket: GradBucket,
    wire: str,
    block_size: int,
    local_size: int | str,
    settings: HookSettings,
) -> Future[torch.Tensor]:
    """Average a bucket in a format of `WIRE_FORMATS`, with sums in fp32 and without memory; see `QuantizationState`."""
    adapted = Bucket.of(bucket, settings.bucket_order)
    connections = settings.handshake.agree(settings, adapted, process_group)
    if (future := replayed(settings, adapted, connections, quantized)) is not None:
        return future
    if adapted.is_sparse:
        return reduce_bucket(connections, adapted, quantized, settings)
    transport = connections.executor(adapted.device).transport
    buckets, n_local = adapted.kept_layouts(transport), ranks_on_node(local_size, transport)
    key = (wire, block_size, n_local, adapted.dtype, *adapted.layouts)
    if key not in buckets:
        formats = [WIRE_FORMATS[wire]] * len(adapted.layouts)
        options = Quantization(block_size=block_size, error_dtype=None, local_size=n_local)
        buckets[key] = bucket_kind(options)(adapted.real_layouts(), formats, transport, options)
    return reduce_bucket(connections, adapted, quantized, settings, memory=buckets[key])
