"""Register a hook on the DistributedDataParallel that a trainer has created."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class HookNotUsedWarning(UserWarning):
    """A communication hook has no effect, because the trainer has not wrapped the model in DistributedDataParallel."""


def find_ddp(model: nn.Module) -> TorchDDP | None:
    """The DistributedDataParallel, PyTorch's or gradwire's, that ``model`` is or contains; None if there is none.

    Raises:
        ValueError: there are several.
    """
    found = [module for module in model.modules() if isinstance(module, TorchDDP)]
    if len(found) > 1:
        inner = any(each is not found[0] for each in found[0].modules() if isinstance(each, TorchDDP))
        raise ValueError(
            "The model is wrapped in DistributedDataParallel twice, so its gradients are averaged twice. Pass the "
            "unwrapped model to the trainer, which wraps it."
            if inner
            else f"This {type(model).__name__} contains {len(found)} DistributedDataParallel modules; expected one. A "
            "state serves one model: pass each of them separately, with its own state."
        )
    return found[0] if found else None


def register_comm_hook(model: nn.Module, state: object, hook: Callable[..., Any]) -> TorchDDP | None:
    """Register a hook on the DistributedDataParallel inside ``model``.

    Call it after the trainer has wrapped the model: after ``fabric.setup``, ``accelerator.prepare`` or
    ``ray.train.torch.prepare_model``.

    Args:
        model: the model that the trainer returns: a DistributedDataParallel, or a wrapper around one.
        state: passed to every call of the hook.
        hook: gradwire's, PyTorch's or your own.

    Returns:
        The DistributedDataParallel; None if there is none. In that case the function issues a `HookNotUsedWarning`,
        because gradients are not compressed.

    Raises:
        ValueError: the model contains several DistributedDataParallel modules.
        RuntimeError: a hook is already registered.
    """
    ddp = find_ddp(model)
    if ddp is None:
        warnings.warn(
            f"{getattr(hook, '__name__', hook)} is not used: this {type(model).__name__} contains no "
            "DistributedDataParallel, so no gradient is compressed. Trainers wrap the model in it when they prepare "
            "the model, and only if they run more than one process, without FSDP, DeepSpeed or DataParallel.",
            HookNotUsedWarning,
            stacklevel=2,
        )
        return None
    ddp.register_comm_hook(state, hook)
    return ddp
