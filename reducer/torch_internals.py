"""PyTorch's private names that `gradwire.reducer` uses: a new release can break only this file."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import unwrap

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.comm.torch_internals import private_names

with private_names():
    from torch._compile import _disable_dynamo
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter
    from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors

    # Excludes a function from tracing, like ``torch.compiler.disable``, which would import the compiler at once.
    not_compiled = _disable_dynamo
    AnyFuture = torch._C.Future  # `Future.then` returns one of this base class of the public one
    BuiltinCommHookType = c10d.BuiltinCommHookType
    DEFAULT_FIRST_BUCKET_BYTES: int = c10d._DEFAULT_FIRST_BUCKET_BYTES
    # A context in which tensors, a tuple, keep their version counters: autograd does not see that they change.
    keeping_versions = _unsafe_preserve_version_counter
    POST_FORWARD = _BufferCommHookLocation.POST_FORWARD  # where a buffer hook runs
    # The tensors in the output of a forward: in lists, tuples, dictionaries and dataclasses.
    tensors_in: Callable[[object], Iterable[Tensor]] = _find_tensors
    _ATTRIBUTES = (
        c10d._compute_bucket_assignment_by_size,
        c10d.get_debug_level,
        torch._C._storage_Use_Count,
        torch._foreach_copy_,
        torch._foreach_mul_,
        Tensor._use_count,  # type: ignore[attr-defined]
    )
    # What gradwire's class overrides, calls or reads of PyTorch's class. With mixed precision, its parameters also have
    # `_mp_param`, `_fp_param` and `_ddp_mp_hook_state`.
    _IN_CLASS = """
        _active_ddp_module _assign_modules_buffers _build_params_for_reducer _check_and_sync_module_buffers
        _check_global_requires_backward_grad_sync _check_sync_bufs_post_fwd _check_sync_bufs_pre_fwd _ddp_init_helper
        _distributed_broadcast_coalesced _find_common_rank _get_ddp_logging_data _log_and_throw
        _module_wait_for_copy_hook _post_forward _pre_forward _register_builtin_comm_hook
        _register_delay_all_reduce_hook _setup_in_backward_optimizers _sync_buffers _sync_final_model
        _sync_module_buffers
    """
    for _name in _IN_CLASS.split():
        getattr(DDP, _name)
    _IN_INSTANCE = "_comm_hooks _delay_grad_buffer _delay_all_reduce_params _module_parameters _submodule_to_event"
    for _name in _IN_INSTANCE.split():
        if _name not in unwrap(DDP.__init__).__code__.co_names:  # assigned there
            raise AttributeError(f"'DistributedDataParallel' object has no attribute {_name!r}")


def gradient_node(tensor: Tensor) -> Node:
    """The node that receives the tensor's gradient, for a parameter AccumulateGrad; lives while it is referenced."""
    return get_gradient_edge(tensor).node


def aliased(gradients: Sequence[Tensor | None], incoming: Tensor | None = None) -> list[int]:
    """The positions of the gradients whose memory can be reached otherwise than through ``.grad`` of their parameters.

    AccumulateGrad makes ``.grad`` an alias of the gradient that comes in, if nothing else holds that tensor. But it may
    be a view of one that others read later: ``h + p.view(...)`` gives both h and p views of one gradient.

    Where Python or PyTorch count references in an unknown way, these are all gradients; a warning says so once.

    Args:
        gradients: ``.grad`` of some parameters, dense.
        incoming: the gradient that has come in, while the hooks of its AccumulateGrad run: autograd holds it until they
            have returned, and with it the tensor that it is a view of.
    """
    if OWN_BASE is None:
        _warn_of_copies()
        return [i for i, each in enumerate(gradients) if each is not None and each.layout == torch.strided]
    return _shared_memory(gradients, incoming, OWN_BASE)


def _shared_memory(gradients: Sequence[Tensor | None], incoming: Tensor | None, own_base: int) -> list[int]:
    """`aliased`, by counting references to the storages of the gradients and to the base of ``incoming``."""
    is_dense = incoming is not None and incoming.layout == torch.strided  # it may be a sparse one of another bucket
    found, of_incoming = [], incoming.untyped_storage()._cdata if is_dense else None  # type: ignore[union-attr]
    for i, gradient in enumerate(gradients):
        if gradient is None or gradient.layout != torch.strided:
            continue
        storage = gradient.untyped_storage()
        others = torch._C._storage_Use_Count(storage._cdata) - 2  # without ``gradient`` and ``storage``
        expected = 0
        if others > 0 and storage._cdata == of_incoming:
            assert incoming is not None
            base = incoming._base
            # Only ``incoming`` and its Python object hold the base, and nothing else holds that object.
            is_base_theirs = base is not None and base._use_count() == 2 and sys.getrefcount(base) == own_base  # type: ignore[attr-defined]
            expected = 1 + is_base_theirs
        if others != expected:
            found.append(i)
    return found


def count_of_own_base() -> int | None:
    """``sys.getrefcount`` of a view's base without other references, which depends on Python and PyTorch.

    None if `_shared_memory` is wrong with it about gradients like those of autograd: if references are not counted, or
    not as before.
    """
    own, held, stolen = (torch.empty(4, device="cpu") for _ in range(3))
    view = torch.empty(4, device="cpu").view(2, 2)
    base = view._base
    count = sys.getrefcount(base)
    del base
    others: list[Tensor | None] = [held.view(2, 2)]
    grad_of_stolen, grad_of_view = stolen.detach(), view.detach()
    found = [
        _shared_memory(grads, incoming, count)
        for grads, incoming in (([own, held], None), ([grad_of_stolen], stolen), ([grad_of_view], view))
    ]
    others += [stolen.view(2, 2), view._base]  # which another node of the graph may read
    found += [_shared_memory([grad_of_stolen], stolen, count), _shared_memory([grad_of_view], view, count)]
    return count if found == [[1], [], [], [0], [0]] else None


OWN_BASE = count_of_own_base()


@cache
def _warn_of_copies() -> None:
    versions = f"Python {sys.version.split()[0]} with torch {torch.__version__}"
    warnings.warn(
        f"{versions} counts references in a way that gradwire does not know, so it cannot tell whether autograd still "
        "reads a gradient. All gradients are copied before they are averaged, which takes memory and time. Install a "
        "newer gradwire, or versions that docs/compatibility.md lists as tested.",
        stacklevel=3,
    )


def assign_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], sparse: Sequence[bool], indices: Sequence[int] = ()
) -> list[list[int]]:
    """PyTorch's assignment by dtype, device and size in bytes, of which the last repeats; a sparse gradient is alone.

    ``indices``, by default their positions, stand for the tensors in ``sparse`` and in the result.
    """
    buckets, _ = c10d._compute_bucket_assignment_by_size(list(tensors), list(limits), list(sparse), list(indices))
    return buckets


def optimizer_hooks() -> Mapping[Tensor, Sequence[RemovableHandle]]:
    """For each parameter, the hooks with which ``apply_optimizer_in_backward`` steps its optimizers."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    handles: Mapping[Tensor, Sequence[RemovableHandle]] = param_to_optim_hook_handle_map
    return handles


def step_optimizers(parameters: Iterable[Tensor]) -> None:
    """Step the optimizers of ``apply_optimizer_in_backward``, and clear the gradients."""
    for parameter in parameters:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None


def restore_parameters(parameters: Iterable[Tensor]) -> None:
    """With mixed precision: point parameters back at their own values after a forward without a backward."""
    for parameter in parameters:
        if hasattr(parameter, "_mp_param"):
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]


def remove_copy_hooks(parameters: Iterable[Tensor]) -> None:
    """Remove the hooks on the gradients of the parameters' copies: PyTorch removes only those of the last forward."""
    for parameter in parameters:
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state


def uses_python_reducer() -> bool:
    """Whether torch.compile is configured to replace DDP's reducer with its own."""
    return torch._dynamo.config.optimize_ddp == "python_reducer"


def is_debugging() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for details."""
    return c10d.get_debug_level() != c10d.DebugLevel.OFF
