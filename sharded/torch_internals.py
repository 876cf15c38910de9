"""PyTorch's private names that `gradwire.sharded` uses: a new release can break only this file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradwire.comm.torch_internals import private_names
from gradwire.exchange.names import plain_name

LACKS_NAME = "gradwire.attach uses private names of FSDP2, and torch {} lacks one: {}."
_fsdp_names = partial(private_names, LACKS_NAME, NotImplementedError)
_GROUP_NAMES = (
    "fsdp_params",
    "mesh_info",
    "device",
    "gradient_divide_factor",
    "_all_reduce_hook",
    "_partial_reduce_output",
    "_reduce_scatter_comm",
)
_PARAMETER_NAMES = (
    "_module_info",
    "mp_policy",
    "sharded_param",
    "sharded_size",
    "contiguous_sharded_stride",
    "padded_sharded_param_size",
)


class ParameterGroup:
    """A parameter group of FSDP2, which reduces its gradients together, in one flat tensor.

    Attributes:
        parameters: FSDP2's parameters, by fully qualified name.
        device: device of the gradients. Parameters may be offloaded to another one.
        shards: the ranks of a replica, which reduce-scatter the gradients; None without shards.
        replicas: the ranks that hold the same shards, and all-reduce them; None without replicas.
    """

    def __init__(self, group: Any, module_names: Mapping[nn.Module, str]) -> None:
        _require(group, _GROUP_NAMES)
        mesh = group.mesh_info
        _require_mesh(mesh)
        self.parameters: dict[str, Any] = {}
        for parameter in group.fsdp_params:
            _require(parameter, _PARAMETER_NAMES)
            _require(parameter.sharded_param, ("_post_accumulate_grad_hooks",))
            name = f"{module_names[parameter._module_info.module]}.{parameter._module_info.param_name}"
            self.parameters[name.removeprefix(".")] = parameter
        self.device: torch.device = group.device
        self.shards: dist.ProcessGroup | None = None
        if getattr(mesh, "shard_mesh_size", 1) > 1:
            self.shards = mesh.shard_process_group
        replicas = getattr(mesh, "replicate_process_group", None)
        self.replicas = replicas if isinstance(replicas, dist.ProcessGroup) else None
        self._group = group
        self._mesh = mesh
        self._reduce_scatter = group._reduce_scatter_comm

    def __str__(self) -> str:
        first, *others = self.parameters
        return f"{first} and {len(others)} more parameters" if others else first

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Shards, replicas, and all other groups of several ranks in the parameters' meshes: tensor parallel ones."""
        meshes = dict.fromkeys(each.sharded_param.device_mesh for each in self.parameters.values())
        others = (found for mesh in meshes for found in mesh.get_all_groups() if found.size() > 1)
        return [each for each in (self.shards, self.replicas, *others) if each is not None]

    @property
    def reduce_scatter(self) -> Any:
        """The object that reduce-scatters the gradients."""
        return self._group._reduce_scatter_comm

    def replace_reduce_scatter(self, replacement: Any) -> None:
        """Reduce-scatter the gradients through ``replacement``."""
        self._group._reduce_scatter_comm = replacement

    def replace_replicas(self, replacement: dist.ProcessGroup) -> None:
        """All-reduce the shards through ``replacement``. Other parameter groups keep their own process group."""
        self._group.mesh_info = copy.copy(self._mesh)
        self._group.mesh_info.replicate_process_group = replacement

    def restore(self) -> None:
        """Undo the replacements."""
        self._group.mesh_info, self._group._reduce_scatter_comm = self._mesh, self._reduce_scatter

    def trainable(self) -> dict[str, Any] | None:
        """The trainable parameters by name, in the order of the flat tensor; None if their order is unknown.

        PyTorch 2.15 orders parameters by the dtype of their gradients.
        """
        found = {name: each for name, each in self.parameters.items() if each.sharded_param.requires_grad}
        dtypes = {(each.sharded_param.dtype, gradient_dtype(each)) for each in found.values()}
        return found if len(dtypes) <= 1 else None

    def flat_order(self) -> dict[str, torch.Size]:
        """Sizes of the padded shards of `trainable` parameters that have elements, by name; empty if unknown."""
        sizes = {name: each.padded_sharded_param_size for name, each in (self.trainable() or {}).items()}
        return {name: size for name, size in sizes.items() if size.numel() > 0}

    def reduced_dtype(self) -> torch.dtype:
        """The dtype in which the gradients are expected to be reduced."""
        found = [each for each in self.parameters.values() if each.sharded_param.requires_grad]
        return reduced_dtype([*found, *self.parameters.values()][0])

    def mean_weight(self) -> float:
        """The factor by which the mean gradient multiplies the sum of the tensors that all ranks reduce-scatter.

        With fp16 gradients, FSDP2 divides these tensors by a power of two.
        """
        world_size = math.prod(each.size() for each in (self.shards, self.replicas) if each is not None)
        divisor, divided_before = self._group.gradient_divide_factor or world_size, 1
        if self.reduced_dtype() == torch.float16:
            while divisor % divided_before == 0 and divisor / divided_before > divided_before:
                divided_before *= 2
        return divided_before / float(divisor)

    def holds_partial_sums(self) -> bool:
        """Whether it holds sums of a replica that later micro-batches will all-reduce."""
        return self._group._partial_reduce_output is not None

    def is_read_in_backward(self, dtype: torch.dtype) -> bool:
        """Whether FSDP2 reads an all-reduced flat tensor of ``dtype`` before the end of the backward.

        Otherwise the flat tensor is the memory of the gradients.
        """
        found = [each for each in self.parameters.values() if each.sharded_param.requires_grad]
        dtypes = set(map(gradient_dtype, found))
        is_kept = dtypes == {dtype} and all(each.sharded_param.grad is None for each in found)
        return not is_kept or runs_optimizers(found) or self._group._all_reduce_hook is not None


def parameter_groups(model: nn.Module) -> Iterator[ParameterGroup]:
    """Every parameter group of FSDP2 in ``model``.

    Raises:
        NotImplementedError: this release of PyTorch lacks a private name.
    """
    module_names = {module: plain_name(name) for name, module in model.named_modules()}
    with _fsdp_names():
        for state in _states(model).values():
            _require(state, ("_is_root", "_state_ctx"))
            _require(state._state_ctx, ("post_backward_final_callback_queued",))
            yield from [ParameterGroup(group, module_names) for group in _groups_of(state)]


def gradient_dtype(parameter: Any) -> torch.dtype | None:
    """The dtype of a parameter's gradient: since PyTorch 2.15, it may differ from the parameter's. None: any dtype."""
    dtype: torch.dtype | None = getattr(parameter, "sharded_grad_dtype", parameter.sharded_param.dtype)
    return dtype


def reduced_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which FSDP2 is expected to reduce the gradient of its parameter ``parameter``."""
    policy, own = parameter.mp_policy, parameter.sharded_param.dtype
    # Since PyTorch 2.15, gradients without a `reduce_dtype` have the dtype that the sharded parameter's gradient has.
    # FSDP2 answers by this property, but only after the first forward.
    follows_gradient = hasattr(type(parameter), "unsharded_grad_dtype")
    kept = gradient_dtype(parameter) if follows_gradient else None
    dtype: torch.dtype = policy.reduce_dtype or kept or policy.param_dtype or own
    return dtype


@contextmanager
def on_root_init(callback: Callable[[nn.Module], object]) -> Iterator[None]:
    """While active, call ``callback(root)`` before the first forward of each root module of FSDP2 or `replicate`.

    The first module of a model that runs becomes its root; sharded modules inside of it never are. ``callback`` may
    `attach` to the root: FSDP2 initializes it afterwards.

    Raises:
        NotImplementedError: this release of PyTorch lacks a private name.
    """
    with _fsdp_names():
        from torch.distributed.fsdp._fully_shard import _fsdp_state

        states: Any = _fsdp_state.FSDPState
        native = states._lazy_init

    def lazy_init(state: Any) -> None:
        with _fsdp_names():
            roots: tuple[nn.Module, ...] = state._modules if state._is_root is None else ()
        if len(roots) == 1:  # PyTorch raises for several
            callback(roots[0])
        native(state)

    states._lazy_init = lazy_init
    try:
        yield
    finally:
        states._lazy_init = native


def _states(model: nn.Module) -> dict[Any, Any]:
    """FSDP2's states of the sharded modules in ``model``, by module."""
    return {module: module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of a module; up to PyTorch 2.11 there is at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _require(owner: object, names: tuple[str, ...]) -> None:
    for name in names:
        getattr(owner, name)


def _require_mesh(mesh_info: Any) -> None:
    """Require the names of shards, of replicas, or in a mesh of two dimensions of both."""
    found = [hasattr(mesh_info, name) for name in ("shard_mesh_size", "replicate_process_group")]
    if sum(found) < min(mesh_info.mesh.ndim, 2):
        raise AttributeError(f"{type(mesh_info).__name__}.shard_mesh_size or replicate_process_group")
    if found[0]:
        _require(mesh_info, ("shard_process_group",))


def is_in_backward(model: nn.Module) -> bool:
    """Whether an error has ended a backward that FSDP2 still takes for running, and that `discard_step` cannot end."""
    states = _states(model).values()
    is_queued = any(state._state_ctx.post_backward_final_callback_queued for state in states)
    can_reset = hasattr(FSDPModule, "reset_iter_state") and any(state._is_root for state in states)
    return is_queued and not can_reset


def discard_step(model: nn.Module) -> None:
    """Let FSDP2 forget a step that an error has ended."""
    for module, state in _states(model).items():
        for group in _groups_of(state):
            group._partial_reduce_output = None
        if state._is_root and hasattr(module, "reset_iter_state"):
            module.reset_iter_state()


def runs_optimizers(parameters: Iterable[Any]) -> bool:
    """Whether FSDP2's parameters have hooks that may apply a gradient in the backward."""
    return any(each.sharded_param._post_accumulate_grad_hooks for each in parameters)
