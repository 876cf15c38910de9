"""Compress the gradients of a model that a trainer has wrapped."""

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import sharded
from gradwire.hooks.hook_state import HookState


class HookNotUsedWarning(UserWarning):
    """The hook saves nothing: the trainer has not wrapped the model, or there is no other process to send to."""


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


def attach(
    model: nn.Module,
    state: Any = None,
    hook: Callable[..., Any] | None = None,
    *,
    within: str | sharded.ReduceScatterOptions | None = None,
) -> sharded.Attachment | None:
    """Call `gradwire.attach` for the DistributedDataParallel or FSDP2 model inside ``model``.

    Call it after the trainer has wrapped the model: after ``fabric.setup``, ``accelerator.prepare`` or
    ``ray.train.torch.prepare_model``.

    Args:
        model: the model that the trainer returns: a DistributedDataParallel, a model with ``fully_shard``, or a
            wrapper around one.
        state: state of the hook.
        hook: gradwire's, PyTorch's or your own; by default the one that the state is made for.
        within: wire format of FSDP2's reduce-scatter; see `gradwire.attach`.

    Returns:
        The handle of `gradwire.attach`; None if the model is not wrapped. In that case, and if there is a single
        process, the function issues a `HookNotUsedWarning`.

    Raises:
        ValueError: the model contains several DistributedDataParallel modules; or see `gradwire.attach`.
        TypeError: the model is wrapped in FSDP1; or see `gradwire.attach`.
        NotImplementedError: see `gradwire.attach`.
        RuntimeError: a hook is already registered on the DistributedDataParallel.
    """
    ddp = find_ddp(model)
    name = getattr(hook, "__name__", f"within={within!r}" if state is None else type(state).__name__)
    if ddp is None and not any(isinstance(each, (FSDPModule, FullyShardedDataParallel)) for each in model.modules()):
        warnings.warn(
            f"{name} is not used: this {type(model).__name__} contains neither "
            "DistributedDataParallel nor FSDP2, so no gradient is compressed. Trainers wrap the model when they "
            "prepare it, and only if they run more than one process, without DeepSpeed or DataParallel.",
            HookNotUsedWarning,
            stacklevel=2,
        )
        return None
    if dist.get_world_size() == 1:
        warnings.warn(
            f"{name} saves nothing: there is a single process, which sends no gradients. Train on several devices or "
            "nodes, or without the hook, which only costs time and accuracy here.",
            HookNotUsedWarning,
            stacklevel=2,
        )
    return sharded.attach(ddp or model, state, hook, within=within)


def follow_scaler(state: object, scaler: Any) -> None:
    """Let the error memory of a state follow the gradient scaler of a trainer, as far as there are both."""
    if scaler is not None and isinstance(state, HookState):
        state.follow_scaler(scaler)
