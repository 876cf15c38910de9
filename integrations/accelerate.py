"""Compressed gradients and gradwire's DistributedDataParallel with Accelerate.

Needs the package ``accelerate``.
"""

from typing import Any

from accelerate import Accelerator
from torch import nn

from gradwire.exchange.decorators import CommHook
from gradwire.integrations._attach import find_ddp
from gradwire.integrations._checkpoint import Compression, load_shards, save_shards
from gradwire.reducer import DistributedDataParallel
from gradwire.sharded import Attachment, ReduceScatterOptions

__all__ = ["attach", "prepare_model"]


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    state: Any = None,
    hook: CommHook | None = None,
    *,
    within: str | ReduceScatterOptions | None = None,
    **options: Any,
) -> Attachment | None:
    """Compress the gradients of a prepared model, and save the hook's state with ``save_state``.

    With fp16 mixed precision, error memory follows the accelerator's gradient scaler.

    Accelerate's own option, ``DistributedDataParallelKwargs(comm_hook=...)``, accepts only hooks that Accelerate knows
    by name, and silently ignores functions.

    Args:
        accelerator: the accelerator that prepared the model. ``save_state`` and ``load_state`` then save and load the
            hook's state and the errors of ``within``. Modified.
        model: the model that ``accelerator.prepare`` or `prepare_model` returns: a DistributedDataParallel, or a model
            of FSDP2 (``fsdp_version=2``).
        state: the name of a hook, such as "int4" (see docs/hooks.md), or the state of a hook. The state is saved if it
            has ``state_dict`` and ``load_state_dict``, as gradwire's states have.
        hook: the hook of the state: gradwire's, PyTorch's or your own; by default the one that the state is made for.
        within: wire format of FSDP2's reduce-scatter; see `gradwire.attach`.
        options: options of the named hook's state, such as ``exempt=["*.bias"]``.

    Returns:
        The handle of `gradwire.attach`; None, with a `HookNotUsedWarning`, if the model is not wrapped.

    Raises:
        ValueError: there is no hook of that name; the model contains several DistributedDataParallel modules; or see
            `gradwire.attach`.
        TypeError: the model is wrapped in FSDP1 (``fsdp_version=1``); or see `gradwire.attach`.
        NotImplementedError: FSDP2 and a state that checkpoints cannot hold; or see `gradwire.attach`.
        RuntimeError: a hook is already registered on the DistributedDataParallel.

    Examples:
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> attach(accelerator, model, "int4")
    """
    compression = Compression(state, hook, within, options)
    compression.attach(model, accelerator.scaler)
    attachment = compression.attachment
    if attachment is None or not compression.has_memory:
        return attachment
    if compression.is_sharded:
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: save_shards(attachment, folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: load_shards(attachment, folder))
        return attachment
    accelerator.register_for_checkpointing(attachment.state)
    if (prepare := getattr(attachment.state, "prepare_checkpoint", None)) is not None:
        # Before the main process writes the model: writing may take longer than the timeout of `state_dict`.
        accelerator.register_save_state_pre_hook(lambda *_: prepare())
    return attachment


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
    if find_ddp(model) is not None:
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
