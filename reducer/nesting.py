"""Wrappers inside wrappers: fine as long as no parameter's gradient is averaged by two of them.

Averaging twice gives the same mean for twice the traffic, which is worth a warning (PyTorch's own tests do it). It is
an error where the inner wrapper has a communication hook: the outer one sends the same gradients without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from gradwire.reducer import errors

TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, those around it that were looked at.
_seen: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()


def refuse_wrappers_inside(module: nn.Module) -> None:
    """Warn if ``module`` is or contains a wrapper that reduces parameters which a new wrapper of it would reduce.

    Raises:
        ValueError: that wrapper has a communication hook.
    """
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
    """Warn once if ``inner`` runs within the forward of another wrapper, and both reduce a parameter.

    Raises:
        RuntimeError: ``inner`` has a communication hook.
    """
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _seen.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        text = errors.wrapped_by_another(type(outer), sorted(theirs[parameter] for parameter in both))
        if inner._comm_hooks:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
    _seen.setdefault(inner, WeakSet()).add(outer)


def _reduced_by(wrapper: TorchDDP) -> dict[Tensor, str]:
    return _reduced(wrapper.module, wrapper.parameters_to_ignore) | {
        parameter: "(delayed)" for parameter in wrapper._delay_all_reduce_params
    }


def _reduced(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    """The parameters that a wrapper reduces, with their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: name for name, parameter in named if parameter.requires_grad and name not in ignored}
