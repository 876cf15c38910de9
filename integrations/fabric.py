"""A strategy for Lightning Fabric that wraps models in gradwire's DistributedDataParallel.

Needs the package ``lightning``.
"""

from contextlib import nullcontext

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.reducer import DistributedDataParallel

__all__ = ["GradwireStrategy"]


class GradwireStrategy(DDPStrategy):
    """Fabric's DDPStrategy with gradwire's DistributedDataParallel.

    Takes the arguments of Fabric's DDPStrategy, which passes unknown arguments on to DistributedDataParallel. After
    ``fabric.setup``, call `gradwire.integrations.attach`; it also works with Fabric's own strategy. To save and load
    the state of the hook, add it to the dictionary for ``fabric.save`` and ``fabric.load``.

    Examples:
        >>> fabric = Fabric(strategy=GradwireStrategy(), devices=2)
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> attach(model, state, powerSGD_hook)
        >>> fabric.save(path, {"model": model, "optimizer": optimizer, "hook": state})
    """

    def setup_module(self, module: nn.Module) -> TorchDDP:
        """Wrap a module; called by ``fabric.setup``."""
        device_ids = self._determine_ddp_device_ids()
        # A side stream, as in Fabric: PyTorch requires it to capture a DDP in a CUDA graph.
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return DistributedDataParallel(module=module, device_ids=device_ids, **self._ddp_kwargs)
