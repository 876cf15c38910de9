"""A strategy for Lightning Fabric that compresses gradients and checkpoints the hook's state.

Needs the package ``lightning``.
"""

from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.exchange.decorators import CommHook
from gradwire.integrations._attach import attach, follow_scaler, is_given, state_and_hook, take_options
from gradwire.integrations._checkpoint import KEY, collect_state, restore_state
from gradwire.reducer import DistributedDataParallel
from gradwire.sharded import Attachment

__all__ = ["GradwireStrategy"]


class GradwireStrategy(DDPStrategy):
    """Fabric's DDPStrategy with gradwire's DistributedDataParallel. Attaches hooks and saves their state.

    ``fabric.setup`` attaches the hook to every model, with a state for each. ``fabric.save`` adds the states to every
    checkpoint that has an optimizer, and ``fabric.load`` loads them with the optimizer. With fp16 mixed precision,
    error memory follows Fabric's gradient scaler.

    Args:
        state: the name of a hook, such as "int4" (see docs/hooks.md), or the state of a hook, which serves one model;
            by default the hook that the environment variable ``GRADWIRE_HOOK`` names, or else the plain all-reduce.
        hook: the hook of the state; by default the one that the state is made for.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``, and further arguments of Fabric's
            DDPStrategy, which passes unknown arguments on to DistributedDataParallel.

    Attributes:
        attachments: the handles of `gradwire.attach`, one for each model that ``fabric.setup`` has wrapped.

    Raises:
        ValueError: there is no hook of that name.

    Examples:
        >>> fabric = Fabric(strategy=GradwireStrategy("int4"), devices=2)
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> fabric.save(path, {"model": model, "optimizer": optimizer})
    """

    def __init__(self, state: Any = None, hook: CommHook | None = None, **options: Any) -> None:
        self._state = state
        self._hook = hook
        self._options = take_options(state, options)
        state_and_hook(state, hook, self._options)  # raises for a wrong name
        super().__init__(**options)
        self.attachments: list[Attachment] = []

    def setup_module(self, module: nn.Module) -> TorchDDP:
        """Wrap a module and attach the hook; called by ``fabric.setup``."""
        device_ids = self._determine_ddp_device_ids()
        # A side stream, as in Fabric: PyTorch requires it to capture a DDP in a CUDA graph.
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            wrapped = DistributedDataParallel(module=module, device_ids=device_ids, **self._ddp_kwargs)
        if is_given(self._state, self._hook):
            attachment = attach(wrapped, self._state, self._hook, **self._options)
            assert attachment is not None
            self.attachments.append(attachment)
            follow_scaler(attachment.state, getattr(self.precision, "scaler", None))
        return wrapped

    def save_checkpoint(self, path: Any, state: dict[str, Any], **options: Any) -> None:
        """Save a checkpoint, with the states of the hooks if it has an optimizer. A collective call."""
        if _has_optimizer(state) and any(saved := [collect_state(each.state) for each in self.attachments]):
            state = {**state, KEY: saved}
        super().save_checkpoint(path=path, state=state, **options)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, with the states of the hooks if ``state`` has an optimizer."""
        remainder: dict[str, Any] = super().load_checkpoint(path=path, state=state, **options)
        if _has_optimizer(state):
            saved = remainder.pop(KEY, [None] * len(self.attachments))
            for attachment, each in zip(self.attachments, saved, strict=False):
                restore_state(attachment.state, each, path)
        return remainder


def _has_optimizer(state: Any) -> bool:
    return isinstance(state, dict) and any(isinstance(each, torch.optim.Optimizer) for each in state.values())
