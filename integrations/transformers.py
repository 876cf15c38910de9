"""A callback for Hugging Face Trainer that compresses gradients and checkpoints the hook's state.

Needs the package ``transformers``.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from gradwire.exchange.decorators import CommHook
from gradwire.integrations._attach import find_ddp
from gradwire.integrations._checkpoint import Compression, collect_state, load_shards, restore_state, save_shards
from gradwire.sharded import Attachment, ReduceScatterOptions

__all__ = ["CHECKPOINT_NAME", "GradwireCallback"]

CHECKPOINT_NAME = "gradwire_comm_hook.pt"


class GradwireCallback(TrainerCallback):
    """Compresses the gradients of a Trainer with DDP or FSDP2, and saves and loads the hook's state with the optimizer.

    The callback adds itself to the trainer. Trainer has no callback event for loading a checkpoint, so the callback
    extends the two private methods of ``trainer`` that save and load the optimizer.

    Args:
        trainer: a Trainer, or a subclass of it. Modified.
        state: the name of a hook, such as "int4" (see docs/hooks.md), or the state of a hook. If the state has
            ``state_dict`` and ``load_state_dict``, as gradwire's states have, it is saved in every checkpoint that has
            the optimizer's state: with DDP as the file ``gradwire_comm_hook.pt``, with FSDP2 as the folder
            ``gradwire_comm_hook``, which also has the errors of ``within``.
        hook: the hook of the state: gradwire's, PyTorch's or your own; by default the one that the state is made for.
        within: wire format of FSDP2's reduce-scatter; see `gradwire.attach`.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``.

    Attributes:
        attachment: the handle of `gradwire.attach`, once ``train`` has wrapped the model.

    Raises:
        ValueError: there is no hook of that name.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)
        >>> GradwireCallback(trainer, "int4")
        >>> trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        state: Any = None,
        hook: CommHook | None = None,
        *,
        within: str | ReduceScatterOptions | None = None,
        **options: Any,
    ) -> None:
        self._trainer = trainer
        self._compression = Compression(state, hook, within, options)
        _extend(trainer, "_save_optimizer_and_scheduler", self._save)
        _extend(trainer, "_load_optimizer_and_scheduler", self._load)
        trainer.add_callback(self)

    @property
    def attachment(self) -> Attachment | None:
        """The handle of `gradwire.attach`; None before ``train``, and if the model is not wrapped."""
        return self._compression.attachment

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Attach the hook, unless loading a checkpoint has done it."""
        self._attach()

    def _attach(self) -> None:
        model = self._trainer.model_wrapped  # wrapped anew by every `train()`
        self._compression.attach(find_ddp(model) or model, self._trainer.accelerator.scaler)

    def _save(self, folder: str) -> None:
        if self.attachment is None or not self._compression.has_memory:
            return
        self._trainer.accelerator.wait_for_everyone()  # rank 0 has written model and optimizer meanwhile
        if self._compression.is_sharded:
            save_shards(self.attachment, folder)
            return
        saved = collect_state(self.attachment.state)
        if saved and self._trainer.args.should_save:
            torch.save(saved, Path(folder) / CHECKPOINT_NAME)

    def _load(self, folder: str | None) -> None:
        self._attach()
        if folder is None or self.attachment is None or not self._compression.has_memory:
            return
        if self._compression.is_sharded:
            load_shards(self.attachment, folder)
            return
        path = Path(folder) / CHECKPOINT_NAME
        saved = torch.load(path, weights_only=True) if path.exists() else None
        restore_state(self.attachment.state, saved, folder)


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
