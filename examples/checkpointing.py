"""Checkpoints that are complete or absent, with torch.distributed.checkpoint. The example programs import it."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
    """Save a training. ``others``: hook state, scheduler, or any object with ``state_dict`` and ``load_state_dict``."""
    unfinished = from_rank_0(folder / f"tmp-step_{step}-{uuid4().hex}")
    weights, moments = get_state_dict(model, optimizer)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # buffers, such as BatchNorm's, are rank 0's
    parts = {"step": step, "model": weights, "optimizer": moments, **others}
    dcp.save(parts, checkpoint_id=unfinished, planner=planner)
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    torch.save([torch.get_rng_state(), *gpu], unfinished / f"random_{dist.get_rank()}.pt")
    dist.barrier()  # all ranks have written
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step_{step}")


def load(folder: Path, model: nn.Module, optimizer: Optimizer, **others: Any) -> int:
    """Load the latest checkpoint, on any number of ranks. Returns its step, or 0 if there is none."""
    checkpoint = from_rank_0(latest(folder))
    if checkpoint is None:
        return 0
    optimizer.zero_grad()  # `get_state_dict` prepares a new optimizer only without gradients
    weights, moments = get_state_dict(model, optimizer)
    parts = {"step": 0, "model": weights, "optimizer": moments, **others}
    dcp.load(parts, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    if (file := checkpoint / f"random_{dist.get_rank()}.pt").exists():  # the saved run had this rank
        cpu, *gpu = torch.load(file)
        torch.set_rng_state(cpu)
        if gpu and torch.cuda.is_available():
            torch.cuda.set_rng_state(*gpu)
    return parts["step"]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")), default=None)


def from_rank_0(value: Any) -> Any:
    """The value of rank 0, once all ranks have come: the state of a hook waits only ten seconds for the others."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values[0]
