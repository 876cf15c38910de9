"""Several DDP wrappers of one parameter: nested ones are refused, others read its gradient before anyone writes it.

Averaging twice gives the same mean for twice the traffic. Nesting only warns, because PyTorch's own tests nest
wrappers. If the inner wrapper has a communication hook, it raises: the outer wrapper sends the same gradients without
the hook. Models that share a layer and are trained in one backward are no mistake.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from gradwire.hooks._parameter_names import live_wrappers
from gradwire.reducer import errors, torch_internals

__all__ = ["find_sharing_wrappers", "refuse_wrapper_around", "refuse_wrappers_inside"]

TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, the wrappers around it that have been checked.
_checked: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()


# gradwire's wrappers that have begun a forward.
_used: WeakSet[Any] = WeakSet()


def find_sharing_wrappers(wrapper: Any) -> None:
    """Before its first forward, tell ``wrapper`` and other live wrappers which parameters they share.

    See `Reducer.share`. PyTorch's wrappers are found by the garbage collector, which takes 50 ms for a million objects.
    """
    if wrapper not in _used:
        _used.add(wrapper)
        _share(wrapper)


@torch_internals.not_compiled
def _share(wrapper: Any) -> None:
    mine = {id(parameter) for parameter in wrapper.reducer.parameters}
    other: Any
    for other in {*_used, *live_wrappers()}:
        shared = {id(parameter) for parameter in other.module.parameters()} & mine if other is not wrapper else None
        if shared:
            wrapper.reducer.share(other, shared)
            if hasattr(other.reducer, "share"):
                other.reducer.share(wrapper, shared)
            elif wrapper.gradient_as_bucket_view and other.gradient_as_bucket_view:
                raise ValueError(errors.SHARED_VIEWS)


def refuse_wrappers_inside(module: nn.Module) -> None:
    """Warn if ``module`` is or contains a wrapper of parameters that a new wrapper would reduce again.

    Raises:
        ValueError: that wrapper has a communication hook, or it is one of FSDP2.
    """
    for name, part in module.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):  # without the import of FSDP
            raise ValueError(errors.sharded(name))
    wrappers = [(name, part) for name, part in module.named_modules() if isinstance(part, TorchDDP)]
    if not wrappers:
        return
    ours = _reduced(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, wrapper in wrappers:
        both = ours.keys() & _reduced_by(wrapper).keys()
        if both:
            text = errors.wrapped_twice(name, type(wrapper), sorted(ours[parameter] for parameter in both))
            if wrapper._comm_hooks:
                raise ValueError(text)
            warnings.warn(text, stacklevel=3)


def refuse_wrapper_around(inner: TorchDDP) -> None:
    """Warn once if ``inner`` runs within the forward of another wrapper and both reduce a parameter.

    Raises:
        RuntimeError: ``inner`` has a communication hook.
    """
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _checked.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        text = errors.wrapped_by_another(type(outer), sorted(theirs[parameter] for parameter in both))
        if inner._comm_hooks:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
    _checked.setdefault(inner, WeakSet()).add(outer)


def _reduced_by(wrapper: TorchDDP) -> dict[Tensor, str]:
    return _reduced(wrapper.module, wrapper.parameters_to_ignore) | {
        parameter: "(delayed)" for parameter in wrapper._delay_all_reduce_params
    }


def _reduced(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    """The parameters that a wrapper reduces, and their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: name for name, parameter in named if parameter.requires_grad and name not in ignored}
