"""The check of a hook's gradients that a bench makes before it times the hook: in the mean, nothing is lost."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.exchange.hook_state import HookState
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.kernels import WIRE_FORMATS, WireFormat


def error_memory(state: object) -> dict[Any, Tensor]:
    """A copy of this rank's error memory as the hook keeps it, empty for hooks without one."""
    if isinstance(state, HookState) and "errors" in state.memory.declared:
        # Errors that a checkpoint sums are parts of the mean gradient, others of this rank's gradient.
        scale = dist.get_world_size() if state.memory.declared["errors"].merge == "sum" else 1
        errors = {name: scale * error for name, error in state.memory.tensors("errors").items()}
    else:
        errors = getattr(state, "error_dict", {})
    return {key: error.clone() for key, error in errors.items()}


def stateless_format(state: object) -> WireFormat | None:
    """The wire format of a quantized hook without error feedback; None for other hooks."""
    if isinstance(state, QuantizationState) and not state.options.keeps_errors:
        return WIRE_FORMATS[state.options.wire]
    return None


def complaint_about_mean(
    local: Sequence[Tensor], result: Sequence[Tensor], wire: torch.dtype | WireFormat
) -> str | None:
    """Compare ``result`` with the mean of ``local`` over all ranks, sent as ``wire``; a complaint, or None.

    A rank's gradient is rounded once on its way to a dtype, at most once more for each other rank that is added, and
    once in a division: n + 1 relative errors of half a unit in the last place, of magnitudes whose mean is at most the
    mean of |g|, and as many errors of half the smallest subnormal. One more covers their products and fp32's own.

    In integers, each of two shots is off by a step of the scale at most: 1 / levels of the largest element.
    """
    n = dist.get_world_size()
    for parameter, (gradient, reduced) in enumerate(zip(local, result, strict=True)):
        if isinstance(wire, WireFormat):
            bound = 2.1 / wire.levels * _mean(gradient.abs().amax())  # scales are rounded up by 2^-7
        else:
            info = torch.finfo(wire)
            bound = (n + 2) * (info.eps / 2 * _mean(gradient.abs()) + info.smallest_normal * info.eps)
        if not bool(((reduced.double() - _mean(gradient)).abs() <= bound).all()):
            return f"gradient {parameter} is not the mean over the ranks"
        if not is_equal_everywhere(reduced):
            return f"gradient {parameter} differs between ranks"
    return None


def complaint_about_feedback(
    local: Sequence[Tensor],
    old: Sequence[Tensor],
    result: Sequence[Tensor],
    new: Sequence[Tensor],
    state: object = None,
) -> str | None:
    """Check the step of a hook with error feedback; a complaint, or None. A collective call.

    - Nothing is lost: gradient + old error == result + new error in the mean over the ranks; uncompressed gradients
      have no error on any rank. M = g + e and e' = M - result are rounded once each, to half a unit of |M| and |e'|,
      sums over n ranks n - 1 times. A quantized all-reduce has two errors per element, which may cancel each other, so
      its bound is relative to the largest element of the gradient; and it adds once more. PowerSGD's error is of the
      rank's own factors, whose sum is rounded in their dtype; times unit columns, to the norm of a row or column of M.
    - The result is a projection or a rounding of the mean of M, so it is closer to it than zero is.
    """
    unit = torch.finfo(torch.float32).eps
    for parameter, tensors in enumerate(zip(local, old, result, new, strict=True)):
        gradient, before, reduced, after = (tensor.double() for tensor in tensors)
        compensated = gradient + before
        mean = _mean(compensated)
        lost = (mean - (reduced + _mean(after))).abs()
        bound = dist.get_world_size() * unit * _mean(compensated.abs() + after.abs())
        if isinstance(state, QuantizationState):
            bound = bound.max() * (1 + 1 / dist.get_world_size())
        if isinstance(state, PowerSGDState) and compensated.dim() > 1:
            squares = compensated.flatten(1).square()
            norms = (squares.sum(0).sqrt() + squares.sum(1, keepdim=True).sqrt()).view_as(compensated)
            dtype = torch.bfloat16 if tensors[0].dtype.itemsize == 2 else torch.float32
            of_factors = torch.finfo(state.options.factor_dtype or dtype).eps
            bound += dist.get_world_size() * (of_factors + 4 * unit) * _mean(norms)
        if not bool((lost <= bound).all()):
            return f"part of gradient {parameter} is lost: gradient + old error != result + new error"
        if not bool((mean - reduced).norm() < mean.norm()):
            return f"the result for gradient {parameter} is no approximation of the mean"
        if not is_equal_everywhere(tensors[2]):
            return f"gradient {parameter} differs between ranks"
    return None


def _mean(tensor: Tensor) -> Tensor:
    """The mean over all ranks, in float64."""
    total = tensor.double()
    total = total.clone() if total is tensor else total
    dist.all_reduce(total)
    return total / dist.get_world_size()


def is_equal_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks hold the same bits of a float32 tensor. A collective call."""
    bits = tensor.contiguous().view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)
