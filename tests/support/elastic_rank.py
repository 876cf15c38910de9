"""A worker of an elastic torchrun that is killed at random places, as a program: `tests.faults.test_elastic`.

    torchrun --nproc-per-node 3 --max-restarts 4 elastic_rank.py FOLDER HOOK SEED KILLS

In each of the first ``KILLS`` attempts, one worker kills itself: in a backward, while a checkpoint is written, or
between two steps. Rank 0 appends a line of JSON with the loss of every step to ``FOLDER/losses``.
"""

import json
import os
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import fork_server  # noqa: F401 - makes `tests` importable
import torch
import torch.distributed as dist

from tests.support.recipe import load, save
from tests.support.training import register, wrapped

STEPS, SAVE_EVERY = 24, 4
BATCH = 12  # samples of a step, on all ranks together
PLACES = ("backward", "checkpoint", "between two steps")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def own_share(step, rank, size):
    """This rank's part of the step's batch: its samples do not depend on the number of ranks."""
    batch = torch.randn(BATCH, 11, generator=torch.Generator().manual_seed(step))
    return batch[rank * BATCH // size : (rank + 1) * BATCH // size]


def main(folder, hook, seed, kills):
    """Train from the latest checkpoint on, up to `STEPS`."""
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt}", store), rank=rank, world_size=size)
    ddp = wrapped()
    state = register(ddp, hook)
    others = {"hook": state} if hasattr(state, "state_dict") else {}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    draw = random.Random(f"{seed}, {attempt}")
    victim, place, at = draw.randrange(size), draw.choice(PLACES), draw.randrange(STEPS)
    place = place if attempt < kills and rank == victim else None
    step = load(folder / "checkpoints", ddp, optimizer, **others)
    at = max(at, step + 1)  # every attempt takes a step
    while step < STEPS:
        if place == "between two steps" and step >= at:
            die()
        optimizer.zero_grad()
        loss = ddp(own_share(step, rank, size))
        if place == "backward" and step >= at:
            next(ddp.parameters()).register_hook(die)
        loss.backward()
        optimizer.step()
        step += 1
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps({"attempt": attempt, "step": step, "loss": mean.item()}) + "\n")
        if step % SAVE_EVERY == 0:
            dies = place == "checkpoint" and step >= at
            with mock.patch.object(os, "fsync", die) if dies else nullcontext():  # DCP has written, and not closed
                save(folder / "checkpoints", step, ddp, optimizer, **others)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
