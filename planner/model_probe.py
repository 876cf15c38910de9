"""Measurement of a model's step without gradient exchange: of a job's model, and of one that a script trains."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.comm.clock import Mark
from gradwire.comm.torch_internals import queue_callback
from gradwire.exchange.bucket import GradBucket
from gradwire.exchange.decorators import zero_copy
from gradwire.exchange.names import parameter_names
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.planner.device_sync import synchronize
from gradwire.planner.jobs import Job, JobError
from gradwire.planner.step_model import ModelCost, Overlap
from gradwire.reducer import DistributedDataParallel
from gradwire.reducer.bucket import BucketSpec

WARM_UP = 3  # steps: the first builds buckets, the second rebuilds them
MIN_STEPS, MAX_STEPS = 3, 10
STEPS = WARM_UP + MAX_STEPS
OPTIMIZER_STEPS = 6  # equal on all ranks, as a step may be collective; the first creates the state


class Buckets(NamedTuple):
    """The buckets and gradients of a model."""

    specs: list[BucketSpec]  # in the order of launch
    gradients: list[Tensor]  # copies, in the order of the buckets and of the parameters in each


def measure_model(
    job: Job, group: dist.ProcessGroup, device: torch.device, overlap: Overlap, budget: float
) -> tuple[ModelCost, Buckets]:
    """Time a step of the model without gradient exchange; also return its buckets. A collective call.

    No more steps start after ``budget`` seconds; at least `MIN_STEPS` are timed.
    """
    launches: list[Mark] = []
    specs: list[BucketSpec] = []
    ddp = DistributedDataParallel(job.model, process_group=group)

    @zero_copy  # annotations must not be strings, so this module does not import annotations from __future__
    def note_launch(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        launches.append(Mark(device))
        specs.append(spec_of(bucket, bucket.parameter_names(), bucket.model_parameters))  # type: ignore[attr-defined]
        return noop_hook(None, bucket)

    ddp.register_comm_hook(None, note_launch)
    samples: list[list[float]] = []
    for step in range(STEPS):
        if step == WARM_UP:
            started = time.monotonic()
        ddp.zero_grad(set_to_none=True)
        launches.clear()
        specs.clear()
        dist.barrier(group)
        synchronize(device)
        begin = Mark(device)
        loss = job.loss(ddp)
        between = Mark(device)
        loss.backward()
        end = Mark(device)
        synchronize(device)
        if step >= WARM_UP:
            samples.append([_seconds(begin, between), *(_seconds(between, each) for each in (*launches, end))])
            if _all_agree(len(samples) >= MIN_STEPS and time.monotonic() - started > budget, group, device):
                break
    parameters = [p for spec in specs for p in spec.parameters]
    gradients = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    return model_cost(samples, gradients, overlap), Buckets(specs, gradients)


def model_cost(
    samples: Sequence[Sequence[float]], gradients: Sequence[Tensor], overlap: Overlap, optimizer: float | None = None
) -> ModelCost:
    """The cost of a model, from each step's seconds of the forward, until each bucket is ready, and of the backward."""
    forward, *ready, backward = map(median, zip(*samples, strict=True))
    times = [forward + backward for forward, *_, backward in samples]
    return ModelCost(
        forward=forward,
        backward=backward,
        ready=tuple(ready),
        optimizer=optimizer,
        gradient_bytes=sum(gradient.nbytes for gradient in gradients),
        overlap=overlap,
        spread=max(times) / min(times),
    )


def measure_optimizer(job: Job, device: torch.device) -> float | None:
    """Time a step of the job's optimizer on the gradients that the model has; None without an optimizer.

    The steps change the model. Raises JobError if a step fails.
    """
    if job.optimizer is None:
        return None
    samples = []
    for _ in range(OPTIMIZER_STEPS):
        synchronize(device)
        begin = Mark(device)
        try:
            job.optimizer.step()
        except Exception as error:
            raise JobError(f"optimizer.step() raised {type(error).__name__}: {error}.") from error
        end = Mark(device)
        synchronize(device)
        samples.append(_seconds(begin, end))
    return median(samples[1:])


def spec_of(bucket: GradBucket, names: list[str], model_parameters: Sequence[Tensor]) -> BucketSpec:
    """The specification of a bucket of either DDP; with the model's parameters, one handshake serves all buckets."""
    return BucketSpec(
        index=bucket.index(),
        is_last=bucket.is_last(),
        parameters=bucket.parameters(),
        names=names,
        model_parameters=model_parameters,
    )


def _seconds(begin: Mark, end: Mark) -> float:
    return 1e-3 * end.milliseconds_since(begin)


def _all_agree(is_done: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    flag = torch.tensor(int(is_done), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


class ScriptProbe:
    """Times the steps of a model that a script trains in a DistributedDataParallel, whose hook is `reduce` meanwhile.

    Gradients are exchanged after the backward pass, outside of the measured times. Forward time ends when the model's
    last forward before the exchange returns, so it includes earlier micro-batches; the loss counts as backward. The
    rest of a step, such as the optimizer, counts as `ModelCost.optimizer`.

    Args:
        ddp: the model, which has no hook.
        done: called with the probe at the forward after `STEPS` steps.
        averages: whether gradients are averaged. If not, the ranks drift apart, and the script must end with the
            measurement.
    """

    def __init__(self, ddp: TorchDDP, done: Callable[["ScriptProbe"], None], averages: bool) -> None:
        self._parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        self.device, self._done = self._parameters[0].device, done
        self._group = ddp.process_group if averages else None
        # Buckets of the current backward, and their results
        self._waiting: list[tuple[GradBucket, Future[Tensor]]] = []
        self._samples: list[list[float]] = []  # seconds of forward, ready times and backward of each step
        self._rests: list[float] = []  # seconds of the rest of each step
        self.specs: list[BucketSpec] = []  # the buckets of the latest step
        self._gradients: list[Tensor] = []
        self._begin = self._between = self._end = Mark(self.device)
        self._launches: list[Mark] = []
        self._names = parameter_names(ddp.module)
        before, after = self._begin_forward, self._end_forward
        self._handles = [ddp.register_forward_pre_hook(before), ddp.register_forward_hook(after)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin_forward(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._launches:
            begin = Mark(self.device)
            synchronize(self.device)
            times = [self._begin, self._between, *self._launches, self._end]
            self._samples.append([_seconds(times[min(k, 1)], mark) for k, mark in enumerate(times[1:])])
            self._rests.append(_seconds(self._end, begin))
            self._launches = []
            if len(self._samples) == STEPS:
                self.remove()
                self._done(self)
            self._begin = Mark(self.device)

    def _end_forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and not self._launches:
            self._between = Mark(self.device)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Note the time at which a bucket is ready; the future of its gradients."""
        if not self._launches:
            self.specs = []
            queue_callback(self._end_backward)  # before DDP's own callback, which waits for the futures
        self._launches.append(Mark(self.device))
        names = [self._names[parameter] for parameter in bucket.parameters()]
        self.specs.append(spec_of(bucket, names, self._parameters))
        future: Future[Tensor] = Future(devices=[self.device] if self.device.type == "cuda" else None)
        self._waiting.append((bucket, future))
        return future

    def _end_backward(self) -> None:
        self._end = Mark(self.device)
        waiting, self._waiting = self._waiting, []
        is_sparse = any(bucket.buffer().is_sparse for bucket, _ in waiting)
        if len(self._samples) == STEPS - 1 and not is_sparse:
            self._gradients = [gradient.clone() for bucket, _ in waiting for gradient in bucket.gradients()]
        for bucket, future in waiting:
            buffer = bucket.buffer()
            if self._group is not None:
                dist.all_reduce(buffer.div_(self._group.size()), group=self._group)
            future.set_result(buffer)

    def model(self, overlap: Overlap) -> tuple[ModelCost, Buckets]:
        """The cost of a step without gradient exchange, and the buckets, whose parameters get their gradients again.

        Raises:
            JobError: gradients are sparse, or the buckets change from step to step.
        """
        if not self._gradients:
            raise JobError("The model has sparse gradients, which no hook compresses. Set sparse=False.")
        samples = self._samples[WARM_UP:]
        if len(set(map(len, samples))) > 1:
            raise JobError("The number of buckets changes from step to step, so their times cannot be compared.")
        parameters = [parameter for spec in self.specs for parameter in spec.parameters]
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        rest = median(self._rests[WARM_UP:])
        return model_cost(samples, self._gradients, overlap, rest), Buckets(self.specs, self._gradients)
