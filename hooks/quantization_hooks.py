"""Quantized all-reduce, with the names of ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``, and more.

`quantization_hook` is gradwire's own: 1.25 to 16 bits per element, with or without error feedback. The two hooks with
PyTorch's names send 8 bits per element, without error feedback. PyTorch's hooks send every rank's whole bucket to every
other rank. gradwire's send as many bytes as a ring all-reduce of the quantized bucket, with a scale per block of
elements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Transport
from gradwire.compress import NodeBucket, QuantizedBucket, WirePolicy
from gradwire.compress.memory import MemoryByName
from gradwire.compress.policy import DEFAULT_EXEMPT, check_block_size
from gradwire.exchange.bucket import GradBucket
from gradwire.exchange.decorators import ddp_hook, replayable
from gradwire.exchange.hook_state import HookState, Memory, hook_for
from gradwire.exchange.memory import ERRORS
from gradwire.exchange.reduction import bucket_kind, check_local_size, quantized, quantized_reduction, ranks_on_node
from gradwire.exchange.settings import settings_of
from gradwire.kernels import as_real, layout_in_dtype
from gradwire.validation import check_keywords, check_whole_number

__all__ = ["QuantizationState", "quantization_hook", "quantization_perchannel_hook", "quantization_pertensor_hook"]


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(WirePolicy):
    """The options of `QuantizationState`, documented there."""

    start_iter: int = 2
    local_size: int | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("start_iter", self.start_iter, "a whole number of steps, at least 0", 0)
        check_local_size(self.local_size)


class QuantizationState(HookState):
    """Options and error memory of `quantization_hook`, for one model.

    Args:
        process_group: the ranks to average over; None for the model's.
        wire: wire format of the gradients, one of the table in docs/quantization.md. Start with "int4":
            7.5 times fewer bytes than fp32. "int8" affects accuracy least. "int8" and "int6" are stateless: by
            default, they have no error feedback. Formats of fewer bits than int4 take more steps. "bf16" and "fp16"
            halve the bytes and sum in fp32.
        block_size: elements that share a scale, a power of two from 32 to 1024. Smaller blocks are
            more accurate but send more scales of 2 bytes each: 64 adds 0.25 bits per element. 256 is
            enough for int8.
        use_error_feedback: whether to add the rounding error to the next gradient. Keep it on below
            6 bits. The residuals take 1 + 1 / world size values of ``error_dtype`` per element. None: True,
            unless the format of the fewest bits, of ``wire`` and ``wires``, is int8 or int6. If ``options`` are
            replaced, None follows the new formats.
        start_iter: steps of plain all-reduce before the first quantized step. The default suffices
            for most models.
        exempt: `fnmatch` patterns of parameters to send in 16 bits, or in a ``wire`` of 16 or 32; by default
            ``("*.bias", "*norm*")``. Parameters with fewer than two dimensions are also exempt, unless a
            pattern in ``wires`` matches them: they are small and sensitive to rounding.
        wires: wire format by name pattern, instead of ``wire``. The first match wins, and takes
            precedence over ``exempt``. For layers that need more accuracy than others, such as
            ``{"*.embedding.weight": "int8", "head.*": "bf16"}``. "fp32" sends a parameter
            uncompressed.
        error_dtype: torch.float32, or torch.bfloat16, which halves the error memory and is rounded
            stochastically, without bias.
        seed: seed of the random numbers for ``error_dtype=torch.bfloat16``, equal on all ranks.
        local_size: number of ranks on each node. Ranks of a node add up their gradients in fp32, and only the sums are
            quantized and sent to other nodes; the error memory is 1 / ``local_size`` as large. "auto" finds nodes by
            their host names; if nodes differ in size, or ranks of a node are not consecutive, it is 1. 1 quantizes
            every rank's gradients: with one rank per node, or one node, that is the same.

    Attributes:
        iter: number of steps so far.
        options: all options, in a frozen dataclass. To change them between steps, equally on all ranks, assign
            ``dataclasses.replace(state.options, wire="int8")``.

    Raises:
        ValueError: an option has the wrong type or is out of range.

    Examples:
        >>> state = QuantizationState(process_group, wire="int4")
        >>> model.register_comm_hook(state, quantization_hook)
    """

    compiles_early = True
    options: QuantizationOptions

    @check_keywords
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        wire: str = "int4",
        *,
        block_size: int = 64,
        use_error_feedback: bool | None = None,
        start_iter: int = 2,
        exempt: Sequence[str] = DEFAULT_EXEMPT,
        wires: Mapping[str, str] | None = None,
        error_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        local_size: int | str = "auto",
    ) -> None:
        if isinstance(exempt, list):
            exempt = tuple(exempt)
        wires = {} if wires is None else wires
        values = locals()
        options = QuantizationOptions(**{each.name: values[each.name] for each in fields(QuantizationOptions)})
        memory = {ERRORS: Memory(merge="sum", dtype=torch.float32)}
        super().__init__("quantization_hook", process_group, options, memory)

    def _needs_names(self) -> str | None:
        has_patterns = bool(self.options.wires) or self.options.exempt != DEFAULT_EXEMPT
        return "A pattern in wires or exempt" if has_patterns else None

    def make_bucket(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        names: Sequence[str],
        transport: Transport,
        earlier: MemoryByName,
    ) -> QuantizedBucket | NodeBucket:
        """A new bucket; see `HookState.make_bucket`."""
        quantization = self.options.quantization(ranks_on_node(self.options.local_size, transport))
        return bucket_kind(quantization)(
            [layout_in_dtype(as_real(parameter), dtype) for parameter in parameters],
            self.options.wire_formats(parameters, names),
            transport,
            quantization,
            names=names,
            memory=earlier,
            iteration=self.iter,
        )

    def _keeps(self, entry: str) -> bool:
        """Every parameter has errors, unless error feedback is off."""
        return self.options.keeps_errors


PER_TENSOR_BLOCK_SIZE = 1024  # the largest: PyTorch's hook has one scale for the whole bucket


@replayable
@hook_for(QuantizationState)
def quantization_hook(state: QuantizationState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 1.25 to 16 bits per element: Q(sum of Q(G / n + E) + E2).

    Q quantizes, n is the number of ranks, and E and E2 are the error memories of the two shots.

    Blocks of ``block_size`` elements share a scale. Every rank quantizes its gradients and sends each
    rank one shard. It sums the shards that it receives in fp32, quantizes the sum, and sends it to all
    ranks. Sums do not overflow, and the rounding error does not grow with the world size.

    Steps before ``start_iter`` are bitwise equal to the plain all-reduce. If a gradient is inf or
    NaN on any rank, its block becomes NaN on all ranks, so that a gradient scaler skips the step,
    and the errors of its bucket do not change. Sparse gradients are sent uncompressed. Gradients
    may be fp32, fp16, bf16, fp64 or complex (as real pairs); arithmetic is in fp32.

    Args:
        state: options and errors. Modified.
        bucket: the gradients. Overwritten with their mean.

    Raises:
        ValueError: the state belongs to another model, or a pattern in ``wires`` matches no parameter.
    """
    return state.run(bucket, quantized)


@replayable
@ddp_hook(dist.ProcessGroup)
def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 8 bits, with one scale per 1024 elements, without error feedback.

    A replacement for PyTorch's hook of this name, which has one scale and one zero point per bucket.
    New code should use `quantization_hook`, which is more accurate and has more formats.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: the gradients. Overwritten with their mean.

    Examples:
        >>> model.register_comm_hook(process_group, quantization_pertensor_hook)
    """
    settings = settings_of("quantization_pertensor_hook")
    return quantized_reduction(process_group, bucket, "int8", PER_TENSOR_BLOCK_SIZE, "auto", settings)


@replayable
@ddp_hook(dist.ProcessGroup)
def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce the mean of the gradients in 8 bits, with one scale per block, without error feedback.

    A replacement for PyTorch's hook of this name, which raises an IndexError on gloo before PyTorch 2.15. New
    code should use `quantization_hook`: it is more accurate, in as many bytes or fewer.

    Args:
        process_group: the ranks to average over; None for the model's.
        bucket: the gradients. Overwritten with their mean.
        bucket_size: elements that share a scale, a power of two from 32 to 1024; equal on all ranks.

    Raises:
        ValueError: ``bucket_size`` is not such a power of two.

    Examples:
        >>> model.register_comm_hook(process_group, quantization_perchannel_hook)
    """
    check_block_size("bucket_size", bucket_size)
    settings = settings_of(f"quantization_perchannel_hook, {bucket_size}")
    return quantized_reduction(process_group, bucket, "int8", bucket_size, "auto", settings)
