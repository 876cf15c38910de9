"""Train on ranks with different numbers of tokens: gradients are the mean over the tokens of all ranks.

    torchrun --nproc-per-node 2 examples/weighted_mean.py
    torchrun --nproc-per-node 2 examples/weighted_mean.py int4

The argument is the name of a hook. Each rank accumulates two batches per step, of random sizes and with random padding.
Each process uses one GPU if there are GPUs, and the CPU with gloo if there are none.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire

PADDING = -100  # the label that cross_entropy ignores


def backward(model: gradwire.DistributedDataParallel, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Accumulate gradients of the mean loss over the tokens of all ``batches`` on all ranks; returns this rank's part.

    A batch has inputs and targets. Every rank needs as many batches; some of them may be empty, but not all.
    """
    world_size = dist.get_world_size()
    n_total = sum((targets != PADDING).sum() for _, targets in batches)  # of the whole step
    dist.all_reduce(n_total)
    part = torch.zeros_like(n_total, dtype=torch.float32)
    for i, (inputs, targets) in enumerate(batches):
        with nullcontext() if i == len(batches) - 1 else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=PADDING, reduction="sum")
            (loss * world_size / n_total).backward()  # DDP divides by world_size
        part += loss.detach() / n_total
    return part


def main(hook: str) -> None:
    """Learn the labels of a random linear teacher; rank 0 prints the mean loss of 100 steps."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    teacher = torch.randn(64, 10, device=device)

    model = gradwire.DistributedDataParallel(model)
    gradwire.attach(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    total = torch.zeros([], device=device)  # of the losses of 100 steps
    for step in range(1, 301):
        batches = []
        for size in torch.randint(0, 64, [2]).tolist():
            inputs = torch.randn(size, 64, device=device)
            is_padding = torch.rand(size, device=device) < 0.3
            batches.append((inputs, (inputs @ teacher).argmax(-1).masked_fill(is_padding, PADDING)))
        optimizer.zero_grad()
        total += backward(model, batches)
        optimizer.step()
        if step % 100 == 0:
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {total.item() / 100:.3f}")
            total.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hook", nargs="?", default="none", help="name of the hook (default: none)")
    main(parser.parse_args().hook)
