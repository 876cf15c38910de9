"""Checks of the arguments of `DistributedDataParallel` and of its ``register_comm_hook``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.exchange.bucket import GradBucket
from gradwire.exchange.decorators import CommHook, check_process_group
from gradwire.reducer import torch_internals


def check_reducer_is_used() -> None:
    """Raise NotImplementedError if torch.compile is configured to replace DDP's reducer with its own."""
    if torch_internals.uses_python_reducer():
        raise NotImplementedError(
            "gradwire.DistributedDataParallel does not support torch._dynamo.config.optimize_ddp='python_reducer', "
            "which replaces the reducer. Leave it at True, its default, or use PyTorch's DistributedDataParallel."
        )


def check_ranks(process_group: object, device_mesh: object) -> None:
    """Raise ValueError or TypeError unless ``process_group`` is a process group that this rank is in, or None."""
    if device_mesh is not None:
        return  # PyTorch's class raises if both are given
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is GroupMember.NON_GROUP_MEMBER, which torch.distributed.new_group returns on ranks outside "
            "of the new group; expected a group that this rank is in. Wrap the model on the group's ranks only."
        )
    check_process_group(process_group)


def check_mixed_precision(config: Any) -> None:
    """Raise ValueError for dtypes that are not floating-point, and RuntimeError without an accelerator."""
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(config, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(
                f"mixed_precision.{name} is {dtype}; expected a floating-point dtype, such as torch.bfloat16. Pass "
                "torch.nn.parallel.distributed._MixedPrecision(param_dtype=..., reduce_dtype=..., buffer_dtype=...)."
            )
    try:
        torch.Event().record()
    except RuntimeError as error:
        raise RuntimeError(
            f"mixed_precision needs an accelerator, for whose streams it waits: {error} Use torch.autocast."
        ) from error


def check_delayed(module: nn.Module, delayed: Collection[torch.Tensor], mixed_precision: object) -> None:
    """Raise NotImplementedError with mixed precision, and ValueError if no other parameter of the module is trained."""
    if mixed_precision is not None:
        raise NotImplementedError(
            "mixed_precision does not support delay_all_reduce_named_params: delayed parameters keep their own dtype "
            "in the forward. Leave out one of the two, or use torch.autocast."
        )
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    if not any(p.requires_grad and p not in delayed and name not in ignored for name, p in module.named_parameters()):
        raise ValueError(
            "delay_all_reduce_named_params names all parameters that are trained: nothing is left to reduce during "
            "the backward, and the first forward of PyTorch's class would fail. Leave out at least one parameter."
        )


def check_bucket_sizes(bucket_cap_mb: object, bucket_cap_mb_list: object) -> None:
    """Raise ValueError or TypeError unless the bucket sizes are None or numbers of MiB."""
    if bucket_cap_mb is not None:
        check_bucket_size("bucket_cap_mb", bucket_cap_mb)
    if bucket_cap_mb_list is None:
        return
    if not isinstance(bucket_cap_mb_list, Sequence) or isinstance(bucket_cap_mb_list, str):
        raise TypeError(f"bucket_cap_mb_list is {bucket_cap_mb_list!r}; expected a list of sizes in MiB, or None.")
    if not bucket_cap_mb_list:
        raise ValueError(
            "bucket_cap_mb_list is empty; expected the size of one bucket at least, in MiB, or None for bucket_cap_mb."
        )
    for index, size in enumerate(bucket_cap_mb_list):
        check_bucket_size(f"bucket_cap_mb_list[{index}]", size)


def check_bucket_size(name: str, size: object) -> None:
    """Raise ValueError or TypeError unless ``size`` is a number of MiB."""
    expectation = "expected a number of MiB, 0 or larger (0: a bucket for every parameter), or None for the default"
    if isinstance(size, bool) or not isinstance(size, Real):
        raise TypeError(f"{name} is {size!r}; {expectation}.")
    if not 0 <= float(size) * 2**20 < sys.maxsize:  # False for NaN too
        raise ValueError(f"{name} is {size!r}; {expectation}.")


def check_comm_hook(state: object, hook: CommHook) -> None:
    """Raise TypeError or ValueError, with PyTorch's messages, unless ``hook`` has a communication hook's signature."""
    if callable(state) and not callable(hook):
        raise TypeError(
            f"Communication hook must be callable. {type(hook).__name__} is not, and the state is a function: they are "
            "swapped. The order is register_comm_hook(state, hook)."
        )
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    parameters = list(signature.parameters.values())
    try:
        signature.bind(None, None)
    except TypeError:
        raise ValueError(f"Communication hook: takes {signature}; expected hook(state, bucket).") from None
    if len(parameters) > 1 and parameters[1].annotation not in (inspect.Parameter.empty, GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect.Signature.empty, future, "torch.futures.Future[torch.Tensor]"):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
