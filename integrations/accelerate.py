"""Hooks and gradwire's DistributedDataParallel with Accelerate.

Needs the package ``accelerate``.
"""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.integrations import _comm_hook
from gradwire.reducer import DistributedDataParallel

__all__ = ["prepare_model", "register_comm_hook"]


def register_comm_hook(
    accelerator: Accelerator, model: nn.Module, state: object, hook: Callable[..., Any]
) -> TorchDDP | None:
    """Register a hook on a prepared model, and its state for ``save_state`` and ``load_state``.

    Accelerate's own option, ``DistributedDataParallelKwargs(comm_hook=...)``, accepts only hooks that Accelerate knows
    by name, and silently ignores functions.

    Args:
        accelerator: the accelerator that prepared the model. Modified.
        model: the model that ``accelerator.prepare`` or `prepare_model` returns.
        state: state of the hook. If it has ``state_dict`` and ``load_state_dict``, as gradwire's states have, it is
            registered for checkpointing.
        hook: gradwire's, PyTorch's or your own.

    Returns:
        The DistributedDataParallel inside ``model``; None, with a `HookNotUsedWarning`, if there is none.

    Raises:
        ValueError: the model contains several DistributedDataParallel modules.
        RuntimeError: a hook is already registered.
    """
    ddp = _comm_hook.register_comm_hook(model, state, hook)
    if ddp is not None and isinstance(state, Stateful):
        accelerator.register_for_checkpointing(state)
        if (prepare := getattr(state, "prepare_checkpoint", None)) is not None:
            # Before the main process writes the model: writing may take longer than the timeout of `state_dict`.
            accelerator.register_save_state_pre_hook(lambda *_: prepare())
    return ddp


def prepare_model(accelerator: Accelerator, model: nn.Module, **options: Any) -> nn.Module:
    """Prepare a model like ``accelerator.prepare``, with gradwire's DistributedDataParallel in place of PyTorch's.

    Accelerate moves the model to its device, and adds mixed precision and ``torch.compile`` as configured.
    ``DistributedDataParallelKwargs`` has no effect; pass its arguments as ``options``.

    Args:
        accelerator: prepares the model, and saves and loads it with ``save_state`` and ``load_state``. Modified.
        model: the model, not wrapped yet.
        options: further arguments of `gradwire.DistributedDataParallel`.

    Returns:
        The wrapped model. With a single process, the model as prepared by Accelerate, without a wrapper.

    Raises:
        ValueError: the model is already wrapped in DistributedDataParallel, or Accelerate is configured for FSDP,
            DeepSpeed or another mode without DistributedDataParallel.
    """
    if _comm_hook.find_ddp(model) is not None:
        raise ValueError("The model is wrapped in DistributedDataParallel already. Pass the unwrapped model.")
    kind = accelerator.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            f"Accelerate trains with {kind}; expected MULTI_CPU or MULTI_GPU, which use DistributedDataParallel. "
            "Deselect FSDP, DeepSpeed and others with `accelerate config`."
        )
    model = accelerator.prepare_model(model, evaluation_mode=True)  # other modes do not use DistributedDataParallel
    if kind == "NO":
        return model
    accelerator._models.remove(model)
    device_ids = None if accelerator.device.type == "cpu" else [accelerator.local_process_index]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]  # `prepare_model` must not wrap it a second time
    prepared: nn.Module = accelerator.prepare_model(wrapped)
    return prepared
