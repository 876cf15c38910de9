"""Writes the checkpoints that later versions must load, in a folder with the number of this version.

    PYTHONPATH=tests/support python tests/support/keep_checkpoints.py

Run it once for every release, and commit the files.
"""

from contextlib import chdir
from pathlib import Path

import fork_server  # noqa: F401 - makes `tests` importable
import torch
import torch.distributed as dist

import gradwire
from tests.support.recipe import save
from tests.support.states import START, STATES, Training

FOLDER = Path(__file__).parents[1] / "checkpoints"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = FOLDER / gradwire.__version__
    folder.mkdir(parents=True, exist_ok=True)
    for kind in STATES:
        training = Training(kind)
        training.run(START + 2)
        torch.save(training.state.state_dict(), folder / f"{kind}.pt")
    training = Training("int4")
    optimizer = torch.optim.AdamW(training.ddp.parameters())
    for _ in range(START + 2):
        training.run(1)
        optimizer.step()
    with chdir(folder):  # DCP writes the path into the checkpoint
        save(Path("training"), START + 2, training.ddp, optimizer, hook=training.state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
