"""Steps of a hook alone, without a model: it is called on the buckets of a model's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from gradwire.bench.gradient_checks import (
    complaint_about_feedback,
    complaint_about_mean,
    error_memory,
    stateless_format,
)
from gradwire.bench.shapes import Shape
from gradwire.exchange.decorators import is_zero_copy
from gradwire.planner.hook_registry import Registration
from gradwire.reducer.bucket import BucketSpec, DenseBucket


class HookStep:
    """A hook on all buckets of a model; a call is a step.

    Buckets are lists of gradients; with ``is_flat``, or if the hook is not zero-copy, flat ones as in PyTorch's DDP.
    Results replace the gradients, which loses nothing: gradient + error is the same in every step.
    """

    def __init__(
        self, registration: Registration, shapes: Sequence[Sequence[Shape]], device: torch.device, is_flat: bool
    ) -> None:
        self.state, self._hook = registration
        is_flat = is_flat or not is_zero_copy(self._hook)
        self.gradients: dict[str, Tensor] = {}  # by parameter name; every step replaces their values
        self._buckets: list[DenseBucket] = []
        generator = torch.Generator(device).manual_seed(0)
        parameters_of = [[torch.empty(shape, device=device) for shape in bucket_shapes] for bucket_shapes in shapes]
        for index, parameters in enumerate(parameters_of):
            gradients = [torch.randn(p.shape, device=device, generator=generator) for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            names = [f"{index}.{i}" for i in range(len(parameters))]
            spec = BucketSpec(
                index=index,
                is_last=index == len(shapes) - 1,
                members=list(range(len(parameters))),
                parameters=parameters,
                names=names,
                model_parameters=list(chain.from_iterable(parameters_of)),  # one handshake serves all of them
            )
            bucket = DenseBucket(spec, as_view=is_flat)
            bucket.collect(zero_copy=not is_flat)
            self.gradients |= dict(zip(names, bucket.gradients() if is_flat else gradients, strict=True))
            self._buckets.append(bucket)

    def __call__(self) -> None:
        """Reduce all buckets; the current stream waits for the results."""
        futures = [self._hook(self.state, bucket) for bucket in self._buckets]  # type: ignore[arg-type]
        for future in futures:
            future.wait()

    def check(self, wire: torch.dtype | None) -> None:
        """Take a step and check its result. A collective call. Raises RuntimeError if it is wrong."""
        local, old = [gradient.clone() for gradient in self.gradients.values()], self._errors()
        self()
        result, new = list(self.gradients.values()), self._errors()
        if (sent := wire or stateless_format(self.state)) is not None:
            complaint = complaint_about_mean(local, result, sent)
        else:
            complaint = complaint_about_feedback(local, old, result, new, self.state)
        if complaint is not None:
            raise RuntimeError(f"{complaint}; nothing is timed.")

    def _errors(self) -> list[Tensor]:
        errors = error_memory(self.state)
        zero = torch.zeros((), device=next(iter(self.gradients.values())).device)
        return [errors.get(name, zero.expand_as(gradient)) for name, gradient in self.gradients.items()]
