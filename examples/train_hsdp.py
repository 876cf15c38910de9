"""Train a small network with HSDP: gradients are sent in int4 between replicas, and in fp32 within a replica.

    torchrun --nproc-per-node 4 examples/train_hsdp.py

The mesh has two replicas of two shards each. Each process uses one GPU if there are GPUs, and the CPU with gloo if
there are none.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


def main() -> None:
    """Fit a random linear teacher; rank 0 prints the loss and the payload of a step."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    teacher = torch.randn(64, 64, device=device) / 8

    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    attachment = gradwire.attach(model, "int4")

    if dist.get_rank() == 0:
        print(attachment.report)
    attachment.state.observe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 151):
        inputs = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    metrics = attachment.state.metrics()
    if dist.get_rank() == 0:
        sent, whole = int(metrics["sent_bytes"]), int(metrics["gradient_bytes"])
        print(f"{sent:,} bytes per step between replicas instead of {whole:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
