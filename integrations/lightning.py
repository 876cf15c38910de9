"""Strategies for Lightning's Trainer that compress gradients on every device and checkpoint the hook's state.

Needs the package ``lightning``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.integrations._attach import attach, follow_scaler
from gradwire.integrations._checkpoint import (
    check_shards,
    collect_state,
    has_memory,
    load_shards,
    restore_state,
    save_shards,
)
from gradwire.reducer import DistributedDataParallel
from gradwire.sharded import Attachment, ReduceScatterOptions

__all__ = ["GradwireModelParallelStrategy", "GradwireStrategy"]

CHECKPOINT_KEY = "gradwire_comm_hook"


class GradwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradwire's DistributedDataParallel. Registers hooks and saves their state.

    Lightning's own strategy registers hooks on CUDA devices only, and silently drops them elsewhere. It does not save
    the state of a hook, so a resumed run continues without error memory.

    Args:
        ddp_class: gradwire's DistributedDataParallel, or PyTorch's.
        ddp_comm_state: state of the hook. If it has ``state_dict`` and ``load_state_dict``, as gradwire's states have,
            it is saved in every checkpoint that has the optimizer's state.
        ddp_comm_hook: the hook; None for the plain all-reduce.
        ddp_comm_wrapper: applied to the hook, such as ``fp16_compress_wrapper``.
        options: further arguments of Lightning's DDPStrategy, which passes unknown arguments on to ``ddp_class``.

    Examples:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> strategy = GradwireStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)
        >>> trainer = Trainer(strategy=strategy, devices=2)
    """

    def __init__(self, *, ddp_class: type[TorchDDP] = DistributedDataParallel, **options: Any) -> None:
        super().__init__(**options)
        self._ddp_class = ddp_class

    def _setup_model(self, model: nn.Module) -> TorchDDP:
        device_ids = self.determine_ddp_device_ids()
        # A side stream, as in Lightning: PyTorch requires it to capture a DDP in a CUDA graph.
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return self._ddp_class(module=model, device_ids=device_ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is not None:
            hook = hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
            attach(self.model, self._ddp_comm_state, hook)
            follow_scaler(self._ddp_comm_state, getattr(self.precision_plugin, "scaler", None))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add the state of the hook to a checkpoint and write it on rank 0. A collective call."""
        if "optimizer_states" in checkpoint and (saved := collect_state(self._ddp_comm_state)):
            checkpoint[CHECKPOINT_KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and the state of the hook."""
        super().load_optimizer_state_dict(checkpoint)
        restore_state(self._ddp_comm_state, checkpoint.get(CHECKPOINT_KEY), "The Lightning checkpoint")


class GradwireModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, for FSDP2 and HSDP, with compressed gradients.

    Call ``fully_shard`` in ``configure_model`` of the LightningModule, as with Lightning's own strategy. The gradients
    are compressed from the first step of ``fit`` on.

    Args:
        comm_state: state of the hook between replicas; see `gradwire.attach`.
        comm_hook: the hook; by default the one that the state is made for.
        within: wire format of the reduce-scatter; see `gradwire.attach`.
        options: arguments of Lightning's ModelParallelStrategy.

    Raises:
        ValueError: ``save_distributed_checkpoint`` is False, and the hook or ``within`` has memory to save.

    Examples:
        >>> strategy = GradwireModelParallelStrategy(within="bf16")
        >>> trainer = Trainer(strategy=strategy, devices=8)
    """

    def __init__(
        self,
        *,
        comm_state: Any = None,
        comm_hook: Any = None,
        within: str | ReduceScatterOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._comm_state, self._comm_hook, self._within = comm_state, comm_hook, within
        self._attached: nn.Module | None = None
        self._attachment: Attachment | None = None
        if has_memory(comm_state, within) and not self._save_distributed_checkpoint:
            raise ValueError(
                "save_distributed_checkpoint is False, but the error memory is sharded like the model. Leave the "
                "argument out, or use neither a hook's state nor error feedback within a replica."
            )

    def setup(self, trainer: Trainer) -> None:
        """Prepare the model and, before training, attach the hook."""
        super().setup(trainer)
        model = self.model
        if trainer.state.fn == TrainerFn.FITTING and model is not None and model is not self._attached:
            self._attachment = attach(model, self._comm_state, self._comm_hook, within=self._within)
            self._attached = model
            follow_scaler(self._comm_state, getattr(self.precision_plugin, "scaler", None))
            if self._attachment is not None and has_memory(self._comm_state, self._within):
                check_shards(self._attachment)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, with the hook's memory if it has the optimizer's state. A collective call."""
        is_complete = "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if is_complete and self._attachment is not None and has_memory(self._comm_state, self._within):
            save_shards(self._attachment, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model, the optimizers and the hook's memory. A collective call."""
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._attachment is not None and has_memory(self._comm_state, self._within):
            load_shards(self._attachment, Path(self.broadcast(checkpoint_path)))
        return loaded
