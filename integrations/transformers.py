"""A callback for Hugging Face Trainer that registers a hook and checkpoints its state.

Needs the package ``transformers``.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import Trainer, TrainerCallback

from gradwire.integrations._checkpoint import collect_state, restore_state
from gradwire.integrations._comm_hook import find_ddp, register_comm_hook

__all__ = ["CHECKPOINT_NAME", "GradwireCallback"]

CHECKPOINT_NAME = "gradwire_comm_hook.pt"


class GradwireCallback(TrainerCallback):
    """Registers a hook on a Trainer's DistributedDataParallel, and saves and loads its state with the optimizer's.

    The callback adds itself to the trainer. Trainer has no callback event for loading a checkpoint, so the callback
    extends the two private methods of ``trainer`` that save and load the optimizer.

    Args:
        trainer: a Trainer, or a subclass of it. Modified.
        state: state of the hook. If it has ``state_dict`` and ``load_state_dict``, as gradwire's states have, it is
            saved as ``gradwire_comm_hook.pt`` in every checkpoint that has the optimizer's state.
        hook: gradwire's, PyTorch's or your own.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)
        >>> GradwireCallback(trainer, PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)
        >>> trainer.train()
    """

    def __init__(self, trainer: Trainer, state: object, hook: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._state = state
        self._hook = hook
        self._ddp: TorchDDP | None = None
        _extend(trainer, "_save_optimizer_and_scheduler", self._save)
        _extend(trainer, "_load_optimizer_and_scheduler", self._load)
        trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook, unless loading a checkpoint has done it."""
        self._register()

    def _register(self) -> None:
        model = self._trainer.model_wrapped
        if self._ddp is None or find_ddp(model) is not self._ddp:  # every `train()` may wrap the model anew
            self._ddp = register_comm_hook(model, self._state, self._hook)

    def _save(self, folder: str) -> None:
        if self._ddp is None:
            return
        self._trainer.accelerator.wait_for_everyone()  # rank 0 has written model and optimizer meanwhile
        saved = collect_state(self._state)
        if saved and self._trainer.args.should_save:
            torch.save(saved, Path(folder) / CHECKPOINT_NAME)

    def _load(self, folder: str | None) -> None:
        self._register()
        if folder is None or self._ddp is None:
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
