"""Names for the parameters of a bucket, so that a hook's state outlives bucket rebuilds and restarts."""

import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.hooks._arguments import check_process_group
from gradwire.hooks._handshake import HookSettings
from gradwire.hooks._reduce_bucket import is_zero_copy_bucket
from gradwire.hooks._types import GradBucket

NUMBERED = "parameter."
# Submodules that torch.compile, activation checkpointing and FSDP put around a module.
_WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))


def is_number(name: str) -> bool:
    """Whether a name stands for a place in the order of first appearance."""
    return name.startswith(NUMBERED) and name.removeprefix(NUMBERED).isdecimal()


@functools.cache
def plain_name(name: str) -> str:
    """A parameter's name without the components that wrappers of modules add, as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, DataParallel, torch.compile, FSDP and activation checkpointing."""
    while True:
        children = module._modules
        if isinstance(module, (TorchDDP, torch.nn.DataParallel)):
            module = module.module
        elif len(children) == 1 and (inner := next(iter(children))) in _WRAPPED:
            module = module.get_submodule(inner)
        else:
            return module


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The plain name of every parameter of an unwrapped module.

    Raises:
        ValueError: two parameters have the same plain name.
    """
    names: dict[torch.Tensor, str] = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"Two parameters of this {type(module).__name__} have the same name without the components "
            f"{sorted(_WRAPPED)}, which wrappers of modules add. Give one of its submodules another name."
        )
    return names


def registered_module(state: object, parameters: Sequence[torch.Tensor] = ()) -> torch.nn.Module | None:
    """The model whose DDP calls a hook with ``state`` and these parameters; None unless it is one.

    PyTorch's DDP keeps the (hook, state) pairs that were registered, so the right one is the live
    DDP that holds ``state`` and has the parameters. If no DDP holds the state, because a hook of
    the user's own passes it on, the only live DDP with a hook and these parameters is taken. A DDP
    that ``gc.freeze()`` has hidden is not found.

    A search is one pass over all objects of Python's garbage collector: 50 ms for a million.
    """
    wanted = {id(parameter) for parameter in parameters}
    hooked = [ddp for ddp in _live_ddps() if wanted <= {id(parameter) for parameter in ddp.module.parameters()}]
    holders = [ddp for ddp in hooked if any(held is state for _, held in ddp._comm_hooks)]
    modules = [unwrapped(ddp.module) for ddp in holders or (hooked if wanted else [])]
    return modules[0] if len(set(map(id, modules))) == 1 else None


def _live_ddps() -> list[TorchDDP]:
    """All DDPs with a hook, of PyTorch's class and its subclasses."""
    objects = gc.get_referrers(*_with_subclasses(TorchDDP))  # an instance refers to its class
    return [ddp for ddp in objects if TorchDDP in type(ddp).__mro__ and getattr(ddp, "_comm_hooks", None)]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


class ParameterNames:
    """The name of each parameter, from the model that `bind` was given or `registered_module` finds.

    PyTorch's buckets carry no names. If no model is found either, parameters are numbered in the
    order of first appearance: ``parameter.0``, ``parameter.1``, ... The order of PyTorch's first
    backward depends only on the model, so numbers are equal on all ranks and good enough to train,
    but not for options by name and for checkpoints.

    Args:
        state: that the hook is registered with.
    """

    def __init__(self, state: object) -> None:
        self._state = weakref.ref(state)
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unnamed = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        """Whether the names of all parameters are known: from a module, or because all have been seen."""
        return self.module is not None or self._is_closed

    def known(self) -> dict[str, torch.Tensor]:
        """The parameters that have a name by now, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def note(self, names: Sequence[str], bucket: GradBucket) -> None:
        """Remember which parameters have these names, as `of` returned them for this bucket, until all are known."""
        if not self.is_complete:
            self._names.update(zip(bucket.parameters(), names, strict=True))

    def bind(self, module: torch.nn.Module) -> None:
        """Take the names from ``module.named_parameters()``, as `plain_name` has them.

        Raises:
            ValueError: names were taken from another module before, or parameters have been
                numbered.
        """
        module = unwrapped(module)
        bound = self.module
        if bound is not None and bound is not module:
            raise ValueError(
                f"This state belongs to another model, a {type(bound).__name__}; a state remembers one model's "
                f"gradients. Make a new state for this {type(module).__name__}."
            )
        if self.are_numbers:
            raise ValueError(
                "This state has trained without names, and remembers gradients by their place in the first backward. "
                "Call state.bind(model) before the first step, on every rank."
            )
        names = parameter_names(module)
        self._module = weakref.ref(module)
        for parameter, name in names.items():
            self._names[parameter] = name

    @property
    def module(self) -> torch.nn.Module | None:
        """The model that the names are from, while it lives."""
        return self._module() if self._module is not None else None

    @property
    def are_numbers(self) -> bool:
        """Whether names are places in the order of first appearance."""
        return self._unnamed > 0

    def parameters(self) -> list[torch.Tensor]:
        """Those of the module, if there is one."""
        module = self.module
        return list(module.parameters()) if module is not None else []

    def close(self) -> None:
        """Take no parameter by order any more: all have been seen."""
        self._is_closed = True

    def search(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Bind the model that `registered_module` finds, unless the parameters have names or numbers."""
        if self.module is None and not self.are_numbers:
            module = registered_module(self._state(), parameters)
            if module is not None:
                self.bind(module)

    def require(self, needed_by: str) -> None:
        """Raise RuntimeError if names are numbers, with which ``needed_by`` cannot do."""
        if self.are_numbers:
            raise self._unknown(needed_by)

    def of(self, bucket: GradBucket, needed_by: str | None = None) -> tuple[str, ...]:
        """The names of the bucket's parameters, in its order.

        Args:
            bucket: of either DDP.
            needed_by: what cannot do with numbers, for the message.

        Raises:
            RuntimeError: ``needed_by`` is given, and the names are not known.
            ValueError: a parameter is not one of the module's, or appears for the first time after
                `close`.
        """
        if is_zero_copy_bucket(bucket):
            return tuple(map(plain_name, bucket.parameter_names()))
        parameters = bucket.parameters()
        unnamed = [parameter for parameter in parameters if parameter not in self._names]
        if unnamed:
            self.search(parameters)
            unnamed = [parameter for parameter in unnamed if parameter not in self._names]
        if unnamed and (self._is_closed or self.module is not None):
            raise ValueError(
                f"A parameter of shape {tuple(unnamed[0].shape)} belongs to another model than those before; a state "
                "remembers one model's gradients. Make a new state for each model, or bind(module) it to the one whose "
                "parameters change."
            )
        if needed_by is not None and (unnamed or self.are_numbers):
            raise self._unknown(needed_by)
        for parameter in unnamed:
            self._names[parameter] = f"{NUMBERED}{self._unnamed}"
            self._unnamed += 1
        return tuple(self._names[parameter] for parameter in parameters)

    def _unknown(self, needed_by: str) -> RuntimeError:
        return RuntimeError(
            f"{needed_by} needs the names of parameters. PyTorch's DistributedDataParallel does not pass them to "
            "hooks, and no model, or more than one, was found for this state. Call state.bind(model) before the first "
            "step, on every rank."
        )


class NamedState(HookSettings):
    """A hook's state that remembers by parameter name.

    Attributes:
        process_group: the ranks to average over; None for the default group.
    """

    def __init__(self) -> None:
        super().__init__(type(self).__name__)
        self._names = ParameterNames(self)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_process_group(process_group)
        self._process_group = process_group

    def bind(self, module: torch.nn.Module) -> None:
        """Name the parameters after ``module``.

        Seldom needed: gradwire's DDP binds the state at registration, and the model behind
        PyTorch's DDP is found at the first step or checkpoint. There are two exceptions: models
        share parameters and a hook of your own passes the state on, or ``gc.freeze()`` has hidden
        the DDP. Parameters are numbered then: training works, with random columns that follow the
        numbers; options by name and checkpoints raise.

        Args:
            module: the model, wrapped or not.

        Raises:
            ValueError: the state belongs to another model, or has trained without names.
        """
        self._names.bind(module)

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:
        return self._names.of(bucket)

    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Remember for the next step what a reduction had for a parameter but was not applied.

        Called by gradwire's DistributedDataParallel for a parameter that no rank uses in a step:
        its ``.grad`` stays as it is, whatever the hook's memory of earlier steps would have added.
        Does nothing by default.

        Args:
            name: of the parameter.
            gradient: what was reduced for it, minus what this rank put in.
        """

    def replicated_state(self) -> dict[str, Any]:
        """What must be equal on all ranks: numbers and tensors, nested in dictionaries with strings for keys."""
        return {}

    def load_replicated_state(self, replicated: dict[str, Any]) -> None:
        """Continue from another rank's `replicated_state`; this rank's error memory stays."""
