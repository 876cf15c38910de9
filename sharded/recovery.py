"""`resynchronize`: all ranks of a sharded model resume after a failed step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.comm import connections_of
from gradwire.exchange.handshake import digest
from gradwire.exchange.hook_state import HookState, share_hook_state
from gradwire.sharded.exchange import ShardedExchange
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter
from gradwire.sharded.torch_internals import ParameterGroup, discard_step, is_in_backward, runs_optimizers

CALL = "Attachment.resynchronize()"
REMEDY = "Restart the job from a checkpoint."


def resynchronize(
    model: nn.Module,
    state: object,
    groups: Sequence[ParameterGroup],
    reduce_scatters: Sequence[QuantizedReduceScatter],
    exchange: ShardedExchange,
) -> None:
    """Discard the failed step, replace the connections, and share the hook's state: `Attachment.resynchronize`.

    All checks come before any change, on facts of all ranks exchanged through the store: collectives may be stuck.
    """
    exchange.leave(f"{CALL} was called")  # also waits for results
    replicas = next((group.replicas for group in groups if group.replicas is not None), None)
    parameters = {name: each for group in groups for name, each in group.parameters.items()}
    shards = {name: each.sharded_param.detach().to_local() for name, each in parameters.items()}
    mine = {
        "steps": exchange.n_steps,
        "replicas": None if replicas is None else str(dist.get_process_group_ranks(replicas)),
        "parameters": digest(shards),
        "in backward": is_in_backward(model),
        "optimizers": runs_optimizers(parameters.values()),
        "iter": state.iter if isinstance(state, HookState) else 0,
        "calls": max((each.n_calls for each in reduce_scatters), default=0),
    }
    every = exchange.session.resynchronize(CALL, mine, _check)
    exchange.restart()
    discard_step(model)
    for each in reduce_scatters:
        each.n_calls = max(one["calls"] for one in every)
    if isinstance(state, HookState) and replicas is not None:
        with exchange.session.attempt(CALL, replicas):
            transport = connections_of(replicas).transport(CALL, exchange.device)
            share_hook_state(state, transport, 0, exchange.device)
        state.iter = min(one["iter"] for one in every)


def _check(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError, on every rank, if some have applied the failed step, or FSDP2 cannot go on."""
    if any(one["in backward"] for one in facts):
        raise RuntimeError(
            f"FSDP2 is in the middle of a backward that has raised an error, and torch {torch.__version__} has no "
            f"FSDPModule.reset_iter_state(). {REMEDY}"
        )
    if any(one["optimizers"] for one in facts):
        raise RuntimeError(
            "Hooks of register_post_accumulate_grad_hook may have applied a part of the failed step to the "
            f"parameters. {REMEDY}"
        )
    by_replicas: dict[Any, set[str]] = {}
    for one in facts:
        if one["replicas"] is not None:
            by_replicas.setdefault(one["replicas"], set()).add(one["parameters"])
    differing = [ranks for ranks, digests in by_replicas.items() if len(digests) > 1]
    if differing or len({one["steps"] for one in facts}) > 1:
        among = f": the parameters differ among the ranks {', and among '.join(differing)}" if differing else ""
        raise RuntimeError(f"Some ranks have finished the failed step, others have not{among}. {REMEDY}")
