"""Checks of the arguments of `DistributedDataParallel`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from gradwire.hooks._bucket import check_process_group
from gradwire.hooks._types import GradBucket

__all__ = ["check_bucket_size", "check_bucket_sizes", "check_comm_hook", "check_ranks"]


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


def check_comm_hook(hook: Callable[..., Any]) -> None:
    """Raise TypeError or ValueError, with PyTorch's messages, unless ``hook`` has a communication hook's signature."""
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
