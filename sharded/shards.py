"""`CastReduceScatter`: FSDP2's reduce-scatter with a 16-bit wire and sums in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Workspace, connections_of
from gradwire.comm.transport import wait_for
from gradwire.hooks._handshake import compare_settings
from gradwire.kernels import SegmentTable, flatten
from gradwire.sharded.exchange import ShardedExchange

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CastReduceScatter:
    """A reduce-scatter that sends 16 bits per element, and sums them in fp32.

    Every rank casts its gradients, and sends each rank the shard that this one keeps. Elements beyond the range of the
    wire saturate; inf and NaN pass through. NCCL and gloo sum in the dtype of the tensor instead, and round each sum.

    Args:
        native: the reduce-scatter that it replaces, which allocates the tensors.
        wire: "bf16" or "fp16".
        exchange: shared by all parameter groups of a model.
    """

    def __init__(self, native: Any, wire: str, exchange: ShardedExchange) -> None:
        self.native = native
        self._wire = WIRES[wire]
        self._exchange = exchange
        self._tables: dict[tuple[int, torch.dtype], SegmentTable] = {}
        self._agreed: set[tuple[dist.ProcessGroup, int]] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor as the native reduce-scatter does."""
        allocated: Tensor = self.native.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's shard of the reduced ``input_tensor`` into ``output_tensor``.

        Args:
            output_tensor: 1-D, a shard. Overwritten.
            input_tensor: 1-D, the gradients of this rank, one shard after the other.
            group: the ranks of a replica.
            op: AVG, SUM or PREMUL_SUM.
            async_op: ignored: the result is there, or follows on the current stream.
        """
        scale = _scale(op, group.size())
        self._exchange.begin()
        if scale is None:
            done: dist.Work | None = self.native(output_tensor, input_tensor, group, op, async_op)
            return done
        self._exchange.attempt(group, lambda: self._reduce(output_tensor, input_tensor, group, scale))
        return None

    def _reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        connections = connections_of(group)
        if (group, connections.generation) not in self._agreed:
            compare_settings(group, {"hook": "attach", "within": str(self._wire)})
            self._agreed.add((group, connections.generation))
        executor = connections.executor(gradients.device)
        key = (gradients.numel(), gradients.dtype)
        if key not in self._tables:
            self._tables[key] = SegmentTable([gradients])
        table = self._tables[key]
        n = group.size()

        async def reduce_scatter(workspace: Workspace) -> None:
            sent, received = workspace.wires((gradients.numel(), self._wire), (gradients.numel(), self._wire))
            flatten([gradients], sent, table=table)
            cells = (1, n, -1)
            await executor.transport.all_to_all(
                received.view(torch.uint8).view(cells), sent.view(torch.uint8).view(cells)
            )
            total = received.view(n, -1).sum(0, dtype=torch.float32)
            output.copy_(total.mul_(scale))

        future = executor.submit(reduce_scatter, "gradwire::reduce-scatter")
        connections.finish()
        wait_for(future, connections.check_peers)


def _scale(op: Any, size: int) -> float | None:
    """The multiplier of the sum; None for another reduction."""
    if op == dist.ReduceOp.AVG:
        return 1 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    return float(op.factor) if getattr(op, "op", None) == dist.ReduceOp.PREMUL_SUM else None
