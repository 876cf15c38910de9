"""Quantized all-reduce in two shots, with error feedback for both.

On each of n ranks, with the error memories E and E2 from the step before:

    M = G / n + E,   m = Q(M),   E <- M - m             quantize; one scale for each block
    all-to-all: rank j gets the j-th shard of every m
    S = sum of the n shards + E2,   s = Q(S),   E2 <- S - s       in fp32, in rank order
    all-gather: every rank gets every s
    G = s                                               the mean

All ranks decode the same bytes, so the results are bitwise equal. Each rank sends 2 (n - 1) / n times the message, as
in a ring all-reduce of elements of that width; but sums are in fp32, so they neither overflow nor lose precision as the
number of ranks grows. If a gradient of the bucket is inf or NaN on any rank, its block becomes NaN on all ranks, and
E and E2 stay as they were on all.

Sources: Tang, Lian, Yu, Zhang, Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
Error-Compensated Compression", ICML 2019, algorithm 1; Wang et al., "ZeRO++", arXiv:2306.10209, section 3.3
(block-wise quantization, all-to-all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.transport import Transport
from gradwire.compress.memory import BucketMemory, names_or_numbers
from gradwire.compress.step import Stamp, Step, repeatable, set_counter
from gradwire.kernels import (
    WIRE_FORMATS,
    BlockTable,
    FactorLayout,
    MessageLayout,
    QuantizationKernels,
    Rounding,
    Section,
    SegmentTable,
    WireFormat,
    bound_quantization,
    random_key,
    use_triton,
)
from gradwire.validation import check_memory_shape

FACTOR_BLOCK_SIZE = 64  # elements of a low-rank factor that share a scale
SECOND_SHOT_SALT = -1  # the first shot's salts are the ranks
_FULL = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def full_format(dtype: torch.dtype) -> WireFormat:
    """The wire format that holds gradients of a dtype exactly; for fp64, fp32."""
    return WIRE_FORMATS[_FULL.get(dtype, "fp32")]


@repeatable
async def quantized_all_reduce(step: Step) -> None:
    """Write the mean of the gradients over all ranks into the results, quantized on the way to the sum and back.

    Args:
        step: its memory is a `QuantizedBucket`, built for its transport. The errors of the bucket are modified.
    """
    bucket, transport = step.memory, step.transport
    tensors = bucket.start_step(step.gradients, step.results, step.iteration, step.workspace.wires(*bucket.wires))
    await two_shot_all_reduce(tensors, transport, step.factor, step.stamp)
    # Errors change last: only the gathered message tells whether a gradient was inf or NaN on any rank.
    if tensors.pending is not None:
        tensors.kernels.commit_errors(tensors.message, tensors.pending, bucket.errors)


async def two_shot_all_reduce(step: QuantizedStep, transport: Transport, scale: float, stamp: Stamp) -> None:
    """Write ``scale`` times the sums of the sources over all ranks into the targets. The next errors are pending."""
    # First shot (DoubleSqueeze, algorithm 1, worker). E joins before quantization, so the residual of earlier steps is
    # sent again. A rank sends each shard only to the rank that sums it: (n - 1) / n of one message (ZeRO++, 3.3).
    step.quantize(scale, stamp)
    await transport.all_to_all(step.received, step.message)
    # Second shot (algorithm 1, server; here every rank serves one shard). The sum is in rank order, not in order of
    # arrival, which would change its last bits. Quantizing it again has a residual of its own, E2.
    step.reduce(transport, stamp)
    await transport.all_gather(step.message, step.result)
    # A rank decodes its own shard from the message, too: its fp32 sum is more precise than the others' copies.
    step.dequantize()


class SectionTensors(NamedTuple):
    """One wire format's part of a step. Error tensors are None without error feedback."""

    section: Section  # the wire format, and the places of the blocks
    source: list[Tensor]  # the gradients
    target: list[Tensor]  # the tensors that receive the mean; may be ``source``
    errors: Tensor | None  # E, the error memory of the first shot, [blocks of the bucket * block size]
    pending: Tensor | None  # the next E, if the bucket is finite on all ranks
    shard_errors: Tensor | None  # E2, the error memory of the second shot, [blocks of this rank's cells * block size]
    shard_pending: Tensor | None  # the next E2, if the bucket is finite on all ranks


class QuantizedStep(NamedTuple):
    """The tensors of one bucket in one step: buffers in the workspace, valid until its next use."""

    kernels: QuantizationKernels
    sections: list[SectionTensors]  # one for each wire format that has blocks
    message: Tensor  # codes of all gradients, uint8 [pieces, n, cell bytes]; in the second shot, the gathered results
    received: Tensor  # this rank's cells of all ranks' messages, uint8 [pieces, n, cell bytes]
    result: Tensor  # codes of their sums, uint8 [pieces, cell bytes]
    pending: Tensor | None  # like `QuantizedBucket.errors`; None without error feedback
    first_rounding: Rounding
    second_rounding: Rounding

    def quantize(self, scale: float, stamp: Stamp) -> None:
        """Write ``scale`` times the sources into ``message``, quantized."""
        kernels, message = self.kernels, self.message
        cleared: Tensor | None = self.result
        for part in self.sections:
            errors, pending = part.errors, part.pending
            kernels.quantize(part.source, part.section, message, scale, errors, pending, self.first_rounding, cleared)
            cleared = None  # no non-finite sum so far
        stamp.write(message)

    def reduce(self, transport: Transport, stamp: Stamp) -> None:
        """Write the sums of ``received`` into ``result``, quantized; RuntimeError if ranks are in different steps."""
        received = self.received
        stamp.check(received, transport.ranks)
        rank, rounding = transport.rank, self.second_rounding
        for part in self.sections:
            errors, pending = part.shard_errors, part.shard_pending
            self.kernels.reduce_quantized(received, part.section, self.result, rank, errors, pending, rounding)

    def dequantize(self) -> None:
        """Write the numbers that the gathered ``message`` holds into the targets."""
        for part in self.sections:
            self.kernels.dequantize(self.message, part.section, part.target)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How blocks are quantized. See `gradwire.hooks.quantization_hooks.QuantizationState` for advice.

    Attributes:
        block_size: elements that share a scale: a power of two from 32 to 1024.
        error_dtype: dtype of the error memories, torch.float32 or torch.bfloat16; None: no error feedback.
        seed: seed of the random numbers that round an error memory in bf16, equal on all ranks.
        local_size: number of consecutive ranks that share a node, a divisor of the world size; see
            `gradwire.compress.nodes`. 1: the ranks are not on nodes, or their links inside a node do not matter.
    """

    block_size: int = 64
    error_dtype: torch.dtype | None = torch.float32
    seed: int = 0
    local_size: int = 1


def sections_by_format(
    layouts: Sequence[Tensor], formats: Sequence[WireFormat], names: Sequence[str], options: Quantization
) -> tuple[list[list[int]], list[tuple[WireFormat, BlockTable]]]:
    """The tensors of each wire format and dtype: their positions, and their blocks with the format."""
    members: dict[tuple[WireFormat, torch.dtype], list[int]] = {}
    for i, (wire, layout) in enumerate(zip(formats, layouts, strict=True)):
        members.setdefault((wire, layout.dtype), []).append(i)
    keys = [random_key(options.seed, name) for name in names]
    groups = [
        (wire, BlockTable([layouts[i] for i in at], options.block_size, [keys[i] for i in at]))
        for (wire, _), at in members.items()
    ]
    return list(members.values()), groups


def earlier_errors(
    memory: Mapping[str, Mapping[str, Tensor]] | None, names: Sequence[str], layouts: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The errors in ``memory`` of these parameters; raises ValueError if one has another shape than its gradient."""
    errors = memory["errors"] if memory is not None else {}
    found = {name: errors[name] for name in names if name in errors}
    for name, layout in zip(names, layouts, strict=True):
        if name in found:
            check_memory_shape("errors", name, found[name], layout.shape)
    return found


class QuantizedMessage:
    """The messages of a two-shot all-reduce of tensors: where the blocks of each tensor lie. See `QuantizedBucket`.

    Attributes:
        message_layout: position of each block in a message.
        errors: None: no error feedback.
        counter: int64 [1], in device memory: number of the current step, for the random numbers.
    """

    def __init__(
        self,
        layouts: Sequence[Tensor],
        formats: Sequence[WireFormat],
        transport: Transport,
        options: Quantization,
        names: Sequence[str] | None = None,
        iteration: int = 0,
    ) -> None:
        self.names = names_or_numbers(names, layouts)
        self._rank, self.kernels = transport.rank, bound_quantization(layouts[0].device)
        self.counter = torch.full((1,), iteration, dtype=torch.int64, device=layouts[0].device)
        self._roundings = Rounding(self.counter, self._rank), Rounding(self.counter, SECOND_SHOT_SALT)
        self._members, groups = sections_by_format(layouts, formats, self.names, options)
        # The transport chooses the number of pieces by the size of an unsplit message.
        whole = MessageLayout(groups, transport.world_size)
        pieces = transport.pieces(transport.world_size * whole.cell_bytes)
        self.message_layout = MessageLayout(groups, transport.world_size, pieces)
        sections = self.message_layout.sections
        self._sizes = [section.table.numel for section in sections]
        self._sizes += [self.message_layout.shard_numel(section) for section in sections]
        by_number = enumerate(zip(sections, self._members, strict=True))
        self._filled = [(k, section, members) for k, (section, members) in by_number if section.table.n_blocks > 0]
        self.errors: Tensor | None = None
        self._is_random = options.error_dtype == torch.bfloat16  # whether random numbers round the errors

    @cached_property
    def wires(self) -> list[tuple[int, torch.dtype]]:
        """Number of elements and dtype of the buffers of a step."""
        layout = self.message_layout
        numel = layout.n_cells * layout.cell_bytes
        sizes = [(numel, torch.uint8), (numel, torch.uint8), (layout.pieces * layout.cell_bytes, torch.uint8)]
        if self.errors is not None:
            sizes.append((self.errors.numel(), self.errors.dtype))
        return sizes

    def start_step(
        self, source: Sequence[Tensor], target: Sequence[Tensor], iteration: int, buffers: Sequence[Tensor]
    ) -> QuantizedStep:
        """Set ``counter``, and lay out the tensors of a step: real ones, ``target`` may be ``source``.

        ``buffers`` is memory for the step, as ``wires`` describes it. Overwritten.
        """
        if self._is_random:
            set_counter(self.counter, iteration)
        layout = self.message_layout
        # ``message`` serves twice: it is sent in the first shot, and gathered in the second.
        message, received, result = buffers[:3]
        result = result.view(layout.result_shape)
        pending = buffers[3] if self.errors is not None else None
        n = len(layout.sections)
        errors = self.errors.split(self._sizes) if self.errors is not None else [None] * 2 * n
        after = pending.split(self._sizes) if pending is not None else errors
        sections = []
        for k, section, members in self._filled:
            own, results = list(map(source.__getitem__, members)), list(map(target.__getitem__, members))
            sections.append(SectionTensors(section, own, results, errors[k], after[k], errors[n + k], after[n + k]))
        message, received = message.view(layout.message_shape), received.view(layout.message_shape)
        return QuantizedStep(self.kernels, sections, message, received, result, pending, *self._roundings)


class QuantizedFactors(QuantizedMessage):
    """The message of the low-rank factors of one side, P or Q, and of gradients that are sent with them.

    Each factor starts a block, so that its rounding does not depend on its neighbors in the bucket. Kernels read the
    addresses of the tensors on the device, so these are not from a workspace: in a CUDA graph they must stay.

    Attributes:
        factors: the factors, packed; each is padded to whole blocks.
        others: the gradients, packed.
        residual: what the last exchange lost of this rank's factors, packed, and more elements. Over the ranks, it adds
            up to the factors' sum less that of the factors as received. None without ``has_residual``.
        tensors: each factor, and the gradients if there are any.
    """

    def __init__(
        self,
        side: FactorLayout,
        dtype: torch.dtype,
        wire: WireFormat,
        others: Tensor,
        transport: Transport,
        has_residual: bool,
    ) -> None:
        self.factors, self.others = torch.empty(side.numel, dtype=dtype, device=others.device), others
        self.tensors = side.views(self.factors)
        formats = [wire] * len(self.tensors)
        if others.numel() > 0:
            self.tensors.append(others)
            formats.append(full_format(others.dtype))
        options = Quantization(block_size=FACTOR_BLOCK_SIZE, error_dtype=None)
        super().__init__(self.tensors, formats, transport, options)
        self.residual: Tensor | None = None
        if has_residual:
            cell_numel = self.message_layout.sections[0].blocks_per_cell * FACTOR_BLOCK_SIZE
            self.residual = others.new_zeros(self.message_layout.n_cells * cell_numel, dtype=torch.float32)

    def start_exchange(self, buffers: Sequence[Tensor]) -> QuantizedStep:
        """Lay out an exchange of ``tensors`` in place; see `start_step`."""
        step = self.start_step(self.tensors, self.tensors, 0, buffers)
        if self.residual is not None:
            layout, factors = self.message_layout, step.sections[0]
            # The rank that sums a cell adds what its own first shot has lost there, so one residual serves both shots.
            own_cells = self.residual.view(layout.pieces, layout.world_size, -1)[:, self._rank]
            step.sections[0] = factors._replace(pending=self.residual, shard_errors=own_cells, shard_pending=own_cells)
        return step


class QuantizedBucket(QuantizedMessage, BucketMemory):
    """One bucket: where its gradients lie in a message, and the error memories. `all_reduce` is its algorithm.

    It serves every step until its parameters, their dtype, the ranks or the options change; the next bucket of these
    parameters starts from its `folded` errors.

    Args:
        layouts: real dense tensors with the shapes, strides, dtype and device of the gradients, or the gradients.
        formats: wire format of each gradient (`WirePolicy.wire_formats`).
        transport: the transport of its collectives; gives world size, rank and number of pieces.
        options: block size, error memory and rounding.
        names: parameter names, keys of ``memory`` and of the random numbers; by default "0", "1", ...
        memory: the "errors" of earlier buckets, by parameter name. Not modified.
        iteration: number of the current step, for the random numbers.

    Attributes:
        layout: position of each gradient in a flat buffer of the bucket.
        errors: the error memories of all sections: for the first shot, then for the second; None without error
            feedback. Updated in place.
        memory: the "errors" of the first shot, by parameter name: views of ``errors``.
    """

    all_reduce = staticmethod(quantized_all_reduce)

    def __init__(
        self,
        layouts: Sequence[Tensor],
        formats: Sequence[WireFormat],
        transport: Transport,
        options: Quantization,
        *,
        names: Sequence[str] | None = None,
        memory: Mapping[str, Mapping[str, Tensor]] | None = None,
        iteration: int = 0,
    ) -> None:
        super().__init__(layouts, formats, transport, options, names, iteration)
        errors: dict[str, Tensor] = {}
        if options.error_dtype is not None:
            self.errors = torch.zeros(sum(self._sizes), dtype=options.error_dtype, device=layouts[0].device)
            errors = self._by_name(self.errors)
            for name, error in earlier_errors(memory, self.names, layouts).items():
                errors[name].copy_(error)
        BucketMemory.__init__(self, SegmentTable(layouts), {"errors": errors})

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        """Whether kernels read addresses and the number of the step on the device; see `BucketMemory`."""
        return use_triton(self.counter.device)

    def refresh(self, source: Sequence[Tensor], target: Sequence[Tensor], iteration: int) -> None:
        """Replace ``counter`` and the addresses of gradients and results; see `BucketMemory.refresh`."""
        if self._is_random:
            set_counter(self.counter, iteration)
        for section, members in zip(self.message_layout.sections, self._members, strict=True):
            section.table.segments.packed(list(map(source.__getitem__, members)))
            if target is not source:
                section.table.segments.packed_results(list(map(target.__getitem__, members)))

    def folded(self) -> dict[str, dict[str, Tensor]]:
        """This rank's "errors" of both shots, by parameter name: copies, in the gradients' shapes and fp32.

        Summed over the ranks, they are what earlier steps have not applied yet. So a bucket with other cells, or on
        other ranks, that starts from them loses nothing.
        """
        if self.errors is None:
            return {"errors": {}}
        sections = self.message_layout.sections
        parts = self.errors.to(torch.float32, copy=True).split(self._sizes)
        for section, errors, shard_values in zip(sections, parts, parts[len(sections) :], strict=False):
            block_size = section.table.block_size
            for piece, cell in enumerate(shard_values.split(section.blocks_per_cell * block_size)):
                first, last = section.cell_blocks(piece * self.message_layout.world_size + self._rank)
                errors[first * block_size : last * block_size] += cell[: (last - first) * block_size]
        return {"errors": self._by_name(torch.cat(parts[: len(sections)]))}

    def _by_name(self, errors: Tensor) -> dict[str, Tensor]:
        """Views of the errors of the first shot, which begin the flat ``errors``, like the gradients, by name."""
        views: dict[str, Tensor] = {}
        sections = self.message_layout.sections
        section_errors = errors[: sum(section.table.numel for section in sections)].split(self._sizes[: len(sections)])
        for section, members, flat in zip(sections, self._members, section_errors, strict=True):
            views |= {self.names[i]: view for i, view in zip(members, section.table.error_views(flat), strict=True)}
        return views
