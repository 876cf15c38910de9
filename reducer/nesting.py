"""Wrappers inside wrappers: fine as long as no parameter's gradient is averaged by two of them."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from gradwire.reducer import errors

TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, those around it that were found to leave its parameters alone.
_apart: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()


def refuse_wrappers_inside(module: nn.Module) -> None:
    """Raise unless a new wrapper of ``module`` may reduce its parameters.

    Raises:
        ValueError: the module is or contains a wrapper that reduces one of them already.
    """
    wrappers = [(name, part) for name, part in module.named_modules() if isinstance(part, TorchDDP)]
    if not wrappers:
        return
    ours = _reduced(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, wrapper in wrappers:
        both = ours.keys() & _reduced_by(wrapper).keys()
        if both:
            raise ValueError(errors.wrapped_twice(name, type(wrapper), sorted(ours[parameter] for parameter in both)))


def refuse_wrapper_around(inner: TorchDDP) -> None:
    """Raise if ``inner`` runs within the forward of another wrapper that reduces a parameter of both.

    Raises:
        RuntimeError: it does.
    """
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _apart.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        raise RuntimeError(errors.wrapped_by_another(type(outer), sorted(theirs[parameter] for parameter in both)))
    _apart.setdefault(inner, WeakSet()).add(outer)


def _reduced_by(wrapper: TorchDDP) -> dict[Tensor, str]:
    return _reduced(wrapper.module, wrapper.parameters_to_ignore) | {
        parameter: "(delayed)" for parameter in wrapper._delay_all_reduce_params
    }


def _reduced(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    """The parameters that a wrapper reduces, with their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: name for name, parameter in named if parameter.requires_grad and name not in ignored}
