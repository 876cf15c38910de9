"""Save and load the state of a hook in a trainer's checkpoints."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful


def collect_state(state: object) -> dict[str, Any]:
    """The state dict of a hook's state, equal on all ranks; empty if there is nothing to save.

    A collective call: every rank must make it, between two steps.
    """
    if not isinstance(state, Stateful):
        return {}
    if hasattr(state, "prepare_checkpoint"):
        state.prepare_checkpoint()  # waits longer for the other ranks than `state_dict` does
    return state.state_dict()


def restore_state(state: object, saved: Mapping[str, Any] | None, source: object) -> None:
    """Load what `collect_state` returned; the hook must be registered already.

    Args:
        state: state of the hook. Modified.
        saved: None, with a warning, if the checkpoint has no entry for the hook.
        source: the checkpoint, for the warning.
    """
    if not isinstance(state, Stateful):
        return
    if saved is None:
        warnings.warn(
            f"{source} holds no state of a communication hook. {type(state).__name__} starts anew: its step count is "
            "0, and the error memory of the earlier run is lost.",
            stacklevel=2,
        )
    else:
        state.load_state_dict(dict(saved))
