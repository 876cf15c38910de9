"""Save and load the state of a hook in a trainer's checkpoints."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from gradwire.exchange.decorators import CommHook
from gradwire.exchange.memory import StateDict
from gradwire.hooks.by_name import hook_named
from gradwire.integrations._attach import attach, find_ddp, follow_scaler, state_and_hook
from gradwire.sharded import Attachment, ReduceScatterOptions

KEY = "gradwire_comm_hook"  # the entry of a hook in a checkpoint, or the folder of a sharded one


class Compression:
    """The arguments of `attach` until a trainer has wrapped the model; then the attachment, and its memory.

    Raises what `attach` would raise about the arguments.

    Attributes:
        attachment: the handle of the latest `attach`; None before, and if the model is not wrapped.
        is_sharded: whether the model is one of FSDP2.
        has_memory: whether a checkpoint must hold something.
    """

    def __init__(
        self,
        state: Any,
        hook: CommHook | None,
        within: str | ReduceScatterOptions | None,
        options: Mapping[str, Any],
    ) -> None:
        planned, _ = state_and_hook(state, hook, options)
        self._state = state
        self._hook = hook
        self._within = within
        self._options = options
        self._model: nn.Module | None = None
        self.attachment: Attachment | None = None
        self.is_sharded = False
        self.has_memory = self._keeps_memory(planned)

    def attach(self, model: nn.Module, scaler: Any) -> None:
        """Attach the hook to a model that has been wrapped, unless that is done, and follow a gradient scaler."""
        if model is self._model:
            return
        self._model, self.is_sharded = model, find_ddp(model) is None
        self.attachment = attach(model, self._state, self._hook, within=self._within, **self._options)
        state = None if self.attachment is None else self.attachment.state
        if isinstance(self._state, str) and state is not None:  # the next wrapper of the model gets the same state
            self._state, self._hook, self._options = state, hook_named(self._state).hook, {}
        self.has_memory = self.attachment is not None and self._keeps_memory(state)
        follow_scaler(state, scaler)
        if self.attachment is not None and self.has_memory and self.is_sharded:
            self.attachment.state_dict()  # raises now what it would raise at the first checkpoint

    def _keeps_memory(self, state: object) -> bool:
        within = self._within
        return isinstance(state, Stateful) or (isinstance(within, ReduceScatterOptions) and within.keeps_errors)


def collect_state(state: object) -> StateDict:
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


def save_shards(attachment: Attachment, checkpoint: str | Path) -> None:
    """Save the memory of an FSDP2 model's hook as a distributed checkpoint in the folder ``checkpoint``.

    A collective call: every rank must make it, between two steps.
    """
    save(attachment.state_dict(), checkpoint_id=Path(checkpoint, KEY))


def load_shards(attachment: Attachment, checkpoint: str | Path) -> None:
    """Load what `save_shards` saved, with any number of ranks; warn if there is nothing. A collective call."""
    folder = Path(checkpoint, KEY)
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
