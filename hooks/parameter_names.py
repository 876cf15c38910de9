"""Names for the parameters of a bucket, so that a hook's state outlives bucket rebuilds and restarts."""

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.hooks.reduce import InPlaceBucket
from gradwire.hooks.types import GradBucket


class ParameterNames:
    """Finds each parameter's name: from gradwire's bucket, from `bind`, or else from the order of first appearance.

    PyTorch's buckets carry no names. Its first backward presents parameters in an order that depends only on the
    model, so ``parameter.0``, ``parameter.1``, ... name the same parameters when the same script runs again.
    """

    def __init__(self) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unnamed = 0

    def bind(self, module: torch.nn.Module) -> None:
        """Take the names from ``module.named_parameters()``."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def of(self, bucket: GradBucket) -> tuple[str, ...]:
        """The names of the bucket's parameters, in its order."""
        if isinstance(bucket, InPlaceBucket):
            return tuple(bucket.parameter_names())
        return tuple(self._name(parameter) for parameter in bucket.parameters())

    def _name(self, parameter: torch.Tensor) -> str:
        if parameter not in self._names:
            self._names[parameter] = f"parameter.{self._unnamed}"
            self._unnamed += 1
        name: str = self._names[parameter]
        return name
