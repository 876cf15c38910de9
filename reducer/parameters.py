"""Parameters that are replaced after the model was wrapped, or shared by several wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cache
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.nn.modules import module as modules

from gradwire.hooks._names import live_wrappers
from gradwire.reducer import errors, torch_internals

FORWARDS_BETWEEN_CHECKS = 64  # also after changes that bypass `nn.Module.register_parameter`

_requires_grad = attrgetter("requires_grad")
_registrations = count()
_latest = -1  # number of the latest registration of a parameter or a submodule, in any module of this process
TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, the wrappers around it that have been checked.
_checked: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()
# gradwire's wrappers that have begun a forward.
_have_run_forward: WeakSet[Any] = WeakSet()


@cache
def _count_registrations() -> None:
    def counted(_: nn.Module, __: str, ___: Any) -> None:
        global _latest
        _latest = next(_registrations)

    modules.register_module_parameter_registration_hook(counted)
    modules.register_module_module_registration_hook(counted)


class ModelWatch:
    """Compares the trainable parameters of a model with the ones that its reducer averages.

    Names are compared after a parameter was registered in this process, which assignments and
    ``load_state_dict(assign=True)`` do, too, and every `FORWARDS_BETWEEN_CHECKS` forwards. Other forwards cost less
    than 1 us, and 0.03 us for each frozen parameter.
    """

    def __init__(self, module: nn.Module, known: Collection[Tensor], ignored: Collection[str]) -> None:
        _count_registrations()
        self._module = module
        self._known = set(known)  # kept alive: no other parameter may get the same id()
        # Wrappers of submodules, such as checkpointing's, change names.
        self._known.update(parameter for name, parameter in module.named_parameters() if name in ignored)
        self._ignored = ignored
        self._remember()

    def _remember(self) -> None:
        self._seen = _latest
        self._forwards = 0
        self._frozen = [
            parameter
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad and name not in self._ignored
        ]

    def find_unknown(self) -> str | None:
        """The name of a trainable parameter that is not averaged; None if there is none."""
        self._forwards += 1
        if (
            self._seen == _latest
            and self._forwards < FORWARDS_BETWEEN_CHECKS
            and not any(map(_requires_grad, self._frozen))
        ):
            return None
        for name, parameter in self._module.named_parameters():
            # `torch.func.functional_call` replaces parameters by plain tensors.
            is_trained = parameter.requires_grad and isinstance(parameter, nn.Parameter)
            if is_trained and name not in self._ignored and parameter not in self._known:
                return name
        self._remember()
        return None


# Several wrappers of one parameter. Averaging twice gives the same mean for twice the traffic. Nesting only warns,
# because PyTorch's own tests nest wrappers. If the inner wrapper has a communication hook, it raises: the outer wrapper
# sends the same gradients without the hook. Models that share a layer and are trained in one backward are no mistake.


def find_sharing_wrappers(wrapper: Any) -> None:
    """Before its first forward, find the live wrappers that share parameters with ``wrapper``; see
    `Reducer.share`.
    """
    if wrapper not in _have_run_forward:
        _have_run_forward.add(wrapper)
        _share(wrapper)


@torch_internals.not_compiled
def _share(wrapper: Any) -> None:
    mine = {id(parameter) for parameter in wrapper.reducer.parameters}
    other: Any
    for other in {*_have_run_forward, *live_wrappers()}:
        shared = {id(parameter) for parameter in other.module.parameters()} & mine if other is not wrapper else None
        if shared:
            wrapper.reducer.share(other, shared)
            if hasattr(other.reducer, "share"):
                other.reducer.share(wrapper, shared)
            elif wrapper.gradient_as_bucket_view and other.gradient_as_bucket_view:
                raise ValueError(errors.SHARED_VIEWS)


def check_no_wrapper_inside(module: nn.Module) -> None:
    """Warn if ``module`` is or contains a wrapper of parameters that a new wrapper would reduce again.

    Raises ValueError if that wrapper has a communication hook, or is FSDP2's.
    """
    for name, part in module.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):  # without importing FSDP
            where = f"its submodule {name} is" if name else "it is"
            raise ValueError(errors.SHARDED.format(where=where))
    wrappers = [(name, part) for name, part in module.named_modules() if isinstance(part, TorchDDP)]
    if not wrappers:
        return
    ours = _reduced(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, wrapper in wrappers:
        both = ours.keys() & _reduced_by(wrapper).keys()
        if both:
            kind = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
            where = f"contains a {kind} ({name})" if name else "is a DistributedDataParallel"
            names = errors.some(sorted(ours[parameter] for parameter in both))
            text = errors.WRAPPED_TWICE.format(where=where, names=names)
            if wrapper._comm_hooks:
                raise ValueError(text)
            warnings.warn(text, stacklevel=3)


def check_not_nested(inner: TorchDDP) -> None:
    """Warn once if ``inner`` runs in the forward of a wrapper of its parameters; RuntimeError if ``inner``
    has a hook.
    """
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _checked.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        names = errors.some(sorted(theirs[parameter] for parameter in both))
        text = errors.WRAPPED_BY_ANOTHER.format(kind=type(outer), names=names)
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
