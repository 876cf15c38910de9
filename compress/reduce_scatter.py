"""Quantized reduce-scatter, with error feedback.

On each of n ranks, with the error memory E from the step before:

    M = G + E,   m = Q(M),   E <- M - m             quantize; one scale for each block
    all-to-all: rank j gets the j-th shard of every m
    S = scale * sum of the n shards                 in fp32

The sum stays on its rank, so it is not quantized again. A rank sends (n - 1) / n of the message. E has the size of G, n
times that of S. If a gradient is inf or NaN on any rank, its block of S becomes NaN, and no rank changes its E: each
rank tells all others in the headers of its cells.

Source: Wang et al., "ZeRO++", arXiv:2306.10209, section 3.3 (block-wise quantization, all-to-all).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.executor import Executor, Task, Workspace
from gradwire.comm.transport import Transport
from gradwire.compress.quantization import Quantization
from gradwire.compress.step import NOT_CARRIED, Stamp, set_counter
from gradwire.kernels import BlockTable, MessageLayout, Rounding, Section, WireFormat, bound_quantization, random_key


async def quantized_reduce_scatter(
    bucket: ScatterBucket,
    gradients: Tensor,
    output: Tensor,
    scale: float,
    iteration: int,
    transport: Transport,
    workspace: Workspace,
    stamp: Stamp = NOT_CARRIED,
) -> None:
    """Write this rank's shard of ``scale`` times the sum of ``gradients`` over all ranks into ``output``, a 1-D shard.

    Args:
        bucket: wire formats and error memory, built for this transport. Its errors are modified.
        gradients: 1-D, real, n shards one after the other. Not modified.
        iteration: number of the step, equal on all ranks.
        stamp: the number that messages carry.

    Raises:
        RuntimeError: the messages of other ranks have another stamp.
    """
    layout, errors = bucket.message_layout, bucket.errors
    message, received, *sums = workspace.wires(*bucket.wires)
    message, received = message.view(layout.message_shape), received.view(layout.message_shape)
    pending = sums.pop() if errors is not None else None
    rounding = Rounding(set_counter(bucket.counter, iteration), transport.rank)
    kept_errors, next_errors = bucket.by_section(errors), bucket.by_section(pending)
    for tensors, section, kept, after in zip(
        bucket.segments(gradients), layout.sections, kept_errors, next_errors, strict=True
    ):
        if section.table.n_blocks > 0:
            bucket.kernels.quantize(tensors, section, message, 1.0, kept, after, rounding)
    if errors is not None:
        bucket.raise_flag(message)
    stamp.write(message)
    await transport.all_to_all(received, message)
    stamp.check(received, transport.ranks)
    for total, section in zip(sums, layout.sections, strict=True):
        if section.table.n_blocks > 0:
            bucket.kernels.sum_quantized(received, section, total, transport.rank)
        bucket.copy_shard(section, total.mul_(scale), output)
    if errors is not None and pending is not None:
        bucket.kernels.commit_errors(received, pending, errors)


def start_reduce_scatter(
    bucket: ScatterBucket,
    gradients: Tensor,
    output: Tensor,
    scale: float,
    iteration: int,
    executor: Executor,
    stamp: Stamp = NOT_CARRIED,
) -> Future[Any]:
    """Submit `quantized_reduce_scatter` to an executor. Returns the future of ``output``."""
    transport = executor.transport
    return executor.submit(
        Task(
            lambda workspace: quantized_reduce_scatter(
                bucket, gradients, output, scale, iteration, transport, workspace, stamp
            ),
            "gradwire::reduce-scatter",
            output,
        )
    )


class ScatterBucket:
    """The gradients of a reduce-scatter: where they lie in the flat tensor and in a message, and their error memory.

    Neighbors of one wire format share blocks. Cell i of a message has the blocks of rank i's shard.

    Args:
        lengths: number of elements of each parameter in a shard, padding included.
        formats: wire format of each parameter.
        dtype, device: those of the flat tensor.

    Attributes:
        errors: the error memory, flat; None without error feedback. Updated in place.
        message_layout: position of each block in a message.
        counter: int64 [1], on the device: number of the current step, for the random numbers.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        formats: Sequence[WireFormat],
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport,
        options: Quantization,
    ) -> None:
        self.world_size, self.shard_numel = transport.world_size, sum(lengths)
        self.kernels = bound_quantization(device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._runs: dict[WireFormat, list[tuple[int, int]]] = {}  # start and stop in a shard
        self._positions: dict[str, tuple[int, int, int]] = {}  # section, start in a shard's blocks of it, and length
        at, block_size, latest = 0, options.block_size, None
        for name, length, wire in zip(names, lengths, formats, strict=True):
            runs = self._runs.setdefault(wire, [])
            start = runs.pop()[0] if wire == latest else at
            before = sum(-(-(stop - first) // block_size) for first, stop in runs) * block_size
            self._positions[name] = list(self._runs).index(wire), before + at - start, length
            runs.append((start, at + length))
            at, latest = at + length, wire
        flat = torch.empty(self.world_size * self.shard_numel, dtype=dtype, device=device)
        groups = []
        for (wire, runs), tensors in zip(self._runs.items(), self.segments(flat), strict=True):
            places = [(rank, start) for rank in range(self.world_size) for start, _ in runs]
            keys = [random_key(options.seed, f"{names[0]}, {start} of shard {rank}") for rank, start in places]
            groups.append((wire, BlockTable(tensors, block_size, keys)))
        self.message_layout = MessageLayout(groups, self.world_size)
        self._sizes = [section.table.numel for section in self.message_layout.sections]
        self.errors: Tensor | None = None
        if options.error_dtype is not None:
            self.errors = torch.zeros(sum(self._sizes), dtype=options.error_dtype, device=device)

    @property
    def message_bytes(self) -> int:
        """Size of a message: the cells of all ranks, this one's included."""
        return prod(self.message_layout.message_shape)

    @cached_property
    def wires(self) -> list[tuple[int, torch.dtype]]:
        """Number of elements and dtype of the buffers of a step."""
        layout = self.message_layout
        sizes = [(self.message_bytes, torch.uint8)] * 2
        sizes += [(layout.shard_numel(section), torch.float32) for section in layout.sections]
        if self.errors is not None:
            sizes.append((self.errors.numel(), self.errors.dtype))
        return sizes

    def segments(self, flat: Tensor) -> list[list[Tensor]]:
        """For each section, views of a flat tensor: the section's runs of the first shard, then of the second, ..."""
        shards = flat.view(self.world_size, -1)
        return [[shard[start:stop] for shard in shards for start, stop in runs] for runs in self._runs.values()]

    def copy_shard(self, section: Section, blocks: Tensor, shard: Tensor) -> None:
        """Copy one shard's blocks of a section to the places of their elements in the shard."""
        runs = self._runs[section.format]
        numels = [count * section.table.block_size for count in section.table.block_counts[: len(runs)]]
        for (start, stop), values in zip(runs, blocks.split(numels), strict=True):
            shard[start:stop] = values[: stop - start]

    def by_section(self, errors: Tensor | None) -> Sequence[Tensor | None]:
        """Views of the errors of each section; None without error feedback."""
        return [None] * len(self._sizes) if errors is None else errors.split(self._sizes)

    def errors_by_name(self) -> dict[str, Tensor]:
        """Views of the errors of each parameter: [n, elements in a shard]."""
        if self.errors is None:
            return {}
        rows = [part.view(self.world_size, -1) for part in self.errors.split(self._sizes)]
        return {name: rows[i][:, start : start + length] for name, (i, start, length) in self._positions.items()}

    def raise_flag(self, message: Tensor) -> None:
        """Tell all ranks, in the headers of their cells, whether this rank's contribution is finite."""
        finite = []
        for section in self.message_layout.sections:
            finite.append(section.format.is_finite(*section.views(message[0])))
        message[0, :, :4].view(torch.int32).copy_(~torch.stack(finite).all())
