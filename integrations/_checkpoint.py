"""Save and load the state of a hook in a trainer's checkpoints."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from gradwire.sharded import Attachment, ReduceScatterOptions

SHARDS = "gradwire_comm_hook"  # the folder of a sharded state in a checkpoint


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
        _warn_of_missing(type(state).__name__, source)
    else:
        state.load_state_dict(dict(saved))


def has_memory(state: object, within: object) -> bool:
    """Whether a hook's state or the reduce-scatter of an FSDP2 model keeps memory that a checkpoint must hold."""
    return isinstance(state, Stateful) or (isinstance(within, ReduceScatterOptions) and within.keeps_errors)


def check_shards(attachment: Attachment) -> None:
    """Raise now what `save_shards` would raise at the first checkpoint. A collective call."""
    attachment.state_dict()


def save_shards(attachment: Attachment, checkpoint: str | Path) -> None:
    """Save the memory of an FSDP2 model's hook as a distributed checkpoint in the folder ``checkpoint``.

    A collective call: every rank must make it, between two steps.
    """
    save(attachment.state_dict(), checkpoint_id=Path(checkpoint, SHARDS))


def load_shards(attachment: Attachment, checkpoint: str | Path) -> None:
    """Load what `save_shards` saved, with any number of ranks; warn if there is nothing. A collective call."""
    folder = Path(checkpoint, SHARDS)
    if not folder.exists():
        _warn_of_missing("It", checkpoint)
        return
    saved = attachment.state_dict()
    load(saved, checkpoint_id=folder)
    attachment.load_state_dict(saved)


def _warn_of_missing(name: str, source: object) -> None:
    warnings.warn(
        f"{source} holds no state of a communication hook. {name} starts anew: its step count is 0, and the error "
        "memory of the earlier run is lost.",
        stacklevel=3,
    )
