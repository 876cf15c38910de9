"""`ScriptProbe`: measures the model of a running training script, for `measure_exchange`."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.comm.torch_internals import queue_callback
from gradwire.hooks._bucket import GradBucket
from gradwire.hooks._names import parameter_names
from gradwire.hooks.telemetry import Mark
from gradwire.planner.clock import synchronize
from gradwire.planner.compute_probe import MAX_STEPS, WARM_UP, Buckets, model_cost, spec_of
from gradwire.planner.jobs import JobError
from gradwire.planner.model import ModelCost, Overlap
from gradwire.reducer.bucket import BucketSpec

STEPS = WARM_UP + MAX_STEPS


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
            self._samples.append([1e-3 * t.milliseconds_since(times[min(k, 1)]) for k, t in enumerate(times[1:])])
            self._rests.append(1e-3 * begin.milliseconds_since(self._end))
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
