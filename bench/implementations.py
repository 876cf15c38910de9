"""Implementations that the benches of hooks time: one model, one DDP, one hook.

The model is 12 bias-free linear layers, alternately 512 x 2048 and 2048 x 512, with 12.6 million fp32 parameters. A
rank's batch is 8 rows, new in every step and equal for all implementations. Little compute and large gradients make it
a hard case: hardly anything overlaps with a hook.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import DistributedDataParallel
from gradwire.bench.gradient_checks import (
    complaint_about_feedback,
    complaint_about_mean,
    error_memory,
    stateless_format,
)
from gradwire.bench.timing import DriverCalls
from gradwire.comm.torch_internals import default_group
from gradwire.exchange.bucket import GradBucket
from gradwire.exchange.decorators import CommHook
from gradwire.exchange.hook_state import HookState
from gradwire.planner.device_sync import synchronize
from gradwire.planner.hook_registry import FIRST_COMPRESSED, HOOKS, HookEntry, Make, Registration

TorchDDP = nn.parallel.DistributedDataParallel

LAYERS, NARROW, WIDE, BATCH = 12, 512, 2048, 8
MODEL = f"{LAYERS} linear layers {NARROW} x {WIDE} / {WIDE} x {NARROW} without bias, batch {BATCH} per rank"
ONE_BUCKET_MB = 100  # more than the model's 50.3 MB
BUCKETS_NOTE = f"buckets: default size; PyTorch's powerSGD_hook needs one bucket on gloo: bucket_cap_mb={ONE_BUCKET_MB}"
WARM_UP = 5

PYTORCH = "PyTorch"
GRADWIRE = "gradwire"
GRADWIRE_ON_PYTORCH = "gradwire on PyTorch's DDP"


def make_model() -> nn.Sequential:
    """The model, equal on all ranks, with activations and gradients in the range of fp16."""
    torch.manual_seed(0)
    sizes = [(NARROW, WIDE), (WIDE, NARROW)] * (LAYERS // 2)
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in sizes))
    for weight in model.parameters():
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


def make_batch(step: int, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randn(BATCH, NARROW, generator=generator).to(device)


class Implementation:
    """The model, wrapped in a DDP, with a hook.

    ``name`` is `PYTORCH` (PyTorch's hook on PyTorch's DDP), `GRADWIRE` (both gradwire's) or `GRADWIRE_ON_PYTORCH`.
    By default, the model is one bucket only where PyTorch's hook needs it.
    Another ``model`` must take the batches of `make_batch` and be equal on all ranks.
    """

    def __init__(
        self,
        hook: str,
        name: str,
        device: torch.device,
        one_bucket: bool | None = None,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.hook = hook
        self.name = name
        self.one_bucket = needs_one_bucket(HOOKS[hook], name, device) if one_bucket is None else one_bucket
        self.seconds: list[float] = []  # timed steps
        self.host_seconds: list[float] = []  # CPU time of each step so far, until the backward returned
        self.link_bytes: list[int] = []  # sent over the network interface in the timed steps
        self.calls: DriverCalls | None = None  # driver calls of one more step, on a GPU
        self.device = device
        self._buckets: list[list[Tensor]] | None = None  # a list while buckets are recorded
        cap = ONE_BUCKET_MB if self.one_bucket else None
        ddp = DistributedDataParallel if name == GRADWIRE else TorchDDP
        module = make_model() if model is None else model
        self.ddp, self.state = wrap(module.to(device), self._make, ddp, group=group, bucket_cap_mb=cap)

    def _make(self, group: dist.ProcessGroup | None, start: int) -> Registration | None:
        """The hook of the implementation; on PyTorch's DDP it records buckets."""
        registration = maker_of(HOOKS[self.hook], self.name)(group, start)
        if registration is None or self.name == GRADWIRE:
            return registration
        state, hook = registration

        def recording_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            if self._buckets is not None:
                self._buckets.append(bucket.parameters())
            return hook(state, bucket)

        return state, recording_hook

    def step(self, batch: Tensor) -> float:
        """Seconds of a forward and a backward, until every gradient is final."""
        self.ddp.zero_grad(set_to_none=True)
        synchronize(self.device)
        start, started = time.perf_counter(), time.process_time()
        self._loss(batch).backward()
        self.host_seconds.append(time.process_time() - started)
        synchronize(self.device)
        return time.perf_counter() - start

    def backward(self, batch: Tensor) -> None:
        """A step without any wait for the device."""
        self.ddp.zero_grad(set_to_none=True)
        self._loss(batch).backward()

    def _loss(self, batch: Tensor) -> Tensor:
        out: Tensor = self.ddp(batch)
        return out.square().sum() / BATCH

    def check(self, batch: Tensor) -> None:
        """Take a step and check its gradients; every rank calls it. Raises RuntimeError if they are wrong."""
        self.ddp.zero_grad(set_to_none=True)
        with self.ddp.no_sync():
            self._loss(batch).backward()
        local, old = self._gradients(), error_memory(self.state)
        self._buckets = []
        self.step(batch)
        result, new = self._gradients(), error_memory(self.state)
        buckets, self._buckets = self._buckets, None
        entry, complaint = HOOKS[self.hook], None
        wire = entry.pytorch.wire or entry.wire if self.name == PYTORCH else entry.wire or stateless_format(self.state)
        if self.one_bucket and len(buckets) > 1:
            complaint = f"the model is {len(buckets)} buckets, not one"
        elif self.hook == "noop":
            if not all(map(torch.equal, result, local)):
                complaint = "the gradients are not this rank's own"
        elif wire is not None:
            complaint = complaint_about_mean(local, result, wire)
        else:
            errors = [self._by_parameter(memory, buckets) for memory in (old, new)]
            complaint = complaint_about_feedback(local, errors[0], result, errors[1], self.state)
        if complaint is not None:
            buckets_used = ", one bucket" if self.one_bucket else ""
            raise RuntimeError(f"{self.hook}, {self.name}{buckets_used}: {complaint}; nothing is timed.")

    def _gradients(self) -> list[Tensor]:
        return [p.grad.detach().clone() for p in self.ddp.module.parameters() if p.grad is not None]

    def _by_parameter(self, errors: Mapping[Any, Tensor], buckets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The error memory in the order of the model's parameters."""
        named = dict(self.ddp.module.named_parameters())
        if isinstance(self.state, HookState) and "errors" in self.state.memory.declared:
            return [errors[name] for name in named]
        views: dict[int, Tensor] = {}
        for flat, parameters in zip(errors.values(), buckets, strict=True):  # both in the order of buckets
            parts = flat.split([parameter.numel() for parameter in parameters])
            views |= {id(p): part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        return [views[id(parameter)] for parameter in named.values()]


def prepare(implementations: Sequence[Implementation], device: torch.device) -> None:
    """Warm up, then check the gradients of the next step. A collective call."""
    rank = dist.get_rank()
    for step in range(WARM_UP):
        for implementation in implementations:
            implementation.step(make_batch(step, rank, device))
    for implementation in implementations:
        implementation.check(make_batch(WARM_UP, rank, device))


def check_hook(hook: str, device: torch.device) -> list[float]:
    """Train a small model with gradwire's hook and check its gradients; returns the seconds of the steps.

    A collective call. Raises RuntimeError if the gradients are wrong.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NARROW, 256, bias=False), nn.Linear(256, 128, bias=False))
    implementation = Implementation(hook, GRADWIRE, device, model=model, group=default_group())
    batches = [make_batch(step, dist.get_rank(), device) for step in range(FIRST_COMPRESSED + 2)]
    seconds = [implementation.step(batch) for batch in batches[:-1]]
    implementation.check(batches[-1])
    return seconds


def needs_one_bucket(entry: HookEntry, name: str, device: torch.device) -> bool:
    """Whether an implementation of a hook runs only if the model is one bucket, as some of `PYTORCH` do on gloo."""
    return name == PYTORCH and entry.pytorch.one_bucket and device.type == "cpu"


def maker_of(entry: HookEntry, name: str) -> Make:
    """The function that makes the state and the hook of an implementation."""
    return entry.pytorch.make if name == PYTORCH else entry.make


def wrap(
    module: nn.Module,
    make: Make,
    ddp: type[TorchDDP] = DistributedDataParallel,
    start: int = FIRST_COMPRESSED,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[TorchDDP, Any]:
    """A module in a DDP with a hook that compresses from step ``start`` on, and the hook's state.

    By default, it has a process group of its own: hooks of one group share their wire memory, and would resize it for
    one another. On PyTorch's DDP the hook is `plainly_named`.
    """
    group = dist.new_group() if group is None else group
    wrapped = ddp(module, process_group=group, **options)
    state, hook = make(group, start) or (None, None)
    if hook is not None:
        wrapped.register_comm_hook(state, hook if ddp is DistributedDataParallel else plainly_named(hook))
    return wrapped, state


def plainly_named(hook: CommHook) -> CommHook:
    """``hook`` under another name: without NCCL, PyTorch's DDP refuses bf16 hooks by name."""
    return lambda state, bucket: hook(state, bucket)
