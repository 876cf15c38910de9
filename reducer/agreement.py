"""How ranks come to have the same model before the first step: they compare it, and take rank 0's values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import GroupTransport
from gradwire.comm.store_collectives import MAX_SHOWN, format_differences

# Broadcasts under way at once: one on the wire, one being packed.
IN_FLIGHT = 2


def verify_model(
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    options: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise, on every rank, unless all ranks have the same model as far as collectives depend on it.

    16 bytes a rank; only where these differ do the ranks exchange what they have, to tell what differs. A collective
    call.

    Args:
        parameters: those that are reduced, by name: their number, shapes, strides and dtypes must agree.
        states: whatever else is broadcast, frozen parameters and buffers, under names that an error shows: their
            number, shapes, dtypes and kinds of device must agree.
        options: what decides which collectives there are, and their order.
        group: the ranks.
        device: for the exchange.

    Raises:
        RuntimeError: something differs.
    """
    layouts = [(list(p.shape), list(p.stride()), str(p.dtype)) for p in parameters.values()]
    facts = {name: f"{tuple(each.shape)} {each.dtype} on {each.device.type}" for name, each in states.items()}
    facts |= {name: str(value) for name, value in options.items()}
    text = repr((layouts, list(facts.values())))
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    mine = torch.tensor([len(layouts), digest], device=device)
    everybodys = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everybodys, mine, group=group)
    if len({tuple(one.tolist()) for one in everybodys}) == 1:
        return
    lists: list[tuple[list[tuple[str, object]], dict[str, str]]] = [([], {}) for _ in everybodys]
    dist.all_gather_object(lists, (list(zip(parameters, layouts, strict=True)), facts), group=group)
    _raise_for_parameters([one for one, _ in lists], group.rank())
    lines = (
        format_differences([one for _, one in lists], range(len(lists)))
        or "\n  the order of frozen parameters and buffers"
    )
    raise RuntimeError(
        f"DDP expects same model across all ranks, but there are differences:{lines}\nBuild the same model on every "
        "rank, and wrap it with the same arguments."
    )


def _raise_for_parameters(lists: Sequence[Sequence[tuple[str, object]]], this: int) -> None:
    """Raise if the ranks have other parameters to reduce: with PyTorch's words, and the parameter's name."""
    names = [name for name, _ in lists[this]]
    for rank, one in enumerate(lists):
        if len(one) != len(names):
            alone = sorted({name for name, _ in one} ^ set(names))
            raise RuntimeError(
                f"DDP expects same model across all ranks, but Rank {this} has {len(names)} params, while rank "
                f"{rank} has inconsistent {len(one)} params. Build the same model on every rank, and freeze the same "
                f"parameters. Only one of the two has {', '.join(alone[:MAX_SHOWN])}"
                f"{', ...' * (len(alone) > MAX_SHOWN)}."
            )
    for rank, one in enumerate(lists):
        for i, ((name, layout), (_, first)) in enumerate(zip(one, lists[0], strict=True)):
            if layout != first:
                raise RuntimeError(
                    f"DDP expects same model across all ranks, but params[{i}], {name}, on rank {rank} with sizes, "
                    f"strides and dtype {layout} appears not to match sizes/strides of the same param in process 0: "
                    f"{first}. Build the same model on every rank."
                )


def broadcast_coalesced(tensors: Sequence[Tensor], transport: GroupTransport, limit: int, source: int = 0) -> None:
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


def _unpack(transport: GroupTransport, work: dist.Work, flat: Tensor, chunk: Sequence[Tensor]) -> None:
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
