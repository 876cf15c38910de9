"""Train in fp16 with PowerSGD, a gradient scaler, and torch.compile.

    torchrun --nproc-per-node 2 examples/train_mixed_precision.py

Each process uses one GPU if there are GPUs, and the CPU with gloo if there are none.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def main() -> None:
    """Train; rank 0 prints the loss and the scale."""
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    model = gradwire.DistributedDataParallel(model)
    state = gradwire.attach(model, "powersgd-r4", start_powerSGD_iter=20).state
    compiled = torch.compile(model)  # after wrapping, so that the graph is split at DDP's buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20)
    state.follow_scaler(scaler)  # the error memory changes its scale with the gradients

    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 151):
        inputs = torch.randn(16, 64, device=device)
        with torch.autocast(device.type, torch.float16):
            loss = nn.functional.mse_loss(compiled(inputs), torch.sin(inputs.flip(1)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # inf on one rank reaches all ranks, so all of them skip the step
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, scale {scaler.get_scale():.0f}")
    if dist.get_rank() == 0:
        rate, before, after = state.compression_stats()
        print(f"PowerSGD sent {after:,} elements instead of {before:,}: {rate:.1f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
