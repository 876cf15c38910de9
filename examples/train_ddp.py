"""Train a small network with PowerSGD.

    torchrun --nproc-per-node 2 examples/train_ddp.py

Each process uses one GPU if there are GPUs, and the CPU with gloo if there are none.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def main() -> None:
    """Fit a random linear teacher; rank 0 prints the loss and the compression rate."""
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    teacher = torch.randn(64, 64, device=device) / 8

    model = gradwire.DistributedDataParallel(model)
    state = gradwire.attach(model, "powersgd-r4", start_powerSGD_iter=100).state

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 301):
        inputs = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        rate, before, after = state.compression_stats()
        print(f"PowerSGD sent {after:,} elements instead of {before:,}: {rate:.1f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
