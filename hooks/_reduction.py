"""`reduce_bucket`, which averages a bucket with an algorithm, and `all_reduce_on_cpu`, the plain average on a CPU."""

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.futures import Future

from gradwire.algorithms import Step, is_repeatable, sparse_all_reduce
from gradwire.algorithms.memory import BucketMemory
from gradwire.comm import Algorithm, Connections, Task, Workspace
from gradwire.comm.connections import BACKWARD
from gradwire.comm.stream_executor import StreamExecutor
from gradwire.hooks._bucket import Bucket, BucketWork, TorchBucket
from gradwire.hooks._plans import Plans
from gradwire.hooks._settings import HookSettings
from gradwire.kernels import is_capturing

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
    name, telemetry = settings.hook_name, settings.telemetry
    device, position, is_final, number = bucket.device, bucket.position, bucket.is_final, iteration or 0
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
            steps = algorithm(Step(work.source, work.target, memory, number, transport, workspace, names, n_passes))
        if sample is not None:
            steps = sample.measured(steps, is_final, device, work and work[:2], memory, transport)
        return steps

    # PyTorch's DDP raises "Unable to cast ... to Tensor", without a traceback.
    log = functools.partial(logger.exception, FAILED, name, position) if isinstance(bucket, TorchBucket) else None
    task = Task(begin, f"gradwire::{name}, bucket {position}", result, log)
    if isinstance(executor, StreamExecutor) and work is not None and telemetry is None and is_repeatable(algorithm):
        plans = bucket.plans or settings._plans.setdefault(bucket.first, Plans())
        plan = plans.to_record(bucket, settings, executor, connections.group, work, memory, number)
        future = executor.submit(task, plan)
    else:
        future = executor.submit(task)
    if is_final:
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
