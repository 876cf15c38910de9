"""Train with post-local SGD: after a warm-up, nodes take steps of their own, and average parameters in every eighth.

    torchrun --nproc-per-node 2 examples/local_sgd.py

Each process stands for a node. On real nodes, pass their number of GPUs, such as --node-size 8: every step then
averages gradients within a node.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import gradwire


def post_local_sgd(
    model: gradwire.DistributedDataParallel, optimizer: torch.optim.Optimizer, node_size: int, warm_up: int, period: int
) -> PostLocalSGDOptimizer:
    """Make steps local after ``warm_up`` steps. The returned optimizer averages parameters in one of ``period``."""
    node, _ = dist.new_subgroups(node_size)  # consecutive ranks
    model.register_comm_hook(PostLocalSGDState(None, node, start_localSGD_iter=warm_up), post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period, warmup_steps=warm_up))


def main(node_size: int) -> None:
    """Fit a random linear teacher; rank 0 prints the loss, and how far apart the nodes are."""
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if use_cuda else "cpu"
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    teacher = torch.randn(64, 64, device=device) / 8

    model = gradwire.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = post_local_sgd(model, optimizer, node_size, warm_up=100, period=8)

    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 302):
        inputs = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (100, 200, 300, 301):
            weight = model.module[0].weight.detach()
            mean = weight.clone()
            dist.all_reduce(mean)
            distance = (weight - mean / dist.get_world_size()).norm() / weight.norm()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}, distance from the mean of the nodes {distance:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node-size", type=int, default=1, metavar="GPUS", help="ranks of a node (default: 1)")
    main(parser.parse_args().node_size)
