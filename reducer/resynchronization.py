"""Resynchronisation: ranks agree to continue after an error; see `DistributedDataParallel.resynchronize`."""

from __future__ import annotations

import ctypes
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import GroupTransport
from gradwire.comm.connections import Connections
from gradwire.comm.store_collectives import collective_timeout, store_all_gather
from gradwire.hooks._handshake import hash_bytes
from gradwire.hooks.hook_state import HookState
from gradwire.reducer.ddp_interface import DDPReducer
from gradwire.reducer.model_sync import broadcast_coalesced

__all__ = ["begin_together", "resynchronize"]

CALL = "resynchronize()"


def resynchronize(
    reducer: DDPReducer, parameters: Mapping[str, Tensor], buffers: Sequence[Tensor], from_rank: int | None, limit: int
) -> None:
    """Replace the connections, restart the reducer, and share one rank's state. A collective call.

    All checks come before any change, and all ranks base them on the same facts. The facts are
    exchanged through the store, because collectives may be stuck.

    Args:
        reducer: of this rank. Restarted.
        parameters: of the model, including frozen ones. Overwritten with those of ``from_rank``.
        buffers: of the model. Overwritten with those of ``from_rank``.
        from_rank: see `DistributedDataParallel.resynchronize`.
        limit: approximate size of a message in bytes.
    """
    group = reducer.process_group
    reducer.leave(f"{CALL} was called")
    mine = {
        "generation": reducer.connections.generation,
        "from_rank": from_rank if from_rank is None or type(from_rank) is int else repr(from_rank),
        "collectives": [_n_collectives(group, device) for device in group._device_types],
        "parameters": _digest(parameters.values()),
    }
    everyones = [
        json.loads(text) for text in store_all_gather(group, CALL, json.dumps(mine), collective_timeout(group))
    ]
    _check_source([one["from_rank"] for one in everyones])
    _check_collectives([one["collectives"] for one in everyones])
    if from_rank is None and len({one["parameters"] for one in everyones}) > 1:
        _raise_parameters_differ(group, parameters)
    reducer.connections.renew(1 + max(one["generation"] for one in everyones))
    reducer.restart()
    with reducer.leaving(CALL), torch.no_grad():
        source = from_rank or 0
        if from_rank is not None:
            broadcast_coalesced(
                [tensor.detach() for tensor in (*parameters.values(), *buffers)], reducer.transport, limit, source
            )
        if isinstance(reducer.hook_state, HookState):
            _share_hook_state(reducer.hook_state, reducer.transport, source, group.rank(), reducer.device)


def begin_together(connections: Connections) -> None:
    """Renew the connections if an exchange has failed on any rank. A collective call, made by DDP's constructor."""
    connections.forget_users()
    if connections.group.size() > 1:
        mine = json.dumps([connections.generation, connections.has_failed])
        texts = store_all_gather(
            connections.group, "DistributedDataParallel()", mine, collective_timeout(connections.group)
        )
        everyones = [json.loads(text) for text in texts]
        if any(has_failed for _, has_failed in everyones):
            connections.renew(1 + max(generation for generation, _ in everyones))


def _n_collectives(group: dist.ProcessGroup, device: torch.device) -> int:
    """Number of collectives that this rank has issued on the process group itself, which gradwire cannot replace."""
    backend: Any = group._get_backend(device)
    return int(backend._get_sequence_number_for_group())


def _digest(tensors: Iterable[Tensor]) -> str:
    """A digest of the tensors' bytes."""
    hashed = blake2b(digest_size=16)
    for tensor in tensors:
        hash_bytes(hashed, tensor)
    return hashed.hexdigest()


def _check_source(ranks: Sequence[Any]) -> None:
    if any(rank is not None and not (isinstance(rank, int) and 0 <= rank < len(ranks)) for rank in ranks):
        raise ValueError(
            f"from_rank is {_by_rank(ranks)}; expected None or a rank of the process group, 0 to {len(ranks) - 1}."
        )
    if len(set(ranks)) > 1:
        raise ValueError(f"from_rank is {_by_rank(ranks)}; expected the same on every rank.")


def _check_collectives(counts: Sequence[Sequence[int]]) -> None:
    if any(count != counts[0] for count in counts):
        raise RuntimeError(
            f"The ranks have issued different numbers of collectives on the process group itself: {_by_rank(counts)}. "
            "The missing collectives leave it stuck, and gradwire can replace only groups that it created. Restart "
            "the job from a checkpoint, or destroy the process group on every rank and initialize a new one."
        )


def _raise_parameters_differ(group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> None:
    """Raise, on every rank, with the names of the parameters that differ."""
    mine = [_digest([parameter]) for parameter in parameters.values()]
    everyones = [json.loads(text) for text in store_all_gather(group, f"{CALL}: parameters", json.dumps(mine))]
    differing = [name for name, *digests in zip(parameters, *everyones, strict=True) if len(set(digests)) > 1]
    alike: dict[str, list[int]] = {}
    for rank, digests in enumerate(everyones):
        alike.setdefault(json.dumps(digests), []).append(rank)
    raise RuntimeError(
        f"The parameters differ between the ranks {' and '.join(map(str, alike.values()))}: {len(differing)} of "
        f"{len(parameters)}, the first of them {differing[0]}. Some ranks have applied the failed step, others have "
        "not. Call resynchronize(from_rank=...) on every rank to take those of one rank, or restart from a checkpoint."
    )


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def _share_hook_state(
    state: HookState, transport: GroupTransport, source: int, rank: int, device: torch.device
) -> None:
    """Load the replicated part of the hook state of rank ``source`` on every rank."""
    content = b""
    if rank == source:
        buffer = io.BytesIO()
        torch.save(state.replicated_state(), buffer)
        content = buffer.getvalue()
    size = torch.tensor([len(content)], device=device)
    transport.wait(transport.broadcast(size, source))
    message = torch.empty(int(size), dtype=torch.uint8)
    if rank == source:
        ctypes.memmove(message.data_ptr(), content, len(content))
    message = message.to(device)
    transport.wait(transport.broadcast(message, source))
    message = message.cpu()
    content = ctypes.string_at(message.data_ptr(), message.nbytes)
    state.load_replicated_state(torch.load(io.BytesIO(content), weights_only=True))
