"""Names for the parameters of a bucket, so that a hook's state outlives bucket rebuilds and restarts."""

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.hooks.handshake import HookSettings
from gradwire.hooks.reduce import is_in_place_bucket
from gradwire.hooks.types import GradBucket

NUMBERED = "parameter."


def is_number(name: str) -> bool:
    """Whether a name stands for a place in the order of first appearance."""
    return name.startswith(NUMBERED) and name.removeprefix(NUMBERED).isdecimal()


class ParameterNames:
    """Finds each parameter's name: from gradwire's bucket, from `bind`, or else from the order of first appearance.

    PyTorch's buckets carry no names. Its first backward presents parameters in an order that depends only on the
    model, so ``parameter.0``, ``parameter.1``, ... name the same parameters when the same script runs again.
    """

    def __init__(self) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unnamed = 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._is_closed = False

    def bind(self, module: torch.nn.Module) -> None:
        """Take the names from ``module.named_parameters()``; a wrapping DDP is looked through.

        Raises:
            ValueError: names were taken from another module before.
        """
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        bound = self.module
        if bound is not None and bound is not module:
            raise ValueError(
                f"This state belongs to another model, a {type(bound).__name__}; a state remembers one model's "
                f"gradients. Make a new state for this {type(module).__name__}."
            )
        self._module = weakref.ref(module)
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    @property
    def module(self) -> torch.nn.Module | None:
        """The module that `bind` was given, while it lives."""
        return self._module() if self._module is not None else None

    def parameters(self) -> list[torch.Tensor]:
        """Those of the module, if there is one."""
        module = self.module
        return list(module.parameters()) if module is not None else []

    def close(self) -> None:
        """Take no parameter by order any more: all have been seen."""
        self._is_closed = True

    def of(self, bucket: GradBucket) -> tuple[str, ...]:
        """The names of the bucket's parameters, in its order.

        Raises:
            ValueError: a parameter is not one of the module's, or appears for the first time after `close`.
        """
        if is_in_place_bucket(bucket):
            return tuple(bucket.parameter_names())
        return tuple(self._name(parameter) for parameter in bucket.parameters())

    def _name(self, parameter: torch.Tensor) -> str:
        if parameter not in self._names:
            if self._is_closed or self.module is not None:
                raise ValueError(
                    f"A parameter of shape {tuple(parameter.shape)} belongs to another model than those before; a "
                    "state remembers one model's gradients. Make a new state for each model, or bind(module) it to "
                    "the one whose parameters change."
                )
            self._names[parameter] = f"{NUMBERED}{self._unnamed}"
            self._unnamed += 1
        name: str = self._names[parameter]
        return name


class NamedState(HookSettings):
    """A hook's state that remembers by parameter name."""

    def __init__(self) -> None:
        super().__init__(type(self).__name__)
        self._names = ParameterNames()

    def bind(self, module: torch.nn.Module) -> None:
        """Name the parameters after ``module``. A checkpoint needs it on PyTorch's DDP; gradwire's does it by itself.

        Without it, names are places in the order of first appearance, and PowerSGD's random columns follow the names.

        Args:
            module: the model, wrapped or not.

        Raises:
            ValueError: the state was bound to another model.
        """
        self._names.bind(module)

    def parameter_names(self, bucket: GradBucket) -> tuple[str, ...]:  # noqa: D102
        return self._names.of(bucket)

    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Remember for the next step what a reduction had for a parameter but was not applied.

        Called by gradwire's DistributedDataParallel for a parameter that no rank uses in a step: its ``.grad`` stays as
        it is, whatever the hook's memory of earlier steps would have added. Does nothing by default.

        Args:
            name: of the parameter.
            gradient: what was reduced for it, minus what this rank put in.
        """
