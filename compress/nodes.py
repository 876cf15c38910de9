"""Quantized all-reduce on nodes of several ranks: few bytes between nodes, full precision inside them.

With G ranks on each of K nodes, and E and E2 as in `gradwire.compress.quantization`, but 1 / G as large:

    reduce-scatter inside the node: rank g gets its shard, 1 / G of the bucket, of the node's sum in fp32
    quantized all-reduce of the shard among the ranks g of all nodes, up to its codes
    all-gather of the codes inside the node: every rank gets those of the whole bucket, and decodes them

With b bytes per element of a message, a node sends 2 b (K - 1) / K bytes per element to other nodes. The two shots
among all W = G K ranks send G b (K - 1) / K + b (W - 1) / W, because every rank sends its own gradients; a ring
all-reduce in 16 bits, which adds up inside the nodes, sends 4 (W - 1) / W.

Source: Wang et al., "ZeRO++", arXiv:2306.10209, section 3.3, which quantizes inside the nodes, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gradwire.comm.transport import Transport
from gradwire.compress.memory import BucketMemory, names_or_numbers
from gradwire.compress.quantization import (
    Quantization,
    QuantizedBucket,
    earlier_errors,
    full_format,
    sections_by_format,
)
from gradwire.compress.step import Step
from gradwire.kernels import MessageLayout, SegmentTable, WireFormat


async def quantized_all_reduce_on_nodes(step: Step) -> None:
    """Write the mean of the gradients over all ranks into the results, quantized between nodes.

    Args:
        step: its memory is a `NodeBucket`, whose errors are modified. Its transport is that of all ranks, for which the
            bucket was built.
    """
    bucket: NodeBucket = step.memory
    source, target = step.gradients, step.results
    shard, shape = bucket.shard, bucket.inside.message_shape
    message, received, gathered, *buffers = step.workspace.wires(*bucket.wires, *shard.wires)
    sums, buffers = buffers[: len(bucket.members)], buffers[len(bucket.members) :]
    message, received = message.view(shape), received.view(shape)
    gathered = gathered.view(bucket.message_layout.message_shape)
    # Reduce-scatter inside the node, in the gradients' dtype with sums in fp32. It loses nothing, so it needs no error
    # memory.
    kernels = shard.kernels
    for members, section in zip(bucket.members, bucket.inside.sections, strict=True):
        if section.table.n_blocks > 0:
            kernels.quantize([source[i] for i in members], section, message, 1.0, None, None, None)
    step.stamp.write(message)
    await bucket.within.all_to_all(received, message)
    step.stamp.check(received, bucket.within.ranks)
    for total, section in zip(sums, bucket.inside.sections, strict=True):
        if section.table.n_blocks > 0:
            kernels.sum_quantized(received, section, total, bucket.within.rank)
    # Between nodes, up to the codes.
    if bucket.inherited is not None:
        await bucket.hand_over(bucket.inherited)
    tensors = shard.start_step(sums, sums, step.iteration, buffers)
    tensors.quantize(step.factor, step.stamp)
    await bucket.between.all_to_all(tensors.received, tensors.message)
    tensors.reduce(bucket.between, step.stamp)
    await bucket.between.all_gather(tensors.message, tensors.result)
    # All-gather inside the node.
    await bucket.within.all_gather(gathered.view(1, bucket.within.world_size, -1), tensors.message.view(1, -1))
    for members, section in zip(bucket.members, bucket.message_layout.sections, strict=True):
        if section.table.n_blocks > 0:
            kernels.dequantize(gathered, section, [target[i] for i in members])
    if tensors.pending is not None:
        kernels.commit_errors(gathered, tensors.pending, shard.errors)
    bucket.inherited = None


class NodeBucket(BucketMemory):
    """One bucket on nodes of several ranks: its shards, and the errors of this rank's shard; `all_reduce` averages it.

    Every section of the bucket, the gradients of one wire format, is cut into G equal numbers of blocks. The arguments
    are those of `QuantizedBucket`, with ``options.local_size`` for G.

    Attributes:
        within: the two shots inside this rank's node.
        between: the two shots among the ranks with this rank's place on each node.
        members: the positions of the gradients of each section.
        layout: position of each gradient in a flat buffer of the bucket.
        inside: position of each block of the gradients in the message inside the node: a cell for each shard.
        message_layout: position of each block in the codes of all shards.
        shard: this rank's shard, one tensor for each section.
        memory: empty: errors are in the shard.
        inherited: errors by parameter name that the next step hands over to the ranks in whose shards they lie.
    """

    all_reduce = staticmethod(quantized_all_reduce_on_nodes)

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
        names = names_or_numbers(names, layouts)
        n_local, device = options.local_size, layouts[0].device
        self.within, self.between = transport.within_node(n_local), transport.between_nodes(n_local)
        n_nodes = self.between.world_size
        super().__init__(SegmentTable(layouts), {"errors": {}})
        self.members, groups = sections_by_format(layouts, formats, names, options)
        pieces = self.between.pieces(n_nodes * MessageLayout(groups, n_nodes, n_local).cell_bytes)
        self.message_layout = MessageLayout(groups, n_nodes, n_local * pieces)
        in_full = [(full_format(table.dtype), table) for _, table in groups]
        self.inside = MessageLayout(in_full, n_local, multiple=n_nodes * pieces)
        self._numels = [self.inside.shard_numel(section) for section in self.inside.sections]
        shards = [torch.empty(numel, dtype=torch.float32, device=device) for numel in self._numels]
        shard_names = [f"shard {self.within.rank} of {wire.name}: {' '.join(names)}" for wire, _ in groups]
        shard_formats = [wire for wire, _ in groups]
        self.shard = QuantizedBucket(
            shards, shard_formats, self.between, options, names=shard_names, iteration=iteration
        )
        assert self.shard.message_layout.cell_bytes == self.message_layout.cell_bytes
        self.names, self.errors = names, self.shard.errors
        if self.errors is not None:
            self.inherited = earlier_errors(memory, names, layouts)

    @cached_property
    def wires(self) -> list[tuple[int, torch.dtype]]:
        """Number of elements and dtype of the buffers of a step, without those of the shard."""
        shapes = (self.inside.message_shape, self.inside.message_shape, self.message_layout.message_shape)
        messages = [(prod(shape), torch.uint8) for shape in shapes]
        return messages + [(numel, torch.float32) for numel in self._numels]

    async def hand_over(self, errors: Mapping[str, Tensor]) -> None:
        """Give errors of earlier buckets to the ranks of the node in whose shards they lie. A collective call."""
        n_local, parts = self.within.world_size, []
        for members, section in zip(self.members, self.inside.sections, strict=True):
            part = torch.zeros(n_local * section.blocks_per_cell * section.table.block_size, device=self.layout.device)
            for i, view in zip(members, section.table.error_views(part), strict=True):
                if self.names[i] in errors:
                    view.copy_(errors[self.names[i]])
            parts.append(part.view(n_local, -1))
        sent = torch.cat(parts, 1)
        received = torch.empty_like(sent)
        await self.within.all_to_all(received.view(torch.uint8)[None], sent.view(torch.uint8)[None])
        assert self.shard.errors is not None
        self.shard.errors.zero_()[: received.shape[1]].copy_(received.sum(0))

    def folded(self) -> dict[str, dict[str, Tensor]]:
        """This rank's "errors" by parameter name: copies, in the gradients' shapes and fp32, 0 outside of its shard.

        Summed over the ranks, they are what earlier steps have not applied yet.
        """
        if self.inherited is not None:
            return {"errors": {name: each.to(torch.float32, copy=True) for name, each in self.inherited.items()}}
        if self.errors is None:
            return {"errors": {}}
        found: dict[str, Tensor] = {}
        for members, section, shard in zip(
            self.members, self.inside.sections, self.shard.folded()["errors"].values(), strict=True
        ):
            first, last = section.cell_blocks(self.within.rank)
            block_size = section.table.block_size
            flat = torch.zeros(section.table.numel, device=shard.device)
            flat[first * block_size : last * block_size] = shard[: (last - first) * block_size]
            found |= {self.names[i]: view for i, view in zip(members, section.table.error_views(flat), strict=True)}
        return {"errors": found}

    def take_back(self, name: str, error: Tensor) -> bool:
        """Add to this rank's errors of a parameter; the next step hands over all errors of the bucket anew."""
        if self.errors is None:
            return False
        if self.inherited is None:
            self.inherited = self.folded()["errors"]
        self.inherited[name] = self.inherited[name] + error if name in self.inherited else error.clone()
        return True
