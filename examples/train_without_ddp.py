"""Train without DDP: the loop averages the gradients itself, in a compressed format.

    torchrun --nproc-per-node 2 examples/train_without_ddp.py
    torchrun --nproc-per-node 2 examples/train_without_ddp.py int4

The argument is the wire format, int8 by default. Below 6 bits, error feedback keeps what the format loses.
Each process uses one GPU if there are GPUs, and the CPU with gloo if there are none.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from gradwire.collectives import Memory, all_reduce_coalesced


def average(model: nn.Module, wire: str, memory: Memory | None) -> None:
    """Replace the gradients by their mean over the ranks."""
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    all_reduce_coalesced(list(named.values()), wire=wire, memory=None if memory is None else memory[tuple(named)])


def main(wire: str) -> None:
    """Learn a random linear teacher; rank 0 prints the loss."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    teacher = torch.randn(64, 10, device=device)
    memory = Memory() if wire in ("int4", "int2", "sign") else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 301):
        inputs = torch.randn(64, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        average(model, wire, memory)
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wire", nargs="?", default="int8", help="wire format (default: int8)")
    main(parser.parse_args().wire)
