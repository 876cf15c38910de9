"""Measurement of the computation of hooks, on one device.

A hook runs as in training, but on a `TimingExecutor` with simulated collectives: as if all ranks sent the same values.
The computation between them is timed.
"""

import gc
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.comm import Executor, Transport, Workspace, connections_of, run_algorithm
from gradwire.comm.clock import Mark, durations
from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT, Task
from gradwire.comm.transport import AllReduce, AllToAll, Collective, Shot, pieces_on_gloo
from gradwire.exchange.decorators import is_zero_copy
from gradwire.hooks.default_hooks import allreduce_hook
from gradwire.planner.device_sync import spin, synchronize
from gradwire.planner.hook_registry import FIRST_COMPRESSED, HOOKS, Registration
from gradwire.planner.model_probe import MAX_STEPS, Buckets
from gradwire.planner.step_model import BETWEEN_NODES, IN_NODE, BucketCost, HookCost, Message
from gradwire.reducer.bucket import DenseBucket


class EqualRanks(Transport):
    """Collectives of ranks that all send the same values, simulated in one process, with gloo's pieces or without."""

    def __init__(
        self, world_size: int, is_gloo: bool, device: torch.device, local_size: int, round_trip: float = 0.0
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
        self, name: str, buckets: Buckets, group: dist.ProcessGroup, transport: EqualRanks, device: torch.device
    ) -> None:
        self._name = name
        self._gradients = buckets.gradients
        self._device = device
        self._executor = TimingExecutor(transport, device)
        connections_of(group).replace_executor(self._executor, device)
        self._buckets = [DenseBucket(spec, as_view=False) for spec in buckets.specs]
        self._registration = _registration(name, group, device)
        self._samples: list[list[list[float]]] = [[] for _ in self._buckets]
        self._messages: list[list[tuple[Message, ...]]] = [[] for _ in self._buckets]  # by bucket and step

    def measure(self, budget: float) -> HookCost:
        """Measure the cost of the hook, in steps for ``budget`` seconds; at least two are timed."""
        before = _tensor_bytes()
        for _ in range(FIRST_COMPRESSED + 1):
            self._step()
        self._samples = [[] for _ in self._buckets]
        started, steps = time.monotonic(), 0
        while steps < 2 or (steps < MAX_STEPS and time.monotonic() - started <= budget):
            self._step()
            steps += 1
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
        # The message is sent and received at once, and nothing is computed until the bucket is finished.
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
