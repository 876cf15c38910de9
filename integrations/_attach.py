"""Compress the gradients of a model that a trainer has wrapped."""

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import sharded
from gradwire.exchange.decorators import CommHook
from gradwire.exchange.hook_state import HookState
from gradwire.hooks.by_name import NONE, hook_named, name_from_environment


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


def take_options(state: object, options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the hook that ``state`` names out of a trainer's ``options``, which are modified."""
    if not isinstance(state, str) or state == NONE:
        return {}
    names = list(signature(hook_named(state).make_state).parameters)[1:]  # the first one is the process group
    return {name: options.pop(name) for name in names if name in options}


def state_and_hook(state: Any, hook: CommHook | None, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The state and the hook that a name stands for; "none" and other arguments as they are.

    Trainers call it before they wrap a model, so that it raises then what `attach` would raise about these arguments.
    """
    if state == NONE:
        return state, None
    if not isinstance(state, str):
        if options:
            raise TypeError(
                f"There is an option {next(iter(options))!r} without the name of a hook. Pass it to the state, or pass "
                "the name, such as 'int4', in place of the state."
            )
        return state, hook
    if hook is not None:
        raise TypeError(f"There is a hook next to the name {state!r}. Leave out the hook, or pass its state.")
    named = hook_named(state)
    return named.state(**options), named.hook


def is_given(state: object, hook: object) -> bool:
    """Whether a strategy has a hook to attach: that of its arguments, or of the environment variable GRADWIRE_HOOK."""
    return state is not None or hook is not None or name_from_environment() is not None


def attach(
    model: nn.Module,
    state: Any = None,
    hook: CommHook | None = None,
    *,
    within: str | sharded.ReduceScatterOptions | None = None,
    **options: Any,
) -> sharded.Attachment | None:
    """Call `gradwire.attach` for the DistributedDataParallel or FSDP2 model inside ``model``.

    Call it after the trainer has wrapped the model: after ``fabric.setup``, ``accelerator.prepare`` or
    ``ray.train.torch.prepare_model``.

    Args:
        model: the model that the trainer returns: a DistributedDataParallel, a model with ``fully_shard``, or a
            wrapper around one.
        state: the name of a hook, such as "int4", or the state of a hook.
        hook: the hook of the state: gradwire's, PyTorch's or your own; by default the one that the state is made for.
        within: wire format of FSDP2's reduce-scatter; see `gradwire.attach`.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``.

    Returns:
        The handle of `gradwire.attach`; None if the model is not wrapped. In that case, and if there is a single
        process, the function issues a `HookNotUsedWarning`.

    Raises:
        ValueError: there is no hook of that name; the model contains several DistributedDataParallel modules; or see
            `gradwire.attach`.
        TypeError: the model is wrapped in FSDP1; or see `gradwire.attach`.
        NotImplementedError: see `gradwire.attach`.
        RuntimeError: a hook is already registered on the DistributedDataParallel.

    Examples:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> attach(model, "int4")
    """
    state_and_hook(state, hook, options)
    ddp = find_ddp(model)
    if state == NONE:
        return sharded.attach(ddp or model, state)
    name = _description(state, hook, within)
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
    return sharded.attach(ddp or model, state, hook, within=within, **options)


def _description(state: Any, hook: CommHook | None, within: object) -> str:
    """What compresses, for a warning."""
    if hook is not None:
        return str(getattr(hook, "__name__", "The hook"))
    if state is not None:
        return f"The hook {state!r}" if isinstance(state, str) else type(state).__name__
    return "The hook" if within is None else f"within={within!r}"


def follow_scaler(state: object, scaler: Any) -> None:
    """Let the error memory of a state follow the gradient scaler of a trainer, as far as there are both."""
    if scaler is not None and isinstance(state, HookState):
        state.follow_scaler(scaler)
