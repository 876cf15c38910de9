"""gradwire's DistributedDataParallel under Accelerate.

Needs the package ``accelerate``. To use a hook on PyTorch's class, which ``accelerator.prepare`` makes, call
`gradwire.integrations.register_comm_hook`; that needs nothing from this module.
"""

from typing import Any

from accelerate import Accelerator
from torch import nn

from gradwire.integrations._comm_hook import find_ddp
from gradwire.reducer import DistributedDataParallel

__all__ = ["prepare_model"]


def prepare_model(accelerator: Accelerator, model: nn.Module, **options: Any) -> nn.Module:
    """Prepare a model like ``accelerator.prepare``, with gradwire's DistributedDataParallel in place of PyTorch's.

    Accelerate moves the model to its device and adds mixed precision and ``torch.compile`` as configured. The arguments
    of ``DistributedDataParallelKwargs`` are not used; pass them as ``options``.

    Args:
        accelerator: notes the model, for ``save_state`` and others.
        model: not wrapped yet.
        options: further arguments of `gradwire.DistributedDataParallel`.

    Returns:
        The wrapped model. With one process, the model that Accelerate has prepared, without a wrapper.

    Raises:
        ValueError: the model is wrapped in DistributedDataParallel already, or Accelerate is configured for FSDP,
            DeepSpeed or another kind of training without DistributedDataParallel.
    """
    if find_ddp(model) is not None:
        raise ValueError("The model is wrapped in DistributedDataParallel already. Pass the unwrapped model.")
    kind = accelerator.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            f"Accelerate trains with {kind}; expected MULTI_CPU or MULTI_GPU, which use DistributedDataParallel. "
            "Deselect FSDP, DeepSpeed and others with `accelerate config`."
        )
    model = accelerator.prepare_model(model, evaluation_mode=True)  # everything but DistributedDataParallel
    if kind == "NO":
        return model
    accelerator._models.remove(model)
    device_ids = None if accelerator.device.type == "cpu" else [accelerator.local_process_index]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # so that `prepare_model` notes it and does not wrap it a second time
    prepared: nn.Module = accelerator.prepare_model(wrapped)
    return prepared
