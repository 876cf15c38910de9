"""Strategies for Lightning's Trainer that compress gradients on every device and checkpoint the hook's state.

Needs the package ``lightning``.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.exchange.decorators import CommHook
from gradwire.exchange.memory import StateDict
from gradwire.hooks.by_name import NONE
from gradwire.integrations._attach import attach, follow_scaler, is_given, state_and_hook, take_options
from gradwire.integrations._checkpoint import KEY, Compression, collect_state, load_shards, restore_state, save_shards
from gradwire.reducer import DistributedDataParallel
from gradwire.sharded import Attachment, ReduceScatterOptions

__all__ = ["GradwireModelParallelStrategy", "GradwireStrategy"]


class GradwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradwire's DistributedDataParallel. Registers hooks and saves their state.

    Lightning's own strategy registers hooks on CUDA devices only, and silently drops them elsewhere. It does not save
    the state of a hook, so a resumed run continues without error memory.

    Args:
        ddp_comm_state: the name of a hook, such as "int4" (see docs/hooks.md), or the state of a hook; by default the
            hook that the environment variable ``GRADWIRE_HOOK`` names, or else the plain all-reduce. If the state has
            ``state_dict`` and ``load_state_dict``, as gradwire's states have, it is saved in every checkpoint that has
            the optimizer's state.
        ddp_comm_hook: the hook of the state; by default the one that the state is made for.
        ddp_comm_wrapper: applied to the hook, such as ``fp16_compress_wrapper``.
        ddp_class: gradwire's DistributedDataParallel, or PyTorch's.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``, and further arguments of Lightning's
            DDPStrategy, which passes unknown arguments on to ``ddp_class``.

    Attributes:
        attachment: the handle of `gradwire.attach`, once ``fit`` has wrapped the model; None for the plain all-reduce.

    Raises:
        ValueError: there is no hook of that name.
        TypeError: there is a ``ddp_comm_wrapper`` without a hook, or a name with a hook.

    Examples:
        >>> trainer = Trainer(strategy=GradwireStrategy("int4"), devices=2)
        >>> GradwireStrategy("powersgd-r4", start_powerSGD_iter=100, find_unused_parameters=True)
    """

    attachment: Attachment | None = None

    def __init__(
        self,
        ddp_comm_state: Any = None,
        ddp_comm_hook: CommHook | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        *,
        ddp_class: type[TorchDDP] = DistributedDataParallel,
        **options: Any,
    ) -> None:
        state, hook = state_and_hook(ddp_comm_state, ddp_comm_hook, take_options(ddp_comm_state, options))
        if ddp_comm_wrapper is not None and state != NONE:
            if hook is None:
                raise TypeError(
                    "ddp_comm_wrapper has no hook to wrap. Pass the name of a hook, or ddp_comm_hook with its state."
                )
            hook = ddp_comm_wrapper(hook)
        super().__init__(ddp_comm_state=state, ddp_comm_hook=hook, **options)
        self._ddp_class = ddp_class

    def _setup_model(self, model: nn.Module) -> TorchDDP:
        device_ids = self.determine_ddp_device_ids()
        # A side stream, as in Lightning: PyTorch requires it to capture a DDP in a CUDA graph.
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return self._ddp_class(module=model, device_ids=device_ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if is_given(self._ddp_comm_state, self._ddp_comm_hook):
            self.attachment = attach(self.model, self._ddp_comm_state, self._ddp_comm_hook)
            follow_scaler(self._hook_state, getattr(self.precision_plugin, "scaler", None))

    @property
    def _hook_state(self) -> Any:
        return None if self.attachment is None else self.attachment.state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add the state of the hook to a checkpoint and write it on rank 0. A collective call."""
        if "optimizer_states" in checkpoint and (saved := collect_state(self._hook_state)):
            checkpoint[KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and the state of the hook."""
        super().load_optimizer_state_dict(checkpoint)
        restore_state(self._hook_state, checkpoint.get(KEY), "The Lightning checkpoint")


class GradwireModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for FSDP2 and HSDP, with compressed gradients.

    Call ``fully_shard`` in ``configure_model`` of the LightningModule, as with Lightning's own strategy. The gradients
    are compressed from the first step of ``fit`` on.

    Args:
        state: the name of a hook, such as "int4", or the state of a hook between replicas; see `gradwire.attach`.
        hook: the hook of the state; by default the one that the state is made for.
        within: wire format of the reduce-scatter; see `gradwire.attach`.
        options: options of the named hook's state, and arguments of Lightning's ModelParallelStrategy.

    Attributes:
        attachment: the handle of `gradwire.attach`, once ``fit`` has prepared the model.

    Raises:
        ValueError: there is no hook of that name; or ``save_distributed_checkpoint`` is False, and the hook or
            ``within`` has memory to save.

    Examples:
        >>> trainer = Trainer(strategy=GradwireModelParallelStrategy("bf16"), devices=8)
        >>> GradwireModelParallelStrategy("int4", within="bf16")  # HSDP: int4 between replicas, bf16 within one
    """

    def __init__(
        self,
        state: Any = None,
        hook: CommHook | None = None,
        *,
        within: str | ReduceScatterOptions | None = None,
        **options: Any,
    ) -> None:
        self._compression = Compression(state, hook, within, take_options(state, options))
        super().__init__(**options)
        if self._compression.has_memory and not self._save_distributed_checkpoint:
            raise ValueError(
                "save_distributed_checkpoint is False, but the error memory is sharded like the model. Leave the "
                "argument out, or choose a hook without memory, such as 'bf16'."
            )

    @property
    def attachment(self) -> Attachment | None:
        """The handle of `gradwire.attach`; None before ``fit``, and if the model is not sharded."""
        return self._compression.attachment

    def setup(self, trainer: Trainer) -> None:
        """Prepare the model and, before training, attach the hook."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.model is not None:
            self._compression.attach(self.model, getattr(self.precision_plugin, "scaler", None))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, with the hook's memory if it has the optimizer's state. A collective call."""
        is_complete = "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if is_complete and self.attachment is not None and self._compression.has_memory:
            save_shards(self.attachment, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> StateDict:
        """Load the model, the optimizers and the hook's memory. A collective call."""
        loaded: StateDict = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self.attachment is not None and self._compression.has_memory:
            load_shards(self.attachment, Path(self.broadcast(checkpoint_path)))
        return loaded
