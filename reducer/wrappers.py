"""Several wrappers of one parameter.

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

from gradwire.exchange.names import live_wrappers
from gradwire.reducer import torch_internals

TorchDDP = nn.parallel.DistributedDataParallel

# For each wrapper, the wrappers around it that have been checked.
_checked: WeakKeyDictionary[TorchDDP, WeakSet[TorchDDP]] = WeakKeyDictionary()
# gradwire's wrappers that have begun a forward.
_have_run_forward: WeakSet[Any] = WeakSet()


def link_sharing_wrappers(wrapper: Any) -> None:
    """Before its first forward, tell ``wrapper`` and the live wrappers that share its parameters: `Reducer.share`."""
    if wrapper not in _have_run_forward:
        _have_run_forward.add(wrapper)
        _link(wrapper)


@torch_internals.not_compiled
def _link(wrapper: Any) -> None:
    mine = {id(parameter) for parameter in wrapper.reducer.parameters}
    other: Any
    for other in {*_have_run_forward, *live_wrappers()} - {wrapper}:
        shared = {id(parameter) for parameter in other.module.parameters()} & mine
        if not shared or not hasattr(other, "reducer"):  # its constructor has raised
            continue
        wrapper.reducer.share(other, shared)
        if hasattr(other.reducer, "share"):
            other.reducer.share(wrapper, shared)
        elif wrapper.gradient_as_bucket_view and other.gradient_as_bucket_view:
            raise ValueError(
                "Two wrappers with gradient_as_bucket_view share parameters, and one of them is PyTorch's class: each "
                "would make a gradient a view of its own buffer. Leave gradient_as_bucket_view out of one, or use "
                "gradwire's class for both."
            )


def check_no_wrapper_inside(module: nn.Module) -> None:
    """Warn if ``module`` is or contains a wrapper of parameters that a new wrapper would reduce again.

    Raises ValueError if that wrapper has a communication hook, or is FSDP2's.
    """
    ours = _reduced(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, part in module.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):  # without importing FSDP
            raise ValueError(
                f"module cannot be wrapped: {f'its submodule {name} is' if name else 'it is'} sharded by fully_shard, "
                "which averages gradients by itself. Leave out the wrapper, and use FSDP2 for the whole model: "
                "fully_shard for shards, replicate for copies."
            )
        both = ours.keys() & _reduced_by(part).keys() if isinstance(part, TorchDDP) else ()
        if both:
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            where = f"contains a {kind} ({name})" if name else "is a DistributedDataParallel"
            text = (
                f"module {where}, which averages {_some(ours, both)} already; their gradients would be averaged twice. "
                "Wrap the bare module once, or give the outer wrapper the names of those parameters as "
                "module._ddp_params_and_buffers_to_ignore."
            )
            if part._comm_hooks:
                raise ValueError(text)
            warnings.warn(text, stacklevel=3)


def check_not_nested(inner: TorchDDP) -> None:
    """Warn once if ``inner`` runs in the forward of a wrapper of its parameters; RuntimeError if it has a hook."""
    outer = TorchDDP._active_ddp_module
    if outer is None or outer is inner or outer in _checked.get(inner, ()):
        return
    theirs = _reduced_by(outer)
    both = theirs.keys() & _reduced_by(inner).keys()
    if both:
        text = (
            "This gradwire.DistributedDataParallel was wrapped in another wrapper, a "
            f"{type(outer).__module__}.{type(outer).__qualname__}: both average {_some(theirs, both)}, and the "
            "gradients would be averaged twice, once without a hook. Leave the outer wrapper out. With accelerate, "
            "pass accelerator.prepare the optimizer and the data loader only."
        )
        if inner._comm_hooks:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=3)
    _checked.setdefault(inner, WeakSet()).add(outer)


def _reduced_by(wrapper: TorchDDP) -> dict[Tensor, str]:
    return _reduced(wrapper.module, wrapper.parameters_to_ignore) | {
        parameter: "(delayed)" for parameter in wrapper._delay_all_reduce_params
    }


def _reduced(module: nn.Module, ignored: Collection[str]) -> dict[Tensor, str]:
    named = module.named_parameters(remove_duplicate=False)
    return {parameter: name for name, parameter in named if parameter.requires_grad and name not in ignored}


def _some(names: dict[Tensor, str], parameters: Collection[Tensor]) -> str:
    chosen = sorted(names[parameter] for parameter in parameters)
    return ", ".join(chosen[:3]) + (f" and {len(chosen) - 3} more" if len(chosen) > 3 else "")
