"""Train with 4-bit gradients, save, and resume on another number of ranks. This is the README's diff as a program.

    torchrun --nproc-per-node 2 examples/train_int4.py
    torchrun --nproc-per-node 3 examples/train_int4.py

The second run continues from the checkpoint of the first: model, optimizer, and error memory. Checkpoints are in the
folder checkpoints/train_int4, or in the one given as an argument.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from checkpointing import load, save
from torch import nn

import gradwire

STEPS = 150


def main(folder: Path) -> None:
    """Take `STEPS` more steps, and save; rank 0 prints the loss."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    teacher = torch.randn(64, 64, device=device) / 8

    model = gradwire.DistributedDataParallel(model)
    attachment = gradwire.attach(model, "int4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    start = load(folder, model, optimizer, hook=attachment)  # 0 in the first run
    torch.manual_seed(1 + dist.get_rank() + start)  # different data on every rank
    for step in range(start + 1, start + STEPS + 1):
        inputs = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"{dist.get_world_size()} ranks, step {step}: loss {loss.item():.3f}")

    save(folder, start + STEPS, model, optimizer, hook=attachment)  # a collective call
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("checkpoints/train_int4"), help="checkpoint folder"
    )
    main(parser.parse_args().folder)
