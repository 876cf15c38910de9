"""DDP's native mixed precision: parameters, gradients and their exchange in lower precisions than the optimizer's.

PyTorch's class does most of it. Before a forward it points each parameter at a copy in ``param_dtype``, and it
registers a hook that sums a bucket in ``reduce_dtype`` and points the parameters at their own values again. What is
left to the reducer is in `LowPrecisionBucket`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.reducer.bucket import GradBucket, TakeBack


def check(config: Any) -> None:
    """Raise, before anything has been changed, unless the constructor's ``mixed_precision`` can be used.

    Raises:
        ValueError: ``param_dtype`` or ``reduce_dtype`` is no floating-point dtype.
        RuntimeError: there is no accelerator.
    """
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


class LowPrecisionBucket(GradBucket):
    """The gradients of parameters in a lower precision, whose mean goes into gradients in the parameters' own.

    PyTorch's hook makes every ``.grad`` a tensor in the dtype of its parameter, so none can be a view of the bucket.

    Args:
        index: position in the order of communication.
        is_last: whether it is the last one of a backward.
        parameters: each with a copy in lower precision, ``_mp_param``, which PyTorch's class has made.
        names: of the parameters.
        stream: that PyTorch's hook casts gradients on.
    """

    _absent: list[int]

    def __init__(
        self, index: int, is_last: bool, parameters: Sequence[Tensor], names: Sequence[str], stream: torch.Stream
    ) -> None:
        super().__init__(index, is_last, parameters, names, as_view=False)
        self._stream = stream

    def _like_gradients(self) -> Iterable[Tensor]:
        return [parameter._mp_param for parameter in self._parameters]  # type: ignore[attr-defined]

    def collect(self, zero_copy: bool, unused: Sequence[int] = ()) -> None:
        """Take the parameters' gradients; see `GradBucket.collect`."""
        super().collect(zero_copy, unused)
        self._absent = [i for i in unused if self._parameters[i].grad is None]
        for i in self._absent:  # PyTorch's hook casts every gradient
            self._parameters[i].grad = self._grads[i]

    def finish(
        self, result: Tensor | None, scale: float, used: Mapping[int, bool], take_back: TakeBack | None = None
    ) -> None:
        """Put the mean into the gradients, and let go of them; see `GradBucket.finish`."""
        assert result is not None
        torch.accelerator.current_stream().wait_stream(self._stream)
        reduced = [i for i in range(len(self._parameters)) if used.get(i, True)]
        if reduced:
            torch._foreach_copy_([self._gradient(i) for i in reduced], [self._view(result, i) for i in reduced])
        for i in set(self._absent).difference(reduced):
            self._parameters[i].grad = None
        self.release()

    def _gradient(self, i: int) -> Tensor:
        gradient = self._parameters[i].grad
        assert gradient is not None
        return gradient

    def _view(self, result: Tensor, i: int) -> Tensor:
        # The table's own views would keep the result alive until the next step.
        return result.as_strided(self._table.shapes[i], self._table.strides[i], self._table.offsets[i])

    def release(self) -> None:
        """Let go of this backward's gradients."""
        super().release()
        self._absent = []


def restore(parameters: Iterable[Tensor]) -> None:
    """Point parameters at their own values after a forward that no backward follows."""
    for parameter in parameters:
        if hasattr(parameter, "_mp_param"):
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]


def forget_hooks(parameters: Iterable[Tensor]) -> None:
    """Remove the hooks that earlier forwards have set on the gradients of parameters.

    PyTorch's class sets one in every forward and in every module that has the parameter. It removes the last one only,
    after a synchronised backward.
    """
    for parameter in parameters:
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
