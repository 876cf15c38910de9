"""Model synchronisation at construction: ranks compare their models, and rank 0 broadcasts its values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import GroupTransport
from gradwire.comm.store_collectives import MAX_SHOWN, format_differences

__all__ = ["broadcast_coalesced", "verify_model"]

MAX_BROADCASTS_IN_FLIGHT = 2  # one message is sent while the next is packed


def verify_model(
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    options: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise, on every rank, unless all ranks have the same model, as far as their collectives depend on it.

    A collective call: an all-gather of 16 bytes per rank. Only if these differ, the ranks exchange the full description
    to name the differences.

    Args:
        parameters: the parameters to reduce, by name. Number, shapes, strides and dtypes must
            agree.
        states: frozen parameters and buffers that are broadcast, by the name to show in an error. Number, shapes,
            dtypes and device types must agree.
        options: the options that decide which collectives are issued, and in which order.
        group: the ranks.
        device: of the all-gather.

    Raises:
        RuntimeError: the ranks differ.
    """
    layouts = [(list(p.shape), list(p.stride()), str(p.dtype)) for p in parameters.values()]
    facts = {name: f"{tuple(each.shape)} {each.dtype} on {each.device.type}" for name, each in states.items()}
    facts |= {name: str(value) for name, value in options.items()}
    text = repr((layouts, list(facts.values())))
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    own = torch.tensor([len(layouts), digest], device=device)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if len({tuple(one.tolist()) for one in digests}) == 1:
        return
    lists: list[tuple[list[tuple[str, object]], dict[str, str]]] = [([], {}) for _ in digests]
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
    """Raise PyTorch's error, with the parameter's name, if the ranks have different parameters to reduce."""
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


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    transport: GroupTransport,
    limit: int,
    source: int = 0,
    check: Callable[[], None] | None = None,
) -> None:
    """Overwrite ``tensors`` with those of the group's rank ``source``. A collective call.

    Args:
        tensors: of any dtypes; sent as bytes.
        transport: carries the broadcasts.
        limit: approximate size of a message in bytes.
        source: a rank of the group.
        check: called from time to time while waiting, by default the transport's own; raises to end the wait.
    """
    in_flight: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
    for chunk in _chunks(tensors, limit):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        in_flight.append((transport.broadcast(flat.view(torch.uint8), source), flat, chunk))
        if len(in_flight) == MAX_BROADCASTS_IN_FLIGHT:
            _unpack(transport, check, *in_flight.popleft())
    while in_flight:
        _unpack(transport, check, *in_flight.popleft())


def _unpack(
    transport: GroupTransport,
    check: Callable[[], None] | None,
    work: dist.Work,
    flat: Tensor,
    chunk: Sequence[Tensor],
) -> None:
    transport.wait(work, check)
    for tensor, values in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _chunks(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to ``limit`` bytes; a larger one alone."""
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
