"""Train with 4-bit gradients and elastic torchrun: after a failure, all ranks resume from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/train_elastic.py --fail-at 70

Rank 1 fails at step 70 of the first attempt. torchrun restarts both ranks, which resume from step 50. Checkpoints
load on any number of ranks, so torchrun may lose or gain a node. They are in the folder checkpoints/train_elastic, or
in the one given as an argument.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpointing import load, save
from torch import nn

import gradwire

STEPS, SAVE_EVERY = 150, 50


def main(folder: Path, failing_step: int | None) -> None:
    """Train up to `STEPS`; rank 0 prints the loss."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    # torchrun keeps its store after a restart: without a prefix, ranks may find addresses of the previous attempt.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    torch.manual_seed(0)  # the same model on every rank
    model = gradwire.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    )
    state = gradwire.attach(model, "int4").state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    load(folder, model, optimizer, hook=state)  # nothing in the first attempt
    if rank == 0:
        print(f"attempt {attempt}: {dist.get_world_size()} ranks, start at step {state.iter}", flush=True)

    while state.iter < STEPS:
        if attempt == 0 and state.iter == failing_step and rank == 1:
            sys.exit("rank 1 fails, to show a restart")
        torch.manual_seed(state.iter * dist.get_world_size() + rank)  # different data on every rank
        inputs = torch.randn(16, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs.flip(1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.iter % SAVE_EVERY == 0:
            save(folder, state.iter, model, optimizer, hook=state)  # a collective call
            if rank == 0:
                print(f"step {state.iter}: loss {loss.item():.3f}, saved", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("checkpoints/train_elastic"), help="checkpoint folder"
    )
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="step at which rank 1 fails once (default: never)")
    options = parser.parse_args()
    main(options.folder, options.fail_at)
