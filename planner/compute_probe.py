"""Measurements on one device: a step of the model without gradient exchange, and the computation of each hook.

A hook runs as in training, but on a `TimingExecutor` with simulated collectives: as if all ranks sent the same values.
The computation between them is timed.
"""

import gc
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.comm import Executor, Transport, Workspace, connections_of, run_algorithm
from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT, Task
from gradwire.comm.transport import AllReduce, AllToAll, Collective, Shot, pieces_on_gloo
from gradwire.hooks._bucket import GradBucket
from gradwire.hooks._decorators import is_zero_copy, zero_copy
from gradwire.hooks.debugging_hooks import noop_hook
from gradwire.hooks.default_hooks import allreduce_hook
from gradwire.hooks.telemetry import Mark, durations
from gradwire.planner.clock import spin, synchronize
from gradwire.planner.hook_registry import HOOKS, Registration
from gradwire.planner.jobs import Job, JobError
from gradwire.planner.model import BETWEEN_NODES, IN_NODE, BucketCost, HookCost, Message, ModelCost, Overlap
from gradwire.reducer import DistributedDataParallel
from gradwire.reducer.bucket import BucketSpec, DenseBucket

WARM_UP = 3  # steps: the first builds buckets, the second rebuilds them
FIRST_COMPRESSED = 2
MIN_STEPS, MAX_STEPS = 3, 10
OPTIMIZER_STEPS = 6  # equal on all ranks, as a step may be collective; the first creates the state


class Buckets(NamedTuple):
    """The buckets and gradients of a model."""

    specs: list[BucketSpec]  # in the order of launch
    gradients: list[Tensor]  # copies, in the order of the model's parameters


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
    for step in range(WARM_UP + MAX_STEPS):
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
    forward, *ready, backward = map(median, zip(*samples, strict=True))
    parameters = [p for spec in specs for p in spec.parameters]
    gradients = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    cost = ModelCost(
        forward=forward,
        backward=backward,
        ready=tuple(ready),
        gradient_bytes=sum(gradient.nbytes for gradient in gradients),
        overlap=overlap,
        spread=spread_of(forward + backward for forward, *_, backward in samples),
    )
    return cost, Buckets(list(specs), gradients)


def spread_of(seconds: Iterable[float]) -> float:
    """The longest time over the shortest."""
    times = list(seconds)
    return max(times) / min(times)


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
    parameters = bucket.parameters()
    return BucketSpec(
        index=bucket.index(),
        is_last=bucket.is_last(),
        members=list(range(len(parameters))),
        parameters=parameters,
        names=names,
        model_parameters=model_parameters,
    )


def _seconds(begin: Mark, end: Mark) -> float:
    return 1e-3 * end.milliseconds_since(begin)


def _all_agree(is_done: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    flag = torch.tensor(int(is_done), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


class EqualRanks(Transport):
    """Collectives of ranks that all send the same values, simulated in one process, with gloo's pieces or without."""

    def __init__(
        self, world_size: int, is_gloo: bool, device: torch.device, local_size: int = 1, round_trip: float = 0.0
    ) -> None:
        super().__init__(world_size)
        self.local_size, self.round_trip = local_size, round_trip
        self._is_gloo, self._device = is_gloo, device
        self.marks: list[Mark] = []  # before and after each collective
        self.messages: list[Message] = []

    def pieces(self, nbytes: int) -> int:
        return pieces_on_gloo(nbytes, self.world_size, self.round_trip) if self._is_gloo else 1

    def run(self, collective: Collective) -> None:
        self.marks.append(Mark(self._device))
        self.messages.append(message_of(collective))
        if isinstance(collective, AllToAll):
            collective.target.copy_(collective.source[:, :1].expand_as(collective.target))
        elif isinstance(collective, AllReduce) and collective.op == dist.ReduceOp.SUM:
            for tensor in collective.tensors:
                tensor.mul_(self.world_size)
        else:
            collective.run_alone()
        self.marks.append(Mark(self._device))


class TimingExecutor(Executor):
    """Runs each task at once, in the caller's thread and stream, and times its computation."""

    def __init__(self, transport: EqualRanks, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._ranks, self._device = transport, device
        self._turn = 0
        self.marks: list[Mark] = []  # start and end of each part of the latest task
        self.messages: list[Message] = []  # messages of the latest task

    def submit(self, task: Task) -> Future[Any]:
        self.messages = self._ranks.messages = []
        self.marks = self._ranks.marks = [Mark(self._device)]
        future: Future[Any] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        value = run_algorithm(task.begin(self.workspaces[self._turn % MAX_TASKS_IN_FLIGHT]), self._ranks)
        future.set_result(value if task.result is None else task.result)
        self.marks.append(Mark(self._device))
        self._turn += 1
        return future

    def finish(self) -> None:
        """Begin a step: each bucket gets the same workspace in all of them."""
        self._turn = 0


def message_of(collective: Collective) -> Message:
    """The message of a collective: its kind (the operation and, for sums, the dtype) and its payload."""
    if isinstance(collective, AllReduce):
        largest = max(collective.tensors, key=lambda tensor: tensor.nbytes)
        return Message(f"all-reduce {str(largest.dtype).removeprefix('torch.')}", collective.payload_bytes)
    assert isinstance(collective, Shot)
    kind = "all-to-all" if isinstance(collective, AllToAll) else "all-gather"
    if collective.part is None:
        return Message(kind, collective.payload_bytes)
    if collective.part.is_in_node:
        return Message(kind + IN_NODE, collective.target.nbytes // 2)
    return Message(kind + BETWEEN_NODES, collective.payload_bytes)


class HookProbe:
    """Runs one hook on the buckets of a model and times it; replaces the group's executor by a `TimingExecutor`."""

    def __init__(
        self,
        name: str,
        buckets: Buckets,
        group: dist.ProcessGroup,
        world_size: int,
        device: torch.device,
        local_size: int = 1,
        round_trip: float = 0.0,
    ) -> None:
        self._name, self._gradients, self._device = name, buckets.gradients, device
        transport = EqualRanks(world_size, dist.get_backend(group) == "gloo", device, local_size, round_trip)
        self._executor = TimingExecutor(transport, device)
        connections_of(group).replace_executor(self._executor, device)
        self._buckets = [DenseBucket(spec, as_view=False) for spec in buckets.specs]
        self._registration = _registration(name, group, device)
        self._samples: list[list[list[float]]] = [[] for _ in self._buckets]
        self._messages: list[list[tuple[Message, ...]]] = [[] for _ in self._buckets]  # by bucket and step

    def measure(self, budget: float) -> HookCost:
        """Measure the cost of the hook, in steps for ``budget`` seconds; at least two are timed."""
        before = _tensor_bytes()
        started = time.monotonic()
        for step in range(FIRST_COMPRESSED + 1 + MAX_STEPS):
            if step == FIRST_COMPRESSED + 1:
                self._samples = [[] for _ in self._buckets]
                started = time.monotonic()
            self._step()
            if step > FIRST_COMPRESSED + 1 and time.monotonic() - started > budget:
                break
        memory = _tensor_bytes() - before
        medians = [list(map(median, zip(*samples, strict=True))) for samples in self._samples]
        costs = [
            BucketCost(launch, tuple(compute), _mean(*messages[-2:]), finish)
            for (launch, *compute, finish), messages in zip(medians, self._messages, strict=True)
        ]
        return HookCost(name=self._name, buckets=tuple(costs), memory_bytes=max(memory, 0))

    @torch.no_grad()
    def _step(self) -> None:
        parameters = [p for bucket in self._buckets for p in bucket.parameters()]
        torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], self._gradients)
        self._executor.finish()
        reduce = self._reduce_plain if self._registration is None else self._reduce
        marks = [reduce(bucket) for bucket in self._buckets]
        synchronize(self._device)
        for samples, bucket_marks in zip(self._samples, marks, strict=True):
            samples.append([1e-3 * duration for duration in durations(bucket_marks)])

    def _reduce(self, bucket: DenseBucket) -> list[Mark]:
        """Run the hook on a bucket; returns start and end of its launch, of each part, and of its finish."""
        assert self._registration is not None
        state, hook = self._registration
        bucket.collect(is_zero_copy(hook))
        spin(self._device)
        begin = Mark(self._device)
        future = hook(state, bucket)  # type: ignore[arg-type]
        parts = self._executor.marks
        self._messages[bucket.index()].append(tuple(self._executor.messages))
        returned = Mark(self._device)
        bucket.finish(future.wait(), 1.0, {})
        return [begin, parts[0], *parts, returned, Mark(self._device)]

    def _reduce_plain(self, bucket: DenseBucket) -> list[Mark]:
        """Flatten and unflatten a bucket, as a plain all-reduce on a CPU: gloo's threads do the rest."""
        bucket.collect(False)
        begin = Mark(self._device)
        flat = bucket.scale_into_buffer()
        sent = Mark(self._device)
        dtype = str(flat.dtype).removeprefix("torch.")
        self._messages[bucket.index()].append((Message(f"all-reduce {dtype}", flat.nbytes),))
        bucket.finish(flat, 1.0, {})
        return [begin, *[sent] * 6, Mark(self._device)]


def _mean(even: tuple[Message, ...], odd: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages of two successive steps, which differ if a hook sends P in one and Q in the next."""
    return tuple(Message(one.kind, (one.nbytes + two.nbytes) // 2) for one, two in zip(even, odd, strict=True))


def _registration(name: str, group: dist.ProcessGroup, device: torch.device) -> Registration | None:
    """The state and the hook to time; None for the plain all-reduce on a CPU, which `_reduce_plain` times."""
    if name in ("none", "allreduce"):
        return None if device.type == "cpu" else (group, allreduce_hook)
    return HOOKS[name].make(group, FIRST_COMPRESSED)


def _tensor_bytes() -> int:
    """Bytes of all dense tensors that Python knows, without those of subclasses, which may lack a storage."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
