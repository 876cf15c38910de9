"""`ParameterNames`: the names of a state's parameters, and the search for the model that has them.

Parameter names, unlike bucket indices, survive rebuilds and restarts. gradwire's buckets have names, PyTorch's have
none.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.exchange.bucket import Bucket

NUMBERED = "parameter."
# Name components that torch.compile, activation checkpointing and FSDP add.
_WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))


class ParameterNames:
    """The names of parameters, from the model passed to `bind` or found by `search`.

    PyTorch's buckets have no names. If no model is found, parameters are numbered in the order of first appearance,
    ``parameter.0``, ``parameter.1``, ..., which in PyTorch's first backward depends only on the model and is equal on
    all ranks. Numbers suffice to train, but not for options by name or checkpoints.
    """

    def __init__(self, state: object) -> None:
        self._state = weakref.ref(state)
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unnamed = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self.layouts: dict[str, torch.Tensor] = {}  # of `bind_layouts`
        self.is_closed = False  # whether every parameter has appeared: no further one is numbered

    @property
    def is_complete(self) -> bool:
        """Whether all names are known: from a module, or because every parameter has appeared."""
        return self.module is not None or self.is_closed

    def known(self) -> dict[str, torch.Tensor]:
        """The parameters with a name so far, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def note(self, names: Sequence[str], bucket: Bucket) -> None:
        """Store the names that `in_bucket` returned for this bucket, unless all are known."""
        if not self.is_closed and (self._module is None or self._module() is None):
            self.check_parameters(names, bucket.parameters())
            self._names.update(zip(bucket.parameters(), names, strict=True))

    def check_parameters(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if one of these names belongs to another parameter."""
        if self.layouts:  # of a sharded model: tensors without memory, made anew for each bucket
            return
        known = self.known()
        for name, parameter in zip(names, parameters, strict=True):
            if known.get(name, parameter) is not parameter:
                raise ValueError(
                    f"Two models have a parameter {name!r}; a state serves one model only. Create a new state for each "
                    "model. If a model's parameters change, call state.bind(module) with that model."
                )

    def bind(self, module: torch.nn.Module) -> None:
        """Take the names from ``module.named_parameters()``, as `plain_name` has them."""
        module = unwrapped(module)
        bound = self.module
        if bound is not None and bound is not module:
            raise ValueError(
                f"This state belongs to another model, a {type(bound).__name__}; a state serves one model only. "
                f"Create a new state for this {type(module).__name__}."
            )
        if self.are_numbers:
            raise ValueError(
                "This state has trained without parameter names, and identifies parameters by their order. "
                "Call state.bind(model) before the first step, on every rank."
            )
        self._names.update(parameter_names(module))
        self._module = weakref.ref(module)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if the state belongs to a model with other parameters."""
        known = self.known()
        if known and known.keys() != set(names):
            different = min(known.keys() ^ set(names))
            raise ValueError(
                f"This state belongs to another model: only one of the two has a parameter {different!r}. A state "
                "serves one model only. Create a new state for this model."
            )

    def bind_layouts(self, layouts: Mapping[str, torch.Tensor]) -> None:
        """Take the names of all parameters of a sharded model, from tensors in the layouts of their shards."""
        self.layouts = dict(layouts)
        self._names.update((layout, name) for name, layout in layouts.items())
        self.is_closed = True

    def compressible(self) -> dict[torch.Tensor, str]:
        """The trainable parameters with dense gradients; empty if the model is unknown."""
        module = self.module
        if module is None:
            return {layout: name for name, layout in self.layouts.items() if layout.numel() > 0}
        embeddings = (part for part in module.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag))
        sparse = {id(part.weight) for part in embeddings if part.sparse}
        names = parameter_names(module)
        return {each: name for each, name in names.items() if each.requires_grad and id(each) not in sparse}

    @property
    def module(self) -> torch.nn.Module | None:
        """The model that the names are from; None if there is none or it no longer exists."""
        return self._module() if self._module is not None else None

    @property
    def are_numbers(self) -> bool:
        """Whether parameters are numbered in the order of first appearance."""
        return self._unnamed > 0

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the module, if there is one."""
        module = self.module
        return list(module.parameters()) if module is not None else list(self.layouts.values())

    def search(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Bind the model whose DDP calls a hook with the state and these parameters, if there is exactly one.

        Not if the state has a model, or its parameters are numbered.
        """
        if self.module is None and not self.are_numbers:
            found = (unwrapped(ddp.module) for ddp in registered_wrappers(self._state(), parameters))
            modules = {id(module): module for module in found}  # modules need not be hashable
            if len(modules) == 1:
                self.bind(*modules.values())

    def require(self, needed_by: str) -> None:
        """Raise RuntimeError, with ``needed_by`` as its subject, if parameters are numbered."""
        if self.are_numbers:
            raise self._unknown(needed_by)

    def in_bucket(self, bucket: Bucket, needed_by: Callable[[], str | None]) -> tuple[str, ...]:
        """The names of the bucket's parameters; ``needed_by`` returns the subject of an error if numbers won't do."""
        parameters = bucket.parameters()
        names: list[str | None] = list(map(self._names.get, parameters))
        if None in names:
            self.search(parameters)
            names = list(map(self._names.get, parameters))
        unnamed = [parameter for parameter, name in zip(parameters, names, strict=True) if name is None]
        if unnamed and (self.is_closed or self.module is not None):
            raise ValueError(
                f"A parameter of shape {tuple(unnamed[0].shape)} belongs to another model than earlier ones; a "
                "state serves one model only. Create a new state for each model. If a model's parameters change, call "
                "state.bind(module) with that model."
            )
        if (unnamed or self._unnamed > 0) and (needing := needed_by()) is not None:
            raise self._unknown(needing)
        for parameter in unnamed:
            self._names[parameter] = f"{NUMBERED}{self._unnamed}"
            self._unnamed += 1
            names[names.index(None)] = self._names[parameter]
        return tuple(cast("list[str]", names))

    def _unknown(self, needed_by: str) -> RuntimeError:
        return RuntimeError(
            f"{needed_by} needs the names of parameters. PyTorch's DistributedDataParallel does not pass them to "
            "hooks, and no model, or more than one, was found for this state. Call state.bind(model) before the first "
            "step, on every rank."
        )


def check_patterns(options: Any, names: Iterable[str], argument: str = "") -> None:
    """Raise ValueError if a name pattern in the options, of this ``argument``, matches none of the model's names."""
    names = sorted(names)
    find = getattr(options, "unmatched_pattern", None)
    if find is None or (unmatched := find(names)) is None:
        return
    numbered = all(map(is_number, names))
    remedy = "Call state.bind(model), which names them, or use" if numbered else "Correct or remove it:"
    raise ValueError(
        f"{unmatched}{argument and f' in {argument}'} matches none of the model's {len(names)} parameters, "
        f"{', '.join(names[:5])}, ... {remedy} patterns of whole names as in `fnmatch`, such as '*.weight'."
    )


def is_number(name: str) -> bool:
    """Whether ``name`` numbers a parameter in the order of first appearance (``parameter.0``)."""
    return name.startswith(NUMBERED) and name.removeprefix(NUMBERED).isdecimal()


@functools.cache
def plain_name(name: str) -> str:
    """A parameter's name without the components that module wrappers add, such as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside the wrappers DDP, DataParallel, torch.compile, FSDP and activation checkpointing."""
    while True:
        children = module._modules
        if isinstance(module, (TorchDDP, torch.nn.DataParallel)):
            module = module.module
        elif len(children) == 1 and (inner := next(iter(children))) in _WRAPPED:
            module = module.get_submodule(inner)
        else:
            return module


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The plain name of every parameter of an unwrapped module; raises ValueError if two are the same."""
    names: dict[torch.Tensor, str] = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"Two parameters of this {type(module).__name__} have the same name without the components "
            f"{sorted(_WRAPPED)}, which wrappers of modules add. Give one of its submodules another name."
        )
    return names


def live_wrappers() -> list[TorchDDP]:
    """All live wrappers, PyTorch's, gradwire's and other subclasses, unless ``gc.freeze()`` hid them.

    One pass over all objects of Python's garbage collector: 50 ms for a million.
    """
    kinds: list[type] = [TorchDDP]
    for kind in kinds:  # the list grows
        kinds += kind.__subclasses__()
    objects = gc.get_referrers(*kinds)  # an instance refers to its class
    return [ddp for ddp in objects if TorchDDP in type(ddp).__mro__ and "module" in vars(ddp).get("_modules", {})]


def registered_wrappers(state: object, parameters: Sequence[torch.Tensor] = ()) -> list[TorchDDP]:
    """The live wrappers that hold ``state`` with a hook and have these parameters.

    If none holds the state, because the user's own hook passes it on: all with a hook and these parameters.
    """
    wanted = set(map(id, parameters))
    hooked = [ddp for ddp in live_wrappers() if getattr(ddp, "_comm_hooks", None)]
    hooked = [ddp for ddp in hooked if wanted <= set(map(id, ddp.module.parameters()))]
    holders = [ddp for ddp in hooked if any(held is state for _, held in ddp._comm_hooks)]
    return holders or (hooked if wanted else [])
