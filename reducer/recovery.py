"""`resynchronize`: after an error, all ranks start over from the same state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.connections import connections_of
from gradwire.comm.rank_differences import format_by_rank
from gradwire.comm.store_collectives import differences_between_ranks, gather_json
from gradwire.comm.torch_internals import all_groups, unique_name
from gradwire.exchange.handshake import digest
from gradwire.exchange.hook_state import HookState, share_hook_state
from gradwire.exchange.session import Facts, Session
from gradwire.reducer.exchange import Exchange
from gradwire.reducer.model_sync import broadcast_coalesced, describe_layouts, layouts_of
from gradwire.reducer.reducer import Reducer

CALL = "resynchronize()"


def resynchronize(
    reducer: Reducer,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    from_rank: int | None,
    limit: int,
) -> None:
    """Replace the connections, restart the reducer, and share the state of ``from_rank``. A collective call.

    All checks come before any change, on facts exchanged through the store: collectives may be stuck. Parameters and
    buffers are broadcast in messages of about ``limit`` bytes.
    """
    exchange, group = reducer.exchange, reducer.exchange.process_group
    reducer.leave_for_resynchronize(f"{CALL} was called")
    groups = all_groups() if reducer.hook.has_groups else [group]
    layouts = describe_layouts(layouts_of({**parameters, **buffers}))
    mine = {
        "from_rank": from_rank if from_rank is None or type(from_rank) is int else repr(from_rank),
        "parameters": digest(parameters),
        "layouts": digest(list(layouts.items())),
        "states": {unique_name(each): [state.hook_name for state in exchange.states_on(each)] for each in groups},
    }

    def check(by_rank: Sequence[Facts]) -> None:
        _check_source([one["from_rank"] for one in by_rank])
        if from_rank is None and len({one["parameters"] for one in by_rank}) > 1:
            _raise_parameters_differ(group, parameters)
        if from_rank is not None and len({one["layouts"] for one in by_rank}) > 1:
            _raise_layouts_differ(group, layouts)

    used = [each for each in groups if each in exchange.hook_groups]
    by_rank = Session([group]).resynchronize(CALL, mine, check, used=used, known=groups)
    reducer.restart()
    with reducer.leaving(CALL), torch.no_grad():
        source = from_rank or 0
        if from_rank is not None:
            tensors = [tensor.detach() for tensor in (*parameters.values(), *buffers.values())]
            broadcast_coalesced(tensors, exchange.transport, limit, source)
        state = reducer.hook.state
        if isinstance(state, HookState) and state not in exchange.hook_states:
            share_hook_state(state, exchange.transport, source, exchange.device)
        source = dist.get_global_rank(group, source)
        for each in sorted(groups, key=unique_name):
            hooks_by_rank = [one["states"][name] for one in by_rank if (name := unique_name(each)) in one["states"]]
            _share_states_in_hook(exchange, each, hooks_by_rank, source)


def _share_states_in_hook(
    exchange: Exchange, group: dist.ProcessGroup, hooks_by_rank: Sequence[Sequence[str]], source: int
) -> None:
    """Share the states that a user's hook passes to gradwire's hooks on ``group``. A collective call of its ranks.

    All take the states of ``source``, a rank in the default group, or of the group's first rank if it is not in the
    group. A state that some ranks have not used yet is left to the handshake.
    """
    ranks = dist.get_process_group_ranks(group)
    first = ranks.index(source) if source in ranks else 0
    for state, names in zip(exchange.states_on(group), zip(*hooks_by_rank, strict=False), strict=False):
        if len(set(names)) == 1:
            transport = connections_of(group).transport(CALL, exchange.device)
            share_hook_state(state, transport, first, exchange.device)


def _check_source(ranks: Sequence[Any]) -> None:
    if any(rank is not None and not (isinstance(rank, int) and 0 <= rank < len(ranks)) for rank in ranks):
        raise ValueError(
            f"from_rank is {format_by_rank(ranks)}; expected None or a rank of the process group, 0 to "
            f"{len(ranks) - 1}."
        )
    if len(set(ranks)) > 1:
        raise ValueError(f"from_rank is {format_by_rank(ranks)}; expected the same on every rank.")


def _raise_layouts_differ(group: dist.ProcessGroup, layouts: Mapping[str, str]) -> None:
    lines = differences_between_ranks(group, f"{CALL}: layouts", layouts)
    raise RuntimeError(
        f"{CALL} cannot broadcast parameters and buffers that differ between ranks:{lines}\nMake them alike on all "
        "ranks, and call it again; or name a buffer that each rank sizes by itself in "
        "module._ddp_params_and_buffers_to_ignore before you wrap the model."
    )


def _raise_parameters_differ(group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> None:
    mine = {name: digest({name: parameter}) for name, parameter in parameters.items()}
    by_rank = gather_json(group, f"{CALL}: parameters", mine)
    names = list(dict.fromkeys(name for digests in by_rank for name in digests))
    differing = [name for name in names if len({digests.get(name) for digests in by_rank}) > 1]
    alike: dict[str, list[int]] = {}
    for rank, digests in enumerate(by_rank):
        alike.setdefault(json.dumps(digests), []).append(rank)
    raise RuntimeError(
        f"The parameters differ between the ranks {' and '.join(map(str, alike.values()))}: {len(differing)} of "
        f"{len(names)}, the first of them {differing[0]}. Some ranks have applied the failed step, others have "
        "not. Call resynchronize(from_rank=...) on every rank to take those of one rank, or restart from a checkpoint."
    )
