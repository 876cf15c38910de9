"""`QuantizedBucket`: the gradients of a bucket as blocks in a message, and the error memories of both shots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.compress._options import check_error_shape
from gradwire.kernels import (
    HEADER_BYTES,
    BlockTable,
    MessageLayout,
    Rounding,
    Section,
    SegmentTable,
    WireFormat,
    is_capturing,
    random_key,
)

SECOND_SHOT_SALT = -1  # the first shot's salts are the ranks


class Part(NamedTuple):
    """One section of a message, with its gradients and errors in one step.

    Attributes:
        section: the wire format, and the places of the blocks.
        source: the gradients.
        target: the tensors that receive the mean; may be ``source``.
        errors: E, the error memory of the first shot, [blocks of the bucket * block size]; None without error feedback.
        pending: what E becomes if the bucket is finite on all ranks.
        shard_errors: E2, the error memory of the second shot, [blocks of this rank's cells * block size].
        shard_pending: what E2 becomes if the bucket is finite on all ranks.
    """

    section: Section
    source: list[Tensor]
    target: list[Tensor]
    errors: Tensor | None
    pending: Tensor | None
    shard_errors: Tensor | None
    shard_pending: Tensor | None


class Step(NamedTuple):
    """The tensors of one bucket in one step: buffers in the workspace, valid until its next use.

    Attributes:
        parts: one for each wire format.
        message: the codes of all gradients, uint8 [pieces, n, cell bytes]; in the second shot, the gathered results.
        received: this rank's cells of all ranks' messages, uint8 [pieces, n, cell bytes].
        result: the codes of their sums, uint8 [pieces, cell bytes].
        pending: like `QuantizedBucket.errors`; None without error feedback.
        first_rounding: random numbers of the first shot, which differ between ranks.
        second_rounding: random numbers of the second shot.
    """

    parts: list[Part]
    message: Tensor
    received: Tensor
    result: Tensor
    pending: Tensor | None
    first_rounding: Rounding
    second_rounding: Rounding


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How blocks are quantized. See `gradwire.hooks.quantization_hooks.QuantizationState` for advice.

    Attributes:
        block_size: elements that share a scale: a power of two from 32 to 1024.
        error_dtype: dtype of the error memories, torch.float32 or torch.bfloat16; None: no error feedback.
        stochastic_rounding: whether to round to one of the two nearest codes at random.
        seed: seed of the random numbers, equal on all ranks.
    """

    block_size: int = 64
    error_dtype: torch.dtype | None = torch.float32
    stochastic_rounding: bool = False
    seed: int = 0


class QuantizedBucket:
    """One bucket: where its gradients lie in a message, and the error memories.

    It serves every step until its parameters, their dtype, the ranks or the options change; the next bucket of these
    parameters starts from its `folded_errors`.

    Args:
        layouts: real dense tensors with the shapes, strides, dtype and device of the gradients, or the gradients.
        formats: wire format of each gradient (`WirePolicy.wire_formats`).
        transport: its world size and rank, and how many pieces it sends.
        options: block size, error memory and rounding.
        names: parameter names, keys of ``memory`` and of the random numbers; by default "0", "1", ...
        memory: errors of earlier buckets, by parameter name. Not modified.
        iteration: number of the current step, for the random numbers.

    Attributes:
        layout: position of each gradient in a flat buffer of the bucket.
        message_layout: position of each block in a message.
        errors: the error memories of all sections: for the first shot, then for the second; None without error
            feedback. Updated in place.
        memory: the errors of the first shot, by parameter name: views of ``errors``.
        counter: int64 [1], in device memory: number of the current step, for the random numbers.
    """

    def __init__(
        self,
        layouts: Sequence[Tensor],
        formats: Sequence[WireFormat],
        transport: Transport,
        options: Quantization,
        *,
        names: Sequence[str] | None = None,
        memory: Mapping[str, Tensor] | None = None,
        iteration: int = 0,
    ) -> None:
        device = layouts[0].device
        names = names if names is not None else [str(i) for i in range(len(layouts))]
        self._rank, self._stochastic = transport.rank, options.stochastic_rounding
        self.layout = SegmentTable(layouts)
        self.counter = torch.full((1,), iteration, dtype=torch.int64, device=device)
        # The gradients of each section, in the order of the bucket.
        self._members = {wire: [i for i, each in enumerate(formats) if each == wire] for wire in dict.fromkeys(formats)}
        keys = [random_key(options.seed, name) for name in names]
        groups = [
            (wire, BlockTable([layouts[i] for i in of], options.block_size, [keys[i] for i in of]))
            for wire, of in self._members.items()
        ]
        whole = MessageLayout(groups, transport.world_size)
        pieces = transport.pieces(transport.world_size * whole.cell_bytes)
        self.message_layout = MessageLayout(groups, transport.world_size, pieces)
        sections = self.message_layout.sections
        self._sizes = [section.table.numel for section in sections]
        self._sizes += [self.message_layout.shard_numel(section) for section in sections]

        self.errors: Tensor | None = None
        self.memory: dict[str, Tensor] = {}
        if options.error_dtype is not None:
            self.errors = torch.zeros(sum(self._sizes), dtype=options.error_dtype, device=device)
            self.memory = self._by_name(self.errors, names)
            for name, error in self.memory.items():
                if memory is not None and name in memory:
                    check_error_shape(name, memory[name], error)
                    error.copy_(memory[name])
        self._names = names

    def fits(self, dtype: torch.dtype, transport: Transport) -> bool:
        """Whether the bucket serves gradients of this dtype and the ranks of this transport."""
        ranks = (self.message_layout.world_size, self._rank)
        return self.layout.dtype == dtype and ranks == (transport.world_size, transport.rank)

    def folded_errors(self) -> dict[str, Tensor]:
        """This rank's errors of both shots, by parameter name: copies, in the gradients' shapes and fp32.

        Summed over the ranks, they are what earlier steps have not applied yet. So a bucket with other cells, or on
        other ranks, that starts from them loses nothing.
        """
        if self.errors is None:
            return {}
        sections = self.message_layout.sections
        parts = self.errors.to(torch.float32, copy=True).split(self._sizes)
        for section, errors, of_shard in zip(sections, parts, parts[len(sections) :], strict=False):
            block_size = section.table.block_size
            for piece, cell in enumerate(of_shard.split(section.blocks_per_cell * block_size)):
                first, last = section.cell_blocks(piece * self.message_layout.world_size + self._rank)
                errors[first * block_size : last * block_size] += cell[: (last - first) * block_size]
        return self._by_name(torch.cat(parts[: len(sections)]), self._names)

    def start_step(
        self, source: Sequence[Tensor], target: Sequence[Tensor], iteration: int, workspace: Workspace
    ) -> Step:
        """Set ``counter``, and lay out the tensors of a step.

        Args:
            source: the gradients, real.
            target: where the mean goes; may be ``source``.
            iteration: the number of the step. Ignored while a CUDA graph is captured: every replay would set the same
                number.
            workspace: provides the buffers.
        """
        if not is_capturing(self.counter.device):
            self.counter.fill_(iteration)
        layout = self.message_layout
        numel = layout.n_cells * layout.cell_bytes
        sizes = [(numel, torch.uint8), (numel, torch.uint8), (layout.pieces * layout.cell_bytes, torch.uint8)]
        if self.errors is not None:
            sizes.append((self.errors.numel(), self.errors.dtype))
        message, received, result, *buffers = workspace.wires(*sizes)
        pending = buffers[0] if buffers else None
        result = result.view(layout.result_shape)
        result[:, :HEADER_BYTES].zero_()
        n = len(layout.sections)
        errors = self.errors.split(self._sizes) if self.errors is not None else [None] * 2 * n
        after = pending.split(self._sizes) if pending is not None else [None] * 2 * n
        parts = [
            Part(
                section,
                list(map(source.__getitem__, members)),
                list(map(target.__getitem__, members)),
                errors[k],
                after[k],
                errors[n + k],
                after[n + k],
            )
            for k, (section, members) in enumerate(zip(layout.sections, self._members.values(), strict=True))
        ]
        return Step(
            parts,
            message.view(layout.message_shape),
            received.view(layout.message_shape),
            result,
            pending,
            Rounding(self.counter, self._rank, self._stochastic),
            Rounding(self.counter, SECOND_SHOT_SALT, self._stochastic),
        )

    def _by_name(self, errors: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Views of the errors of the first shot in the gradients' shapes and strides, by parameter name.

        Args:
            errors: flat, beginning like `errors`.
            names: parameter names.
        """
        views: dict[str, Tensor] = {}
        sections = self.message_layout.sections
        of_sections = errors[: sum(section.table.numel for section in sections)].split(self._sizes[: len(sections)])
        for section, members, flat in zip(sections, self._members.values(), of_sections, strict=True):
            views |= {names[i]: view for i, view in zip(members, section.table.error_views(flat), strict=True)}
        return views
