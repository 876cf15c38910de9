"""Resuming after an error: the facts that all ranks compare, and the state of a hook that they share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comm import GroupTransport
from gradwire.comm.store_collectives import collective_timeout, store_all_gather
from gradwire.hooks.hook_state import HookState


def gather_json(
    group: dist.ProcessGroup, purpose: str, value: object, check: Callable[[], None] = lambda: None
) -> list[Any]:
    """Every rank's value, through the store. A collective call. ``check`` may raise to end the wait."""
    texts = store_all_gather(group, purpose, json.dumps(value), collective_timeout(group), check)
    return [json.loads(text) for text in texts]


def check_collectives(counts: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError unless all ranks have issued equally many collectives on a process group."""
    if any(count != counts[0] for count in counts):
        raise RuntimeError(
            "The ranks have issued different numbers of collectives on the process group itself: "
            f"{format_by_rank(counts)}. "
            "The missing collectives leave it stuck, and gradwire can replace only groups that it created. Restart "
            "the job from a checkpoint, or destroy the process group on every rank and initialize a new one."
        )


def format_by_rank(values: Sequence[Any]) -> str:
    """Format values: ``3 on rank 0, 4 on rank 1``."""
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def share_hook_state(state: HookState, transport: GroupTransport, source: int, rank: int, device: torch.device) -> None:
    """Load the replicated part of the hook state of rank ``source`` on every rank. A collective call."""
    saved = io.BytesIO()
    if rank == source:
        torch.save(state.replicated_state(), saved)
    size = torch.tensor([saved.tell()], device=device)
    transport.wait(transport.broadcast(size, source))
    content = bytearray(saved.getvalue() if rank == source else int(size))
    message = torch.frombuffer(content, dtype=torch.uint8)  # shares the memory of `content`
    sent = message.to(device)
    transport.wait(transport.broadcast(sent, source))
    message.copy_(sent)
    state.load_replicated_state(torch.load(io.BytesIO(content), weights_only=True))
