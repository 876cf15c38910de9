"""`Job`: a model and its loss, which users specify as ``module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class JobError(Exception):
    """A job cannot be loaded or measured. The message names the reason and the remedy.

    Its cause is the exception of the job's own code, if that raised one.
    """


class Job(NamedTuple):
    model: nn.Module  # on the device, not wrapped in a DDP
    # called with the model, or with the model wrapped in DDP. Runs a forward pass on a batch of the usual size,
    # and returns a tensor with one element.
    loss: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer | None = None  # over the model's parameters; None: steps are predicted without it


Build = Callable[[torch.device], Job]

CONTRACT = (
    "a function that takes a torch.device and returns (model, loss) or (model, loss, optimizer), where loss(model) "
    "runs one batch"
)


def load(name: str) -> Build:
    """Import ``module:function``, also from the current folder. Raises JobError if it cannot be imported."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise JobError(f"{name!r} names no job; expected module:function, {CONTRACT}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise JobError(f"Module {module_name!r} cannot be imported: {error}.") from error
        if module_name.endswith(".py"):
            raise JobError(
                f"{name!r} names a file; expected module:function. In the folder of the file, write "
                f"{Path(module_name).stem}:{function_name}."
            ) from None
        raise JobError(
            f"There is no module {module_name!r} in {here} or among the installed packages. Run the command in the "
            "folder of the module, or set PYTHONPATH."
        ) from None
    except Exception as error:
        raise JobError(f"Module {module_name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise JobError(f"Module {module_name!r} has no function {function_name!r}; expected {CONTRACT}.")
    return lambda device: _called(name, function, device)


def _called(name: str, function: Callable[[torch.device], object], device: torch.device) -> Job:
    try:
        made = function(device)
    except Exception as error:
        raise JobError(f"{name} raised {type(error).__name__}: {error}. Expected {CONTRACT}.") from error
    if isinstance(made, tuple) and len(made) in (2, 3):
        model, loss, optimizer = (*made, None)[:3]
        can_step = optimizer is None or callable(getattr(optimizer, "step", None))
        if isinstance(model, nn.Module) and callable(loss) and can_step:
            return Job(model, loss, optimizer)
    types = ", ".join(type(each).__name__ for each in made) if isinstance(made, tuple) else type(made).__name__
    raise JobError(f"{name} returned {types}; expected {CONTRACT}.")


def check(job: Job, device: torch.device) -> Job:
    """The job. Raises JobError unless its model has gradients to exchange on ``device``, and its loss one element."""
    parameters = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    if not parameters:
        raise JobError("No parameter of the model requires a gradient, so there is nothing to exchange.")
    elsewhere = {str(parameter.device) for parameter in parameters if parameter.device.type != device.type}
    if elsewhere:
        raise JobError(f"The model has parameters on {', '.join(sorted(elsewhere))}; move it to {device}.")
    loss = _checked_loss(job)
    try:
        loss.backward()
    except Exception as error:
        raise JobError(f"The backward pass of loss(model) raised {type(error).__name__}: {error}.") from error
    without = [name for name, p in job.model.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        raise JobError(
            f"The backward pass leaves {len(without)} parameters without a gradient, {without[0]} among them. "
            "Use them, or set requires_grad = False."
        )
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise JobError("The model has sparse gradients, which no hook compresses. Set sparse=False.")
    job.model.zero_grad(set_to_none=True)
    return job


def _checked_loss(job: Job) -> Tensor:
    wrapped = _Wrapped(job.model)
    try:
        loss = job.loss(wrapped)
    except Exception as error:
        is_missing = isinstance(error, AttributeError)
        remedy = " model is a DistributedDataParallel; your model is model.module." * is_missing
        raise JobError(f"loss(model) raised {type(error).__name__}: {error}.{remedy}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise JobError(f"loss(model) returned {what}; expected a tensor of one element.")
    if not loss.requires_grad:
        raise JobError("loss(model) does not depend on a parameter that requires a gradient.")
    if not wrapped.is_called:
        raise JobError(
            "loss(model) does not call its argument. Call model(...) there: the argument is a DistributedDataParallel "
            "around the model, and gradients of the model alone are not exchanged."
        )
    return loss


class _Wrapped(nn.Module):
    """A model as a DistributedDataParallel wraps it; notes whether it is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_called = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.is_called = True
        return self.module(*inputs, **named)
