"""A strategy for Lightning's Trainer that registers hooks on every device and checkpoints their state.

Needs the package ``lightning``.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.integrations._checkpoint import collect_state, restore_state
from gradwire.integrations._comm_hook import register_comm_hook
from gradwire.reducer import DistributedDataParallel

__all__ = ["GradwireStrategy"]

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
            register_comm_hook(self.model, self._ddp_comm_state, hook)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add the state of the hook to a checkpoint and write it on rank 0. A collective call."""
        if "optimizer_states" in checkpoint and (saved := collect_state(self._ddp_comm_state)):
            checkpoint[CHECKPOINT_KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and the state of the hook."""
        super().load_optimizer_state_dict(checkpoint)
        restore_state(self._ddp_comm_state, checkpoint.get(CHECKPOINT_KEY), "The Lightning checkpoint")
