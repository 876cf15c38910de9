"""The models of the benches as jobs of `gradwire advise`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gradwire.bench.implementations import make_batch, make_model
from gradwire.bench.models import MODELS
from gradwire.planner.jobs import Build, Job


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
