"""A callback for Hugging Face Trainer that compresses gradients and checkpoints the hook's state.

Needs the package ``transformers``.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from gradwire.integrations._attach import attach, find_ddp, follow_scaler
from gradwire.integrations._checkpoint import (
    check_shards,
    collect_state,
    has_memory,
    load_shards,
    restore_state,
    save_shards,
)
from gradwire.sharded import Attachment, ReduceScatterOptions

__all__ = ["CHECKPOINT_NAME", "GradwireCallback"]

CHECKPOINT_NAME = "gradwire_comm_hook.pt"


class GradwireCallback(TrainerCallback):
    """Compresses the gradients of a Trainer with DDP or FSDP2, and saves and loads the hook's state with the optimizer.

    The callback adds itself to the trainer. Trainer has no callback event for loading a checkpoint, so the callback
    extends the two private methods of ``trainer`` that save and load the optimizer.

    Args:
        trainer: a Trainer, or a subclass of it. Modified.
        state: state of the hook. If it has ``state_dict`` and ``load_state_dict``, as gradwire's states have, it is
            saved in every checkpoint that has the optimizer's state: with DDP as the file ``gradwire_comm_hook.pt``,
            with FSDP2 as the folder ``gradwire_comm_hook``, which also has the errors of ``within``.
        hook: gradwire's, PyTorch's or your own; by default the one that the state is made for.
        within: wire format of FSDP2's reduce-scatter; see `gradwire.attach`.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)
        >>> GradwireCallback(trainer, PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)
        >>> trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        state: Any = None,
        hook: Callable[..., Any] | None = None,
        *,
        within: str | ReduceScatterOptions | None = None,
    ) -> None:
        self._trainer = trainer
        self._state = state
        self._hook = hook
        self._within = within
        self._attached: nn.Module | None = None  # the DistributedDataParallel or the model of FSDP2
        self._attachment: Attachment | None = None
        _extend(trainer, "_save_optimizer_and_scheduler", self._save)
        _extend(trainer, "_load_optimizer_and_scheduler", self._load)
        trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Attach the hook, unless loading a checkpoint has done it."""
        self._attach()

    def _attach(self) -> None:
        model = find_ddp(self._trainer.model_wrapped) or self._trainer.model_wrapped
        if self._attachment is None or model is not self._attached:  # every `train()` may wrap the model anew
            self._attachment = attach(model, self._state, self._hook, within=self._within)
            self._attached = model
            follow_scaler(self._state, self._trainer.accelerator.scaler)
            if self._attachment is not None and self._is_sharded and has_memory(self._state, self._within):
                check_shards(self._attachment)

    @property
    def _is_sharded(self) -> bool:
        return self._attached is not None and find_ddp(self._attached) is None

    def _save(self, folder: str) -> None:
        if self._attachment is None or not has_memory(self._state, self._within):
            return
        self._trainer.accelerator.wait_for_everyone()  # rank 0 has written model and optimizer meanwhile
        if self._is_sharded:
            save_shards(self._attachment, folder)
            return
        saved = collect_state(self._state)
        if saved and self._trainer.args.should_save:
            torch.save(saved, Path(folder) / CHECKPOINT_NAME)

    def _load(self, folder: str | None) -> None:
        self._attach()
        if folder is None or self._attachment is None or not has_memory(self._state, self._within):
            return
        if self._is_sharded:
            load_shards(self._attachment, folder)
            return
        path = Path(folder) / CHECKPOINT_NAME
        restore_state(self._state, torch.load(path, weights_only=True) if path.exists() else None, folder)


def _extend(trainer: Trainer, method: str, action: Callable[[str], None]) -> None:
    """Let a method of one trainer, whose argument is the folder of a checkpoint, call ``action(folder)`` at its end."""
    original = getattr(trainer, method, None)
    if original is None:
        raise RuntimeError(
            f"This {type(trainer).__name__} has no method {method}, which gradwire extends to save and load the hook's "
            "state. Use a version of transformers that docs/trainers.md lists as tested."
        )

    @wraps(original)
    def extended(folder: str) -> None:
        original(folder)
        action(folder)

    setattr(trainer, method, extended)
