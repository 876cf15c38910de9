"""The models of the benches as jobs of `gradwire advise`, and their training steps with a hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import DistributedDataParallel
from gradwire.bench.implementations import make_batch, make_model
from gradwire.bench.models import MODELS
from gradwire.planner.hook_registry import Make
from gradwire.planner.jobs import Build, Job

FIRST_COMPRESSED = 2  # the step from which on the buckets are final


def _job(model: Callable[[], nn.Module], batch: Callable[[], Tensor], device: torch.device) -> Job:
    torch.manual_seed(0)
    inputs = batch().to(device)

    def loss(module: nn.Module) -> Tensor:
        outputs: Tensor = module(inputs)
        return outputs.square().sum() / len(inputs)

    return Job(model().to(device), loss)


JOBS: dict[str, Build] = {
    "linear": partial(_job, make_model, partial(make_batch, 0, 0, torch.device("cpu"))),
    **{name: partial(_job, model.build, partial(torch.randn, model.input_shape)) for name, model in MODELS.items()},
}


class Training:
    """A job's model in gradwire's DDP, with a hook.

    Args:
        job: the model and its loss.
        make: the hook's registration, from the registry or alike.

    Attributes:
        state: of the hook; None without one.
        seconds: of the timed steps.
    """

    def __init__(self, job: Job, make: Make) -> None:
        self.state: Any = None
        self.seconds: list[float] = []
        self._loss = job.loss
        group = dist.new_group()  # hooks of one group share their wire memory
        self._ddp = DistributedDataParallel(job.model, process_group=group)
        registration = make(group, FIRST_COMPRESSED)
        if registration is not None:
            self.state, hook = registration
            self._ddp.register_comm_hook(self.state, hook)

    def step(self) -> float:
        """Seconds of a forward and a backward, until every gradient is final; all ranks begin together."""
        self._ddp.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        self._loss(self._ddp).backward()
        return time.perf_counter() - start
