"""PyTorch's private names that `gradwire.sharded` uses: a new release can break only this file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradwire.comm.torch_internals import TESTED_TORCH

_GROUP_NAMES = ("fsdp_params", "mesh_info", "device", "mp_policy", "_reduce_scatter_comm")
_PARAMETER_NAMES = ("_module_info", "sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size")


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """Every parameter group of FSDP2 in ``model``. A group reduces its gradients together.

    Raises:
        NotImplementedError: this release of PyTorch lacks a private name.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            try:
                groups = module._get_fsdp_state()._fsdp_param_groups
                for group in groups:
                    _require(group, _GROUP_NAMES)
                    for parameter in group.fsdp_params:
                        _require(parameter, _PARAMETER_NAMES)
            except AttributeError as error:
                oldest, newest = TESTED_TORCH
                raise NotImplementedError(
                    f"gradwire.attach uses private names of FSDP2, and torch {torch.__version__} lacks one: {error}. "
                    f"gradwire is tested with torch {oldest} to {newest}: install one of these, or a newer gradwire."
                ) from error
            yield from groups


def _require(owner: object, names: tuple[str, ...]) -> None:
    for name in names:
        getattr(owner, name)


def has_shards(group: Any) -> bool:
    """Whether a parameter group reduce-scatters its gradients within a replica."""
    return getattr(group.mesh_info, "shard_mesh_size", 1) > 1


def replica_group(group: Any) -> dist.ProcessGroup | None:
    """The process group over which a parameter group is all-reduced between replicas; None without replicas."""
    found = getattr(group.mesh_info, "replicate_process_group", None)
    return found if isinstance(found, dist.ProcessGroup) else None


def replace_replica_group(group: Any, replacement: dist.ProcessGroup) -> None:
    """Let a parameter group all-reduce through ``replacement``. Other parameter groups keep their own."""
    group.mesh_info = copy.copy(group.mesh_info)
    group.mesh_info.replicate_process_group = replacement


def reduced_dtype(group: Any) -> torch.dtype:
    """The dtype in which a parameter group is expected to reduce its gradients."""
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype
