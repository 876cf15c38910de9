"""DDP's native mixed precision: low-precision copies of parameters, and gradients reduced in a dtype of their own.

PyTorch's class does most of it: before a forward it points each parameter at a copy, and its hook sums a bucket in
``reduce_dtype`` and points the parameters back at their own values. `LowPrecisionBucket` is the reducer's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.reducer.bucket import BucketSpec, DenseBucket, TakeBack


def check_config(config: Any) -> None:
    """Raise ValueError for dtypes that are not floating-point, and RuntimeError without an accelerator."""
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(config, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(
                f"mixed_precision.{name} is {dtype}; expected a floating-point dtype, such as torch.bfloat16. Pass "
                "torch.nn.parallel.distributed._MixedPrecision(param_dtype=..., reduce_dtype=..., buffer_dtype=...)."
            )
    try:
        torch.Event().record()
    except RuntimeError as error:
        raise RuntimeError(
            f"mixed_precision needs an accelerator, for whose streams it waits: {error} Use torch.autocast."
        ) from error


class LowPrecisionBucket(DenseBucket):
    """A bucket of low-precision gradients, whose mean becomes gradients in the parameters' own dtype.

    PyTorch's hook, which casts on ``stream``, makes every ``.grad`` a tensor of its own: none is a view of the bucket.
    """

    _absent: list[int]  # positions of the stand-ins that have no gradient at all

    def __init__(self, spec: BucketSpec, stream: torch.Stream) -> None:
        super().__init__(spec, as_view=False, like=[p._mp_param for p in spec.parameters])  # type: ignore[attr-defined]
        self._stream = stream

    def collect(
        self, zero_copy: bool, unused: Sequence[int] = (), shared: Collection[int] = (), incoming: Tensor | None = None
    ) -> None:
        """Take the parameters' gradients; see `DenseBucket.collect`."""
        super().collect(zero_copy, unused, shared, incoming)
        self._absent = [i for i in unused if self._parameters[i].grad is None]
        for i in self._absent:  # PyTorch's hook casts every gradient
            self._parameters[i].grad = self._grads[i]

    def finish(self, result: Tensor, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None) -> None:
        """Write the mean into the gradients; see `DenseBucket.finish`."""
        torch.accelerator.current_stream().wait_stream(self._stream)
        reduced = [i for i in range(len(self._parameters)) if used.get(i, True)]
        if reduced:
            torch._foreach_copy_([self._gradient(i) for i in reduced], [self._view(result, i) for i in reduced])
        for i in set(self._absent).difference(reduced):
            self._parameters[i].grad = None

    def _gradient(self, i: int) -> Tensor:
        gradient = self._parameters[i].grad
        assert gradient is not None
        return gradient

    def _view(self, result: Tensor, i: int) -> Tensor:
        # The table's own views would keep the result alive until the next step.
        return result.as_strided(self._table.shapes[i], self._table.strides[i], self._table.offsets[i])

    def release(self) -> None:
        """Drop all tensors of this backward."""
        super().release()
        self._absent = []


def restore_parameters(parameters: Iterable[Tensor]) -> None:
    """Point parameters back at their own values after a forward without a backward."""
    for parameter in parameters:
        if hasattr(parameter, "_mp_param"):
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]


def remove_copy_hooks(parameters: Iterable[Tensor]) -> None:
    """Remove the hooks on the gradients of the parameters' copies: PyTorch sets one per forward, and removes only the
    last.
    """
    for parameter in parameters:
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
