"""Synchronization of ranks: comparing and broadcasting models at construction, and resuming after an error."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from gradwire.comm import GroupTransport
from gradwire.comm.connections import Connections, connections_of, existing_connections
from gradwire.comm.rank_differences import MAX_SHOWN, check_collectives, format_by_rank, format_differences
from gradwire.comm.store_collectives import gather_json
from gradwire.comm.torch_internals import all_groups, collective_counts, unique_name
from gradwire.hooks._handshake import digest
from gradwire.hooks.hook_state import HookState, share_hook_state
from gradwire.reducer import torch_internals
from gradwire.reducer.exchange import Exchange
from gradwire.reducer.reducer import Reducer

MAX_BROADCASTS_IN_FLIGHT = 2  # one message is sent while the next is packed
CALL = "resynchronize()"


def verify_model(
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    options: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise RuntimeError, on every rank, unless all have the same model, as far as their collectives depend on it.

    An all-gather of 16 bytes per rank, and of the full description if these differ. Parameters must agree in number,
    shapes, strides and dtypes; frozen parameters and broadcast buffers in number, shapes, dtypes and device types.
    """
    layouts = [(list(p.shape), list(p.stride()), str(p.dtype)) for p in parameters.values()]
    facts = {name: f"{tuple(each.shape)} {each.dtype} on {each.device.type}" for name, each in states.items()}
    facts |= {name: str(value) for name, value in options.items()}
    own = torch.tensor([len(layouts), int(digest((layouts, list(facts.values()))), 16) - 2**63], device=device)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if len({tuple(one.tolist()) for one in digests}) == 1:
        return
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (list(zip(parameters, layouts, strict=True)), facts), group=group)
    _raise_for_parameters([named_layouts for named_layouts, _ in by_rank], group.rank())
    order = "\n  the order of frozen parameters and buffers"
    lines = format_differences([facts for _, facts in by_rank], range(group.size())) or order
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


def resynchronize(
    reducer: Reducer, parameters: Mapping[str, Tensor], buffers: Sequence[Tensor], from_rank: int | None, limit: int
) -> None:
    """Replace the connections, restart the reducer, and share one rank's state:
    `DistributedDataParallel.resynchronize`.

    All checks come before any change, on facts exchanged through the store: collectives may be stuck.
    """
    group = reducer.exchange.process_group
    reducer.leave(f"{CALL} was called")
    groups = {unique_name(each): each for each in (all_groups() if reducer.hook.has_groups else [group])}
    mine = {
        "from_rank": from_rank if from_rank is None or type(from_rank) is int else repr(from_rank),
        "parameters": digest(parameters),
        "groups": {name: _group_facts(reducer, each) for name, each in groups.items()},
    }
    by_rank = gather_json(group, CALL, mine)
    _check_source([one["from_rank"] for one in by_rank])
    used = {name for one in by_rank for name, facts in one["groups"].items() if facts["is used"]}
    facts_of = {name: [one["groups"][name] for one in by_rank if name in one["groups"]] for name in sorted(used)}
    for name, facts in facts_of.items():
        which = "itself" if name == unique_name(group) else f"{name}, which the communication hook uses"
        check_collectives([one["collectives"] for one in facts], which)
    if from_rank is None and len({one["parameters"] for one in by_rank}) > 1:
        _raise_parameters_differ(group, parameters)
    for name, facts in facts_of.items():
        if name in groups and (generation := max(one["generation"] for one in facts)) > 0:
            connections_of(groups[name]).renew(1 + generation)
    reducer.restart()
    with reducer.leaving(CALL), torch.no_grad():
        source = from_rank or 0
        if from_rank is not None:
            broadcast_coalesced(
                [tensor.detach() for tensor in (*parameters.values(), *buffers)],
                reducer.exchange.transport,
                limit,
                source,
            )
        state = reducer.hook.state
        if isinstance(state, HookState) and state not in reducer.exchange.hook_states:
            share_hook_state(state, reducer.exchange.transport, source, group.rank(), reducer.exchange.device)
        source = dist.get_global_rank(group, source)
        for name, facts in facts_of.items():
            if name in groups:
                _share_states_in_hook(reducer.exchange, groups[name], [one["states"] for one in facts], source)


def _group_facts(reducer: Reducer, group: dist.ProcessGroup) -> dict[str, Any]:
    """Facts about a process group that `resynchronize` compares between ranks."""
    exchange, connections = reducer.exchange, existing_connections(group)
    return {
        "is used": group is exchange.process_group or group in exchange.hook_groups,
        "generation": 0 if connections is None else connections.generation,
        "collectives": collective_counts(group),
        "states": [state.hook_name for state, its_group in exchange.hook_states.items() if its_group() is group],
    }


def _share_states_in_hook(
    exchange: Exchange, group: dist.ProcessGroup, hooks_by_rank: Sequence[Sequence[str]], source: int
) -> None:
    """Share the states that a user's hook passes to gradwire's hooks on ``group``. A collective call of its ranks.

    A state that some ranks have not used yet is left to the handshake.

    Args:
        exchange: has the states.
        group: the process group.
        hooks_by_rank: hook names of these states on each rank, in order of their first use.
        source: the rank in the default group whose states all take; the group's first rank if it is not in the group.
    """
    states = [state for state, its_group in exchange.hook_states.items() if its_group() is group]
    ranks = dist.get_process_group_ranks(group)
    first = ranks.index(source) if source in ranks else 0
    for state, names in zip(states, zip(*hooks_by_rank, strict=False), strict=False):
        if len(set(names)) == 1:
            transport = connections_of(group).transport(CALL, exchange.device)
            share_hook_state(state, transport, first, group.rank(), exchange.device)


class JoinedRank(JoinHook):
    """A rank without inputs left in `join`, which takes part in the collectives of the others."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        """Take part in a forward of the others and, unless they are in ``no_sync``, in its backward."""
        ddp = self._ddp
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        is_synchronized = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, False))
        ddp.reducer.wait_for_post_backward_futures()
        ddp.require_forward_param_sync = is_synchronized
        if is_synchronized:
            ddp.reducer.reduce_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that was among the last with inputs."""
        ddp = self._ddp
        ddp._sync_final_model(is_last_joiner)
        if delayed := [p.detach() for p in ddp._delay_all_reduce_params]:  # which PyTorch's class ignores
            transport = ddp.reducer.exchange.transport
            broadcast_coalesced(delayed, transport, ddp.broadcast_bucket_size, ddp._authoritative_rank)


def begin_together(connections: Connections) -> None:
    """Renew the connections if an exchange has failed on any rank. A collective call, made by DDP's constructor."""
    connections.end_exchanges()
    if connections.group.size() > 1:
        mine = connections.generation, connections.has_failed
        by_rank = gather_json(connections.group, "DistributedDataParallel()", mine)
        if any(has_failed for _, has_failed in by_rank):
            connections.renew(1 + max(generation for generation, _ in by_rank))


def _check_source(ranks: Sequence[Any]) -> None:
    if any(rank is not None and not (isinstance(rank, int) and 0 <= rank < len(ranks)) for rank in ranks):
        raise ValueError(
            f"from_rank is {format_by_rank(ranks)}; expected None or a rank of the process group, 0 to "
            f"{len(ranks) - 1}."
        )
    if len(set(ranks)) > 1:
        raise ValueError(f"from_rank is {format_by_rank(ranks)}; expected the same on every rank.")


def _raise_parameters_differ(group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> None:
    """Raise, on every rank, with the names of the parameters that differ."""
    mine = [digest({name: parameter}) for name, parameter in parameters.items()]
    by_rank = gather_json(group, f"{CALL}: parameters", mine)
    differing = [name for name, *digests in zip(parameters, *by_rank, strict=True) if len(set(digests)) > 1]
    alike: dict[str, list[int]] = {}
    for rank, digests in enumerate(by_rank):
        alike.setdefault(json.dumps(digests), []).append(rank)
    raise RuntimeError(
        f"The parameters differ between the ranks {' and '.join(map(str, alike.values()))}: {len(differing)} of "
        f"{len(parameters)}, the first of them {differing[0]}. Some ranks have applied the failed step, others have "
        "not. Call resynchronize(from_rank=...) on every rank to take those of one rank, or restart from a checkpoint."
    )
