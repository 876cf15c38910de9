"""Equal models on all ranks at construction: comparison, and broadcast of parameters and buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm import GroupTransport
from gradwire.comm.connections import Connections
from gradwire.comm.rank_differences import MAX_SHOWN, format_differences
from gradwire.comm.store_collectives import gather_json
from gradwire.exchange.handshake import digest
from gradwire.exchange.names import plain_name
from gradwire.reducer import torch_internals

MAX_BROADCASTS_IN_FLIGHT = 2  # one message is sent while the next is packed

# Name, shape, dtype and device of each of some tensors.
Layouts = list[tuple[str, torch.Size, torch.dtype, torch.device]]


def layouts_of(tensors: Mapping[str, Tensor]) -> Layouts:
    """The layouts of tensors by name."""
    return [(name, each.shape, each.dtype, each.device) for name, each in tensors.items()]


def describe_layouts(layouts: Layouts) -> dict[str, str]:
    """The layouts as facts that must be equal on all ranks for a broadcast, by plain name."""
    return {plain_name(name): f"{tuple(shape)} {dtype} on {device.type}" for name, shape, dtype, device in layouts}


def begin_together(connections: Connections) -> None:
    """Renew the connections if an exchange has failed on any rank. A collective call, made by DDP's constructor."""
    connections.end_exchanges()
    if connections.group.size() > 1:
        mine = connections.generation, connections.has_failed
        by_rank = gather_json(connections.group, "DistributedDataParallel()", mine)
        if any(has_failed for _, has_failed in by_rank):
            connections.renew(1 + max(generation for generation, _ in by_rank))


def verify_model(
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    options: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise RuntimeError, on every rank, unless all have the same model, as far as their collectives depend on it.

    An all-gather of 16 bytes per rank, and of the full description if these differ. Parameters must agree in names,
    shapes, strides, dtypes and order; frozen parameters and broadcast buffers in names, shapes, dtypes, device types
    and order.
    """
    layouts = [(list(p.shape), list(p.stride()), str(p.dtype)) for p in parameters.values()]
    facts = describe_layouts(layouts_of(states)) | {name: str(value) for name, value in options.items()}
    names = list(map(plain_name, parameters))
    own = torch.tensor([len(layouts), int(digest((layouts, names, list(facts.items()))), 16) - 2**63], device=device)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if len({tuple(one.tolist()) for one in digests}) == 1:
        return
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (list(zip(names, layouts, strict=True)), facts), group=group)
    _raise_for_parameters([named_layouts for named_layouts, _ in by_rank], group.rank())
    ranks = range(group.size())
    lines = format_differences([facts for _, facts in by_rank], ranks) or format_differences(
        [{"order of frozen parameters and buffers": ", ".join(facts)} for _, facts in by_rank], ranks
    )
    raise RuntimeError(
        f"DDP expects same model across all ranks, but there are differences:{lines}\nBuild the same model on every "
        "rank, and wrap it with the same arguments and environment variables."
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
        for i, ((name, layout), (first_name, first)) in enumerate(zip(one, lists[0], strict=True)):
            if layout == first and name != first_name:
                raise RuntimeError(
                    f"DDP expects same model across all ranks, but params[{i}] is {name} on rank {rank} and "
                    f"{first_name} in process 0. Build the same model on every rank, in the same order."
                )
            if layout != first:
                raise RuntimeError(
                    f"DDP expects same model across all ranks, but params[{i}], {name}, on rank {rank} with sizes, "
                    f"strides and dtype {layout} appears not to match sizes/strides of the same param in process 0: "
                    f"{first}. Build the same model on every rank."
                )


def has_own_memory(tensor: Tensor) -> bool:
    """Whether a message can carry the tensor: not if its class computes the elements, as that of a quantized one."""
    if type(tensor) in (Tensor, nn.Parameter):
        return True
    try:
        first = torch.cat([tensor.detach().reshape(-1)[:1]])
        return first.numel() == 0 or first.view(torch.uint8).data_ptr() != 0
    except Exception:  # the class lacks an operator
        return False


def check_memory(states: Mapping[str, Tensor]) -> None:
    """Raise NotImplementedError if no message can carry one of these parameters and buffers."""
    for name, tensor in states.items():
        if not has_own_memory(tensor):
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            raise NotImplementedError(
                f"{name} cannot be copied from rank 0: it is a {kind}, which has no memory of its own. If all ranks "
                "load the same values, either leave out this parameter, if it is frozen, by its name in "
                "module._ddp_params_and_buffers_to_ignore, which you set before you wrap the model; or copy nothing, "
                "with init_sync=False."
            )


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    transport: GroupTransport,
    limit: int,
    source: int = 0,
    check: Callable[[], None] | None = None,
) -> None:
    """Overwrite tensors of any dtypes with those of the group's rank ``source``, in messages of about ``limit`` bytes.

    A collective call. ``check``, by default the transport's own, is called while waiting and raises to end the wait.
    """
    in_flight: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
    for members in torch_internals.assign_buckets(tensors, [limit], [False] * len(tensors)) if tensors else ():
        chunk = [tensors[i] for i in members]
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        in_flight.append((transport.broadcast(flat.view(torch.uint8), source), flat, chunk))
        if len(in_flight) == MAX_BROADCASTS_IN_FLIGHT:
            _unpack(transport, check, *in_flight.popleft())
    while in_flight:
        _unpack(transport, check, *in_flight.popleft())


def _unpack(
    transport: GroupTransport, check: Callable[[], None] | None, work: dist.Work, flat: Tensor, chunk: Sequence[Tensor]
) -> None:
    transport.wait(work, check)
    for tensor, values in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(values.view(tensor.shape))
