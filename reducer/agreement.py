"""How ranks come to have the same model before the first step: they compare its layout, and take rank 0's values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compress import Transport

# Broadcasts under way at once: one on the wire, one being packed.
IN_FLIGHT = 2


def verify_parameters(parameters: Sequence[Tensor], names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise, on every rank, unless all ranks have parameters of the same number, shapes, strides and dtypes.

    16 bytes a rank; only where these differ do the ranks exchange their lists, to tell what differs. A collective call.

    Raises:
        RuntimeError: they differ.
    """
    layouts = [(list(p.shape), list(p.stride()), str(p.dtype)) for p in parameters]
    digest = int.from_bytes(blake2b(repr(layouts).encode(), digest_size=8).digest(), "little", signed=True)
    mine = torch.tensor([len(layouts), digest], device=parameters[0].device)
    everybodys = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everybodys, mine, group=group)
    if len({tuple(one.tolist()) for one in everybodys}) == 1:
        return
    lists: list[list[tuple[str, object]]] = [[] for _ in everybodys]
    dist.all_gather_object(lists, list(zip(names, layouts, strict=True)), group=group)
    for rank, one in enumerate(lists):
        if len(one) != len(names):
            raise RuntimeError(
                f"DDP expects same model across all ranks, but Rank {group.rank()} has {len(names)} params, while rank "
                f"{rank} has inconsistent {len(one)} params. Build the same model on every rank, and freeze the same "
                "parameters."
            )
    for rank, one in enumerate(lists):
        for i, ((name, layout), (_, first)) in enumerate(zip(one, lists[0], strict=True)):
            if layout != first:
                raise RuntimeError(
                    f"DDP expects same model across all ranks, but params[{i}], {name}, on rank {rank} with sizes, "
                    f"strides and dtype {layout} appears not to match sizes/strides of the same param in process 0: "
                    f"{first}. Build the same model on every rank."
                )


def broadcast_coalesced(tensors: Sequence[Tensor], transport: Transport, limit: int, source: int = 0) -> None:
    """Overwrite ``tensors`` with those of the group's rank ``source``, in messages of about ``limit`` bytes.

    A collective call. Messages are bytes, whatever the dtype.
    """
    under_way: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
    for chunk in _chunks(tensors, limit):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        under_way.append((transport.broadcast(flat.view(torch.uint8), source), flat, chunk))
        if len(under_way) == IN_FLIGHT:
            _unpack(transport, *under_way.popleft())
    while under_way:
        _unpack(transport, *under_way.popleft())


def _unpack(transport: Transport, work: dist.Work, flat: Tensor, chunk: Sequence[Tensor]) -> None:
    transport.wait(work)
    for tensor, values in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _chunks(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, in order, up to ``limit`` bytes, or one that is larger."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in members:
            if chunk and size + tensor.nbytes > limit:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.nbytes
        yield chunk
