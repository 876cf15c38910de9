"""Checks when a hook is registered with gradwire's DistributedDataParallel: hook, state, process group."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradwire.comm.torch_internals import is_initialized_group
from gradwire.hooks._bucket import is_gradwire_hook
from gradwire.hooks._handshake import check_same_ranks
from gradwire.hooks.default_hooks import CastState
from gradwire.hooks.hook_state import HookState

PYTORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


def check_pairing(state: object, hook: Callable[..., Any]) -> None:
    """Raise TypeError for a hook of PyTorch's with a state of gradwire's."""
    module = getattr(hook, "__module__", None) or ""
    if module.startswith(PYTORCHS_HOOKS) and isinstance(state, HookState | CastState):
        name, kind = getattr(hook, "__name__", "hook"), type(state)
        raise TypeError(
            f"{name} is from PyTorch, but its state is gradwire's {kind.__name__}, which PyTorch's hook cannot use. "
            f"Import the hook from gradwire too: from {kind.__module__} import {name}."
        )


def in_group(state: Any, hook: Callable[..., Any], group: dist.ProcessGroup) -> Any:
    """The state to call a hook with, which averages over the ranks of its DistributedDataParallel.

    A state without a process group takes ``group``. So does one with another group of the same ranks: gradwire's
    connections belong to a group, and all of a model's fail and start again together. A `CastState`, which may serve
    several models, is left as it is: `agree` chooses the group of each.

    Args:
        state: passed to ``register_comm_hook``. The ``process_group`` of a state for one model is set.
        hook: passed to ``register_comm_hook``. A hook of the user's may pass its state to several of gradwire's, with
            groups of their own.
        group: process group of the DistributedDataParallel.

    Raises:
        ValueError: the state has or is a group of other ranks.
    """
    is_ours, has_group = is_gradwire_hook(hook), isinstance(state, HookState | CastState)
    if not has_group and not (is_ours and isinstance(state, dist.ProcessGroup)):
        return state
    chosen = state.process_group if has_group else state
    if isinstance(state, HookState) and state.follows_model:
        chosen = None
    if chosen is not None and chosen is not group and is_initialized_group(chosen):
        if not is_ours:
            return state
        check_same_ranks(chosen, group, "hook's process group")
    if not has_group:
        return group
    if isinstance(state, HookState):
        state.process_group, state.follows_model = group, True
    return state
