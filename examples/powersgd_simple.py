"""PowerSGD to read: algorithms 1 and 2 of the paper as a communication hook for PyTorch's DDP, in plain torch.

    torchrun --nproc-per-node 2 examples/powersgd_simple.py --rank 4

Every matrix takes two all-reduces of its own, and the backward pass waits for them. The state has no checkpoints, and
a NaN stays in its error memory. gradwire's version, in compress/powersgd.py, sends all matrices of a bucket in one
message, overlaps its collectives with the backward pass, and has kernels for GPUs and CPUs (kernels/lowrank.py,
kernels/orthogonalize.py). Both compute the same result: tests/distributed/hooks/test_simple_examples.py.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019.
"""

import argparse

import torch
import torch.distributed as dist


class PowerSGDState:
    """Memory by parameter: the error E (n x m) of this rank, and the factor Q (m x r) of the last step."""

    def __init__(self, rank=4):
        self.rank = rank
        self.errors, self.q = {}, {}
        self.generator = torch.Generator().manual_seed(0)  # draws the same first Q on every rank


def powersgd_hook(state, bucket):
    """Algorithm 2 without the optimizer: compress each gradient with error feedback, and average it."""
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if gradient.dim() < 2:  # vectors are sent uncompressed
            all_reduce_mean(gradient)
            continue
        g = gradient.view(len(gradient), -1)  # n x m, in the bucket's memory
        if parameter not in state.errors:
            state.errors[parameter] = torch.zeros_like(g)
            state.q[parameter] = torch.randn(g.shape[1], min(state.rank, *g.shape), generator=state.generator).to(g)
        m = g + state.errors[parameter]
        p, q, own_q = compress_and_aggregate(m, state.q[parameter])
        g.copy_(p @ q.T)  # decompress
        # With the mean Q, as in the paper's code, the ranks' errors would drift apart: docs/powersgd.md.
        state.errors[parameter] = m - p @ own_q.T
        state.q[parameter] = q  # warm start
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def compress_and_aggregate(m, q):
    """Algorithm 1: one step of power iteration, started from Q. Returns P and Q of the ranks' mean M, and its own Q."""
    p = all_reduce_mean(m @ q)
    p = torch.linalg.qr(p).Q  # orthogonalize; equal on all ranks, as the mean is
    own_q = m.T @ p
    return p, all_reduce_mean(own_q.clone()), own_q


def all_reduce_mean(tensor):
    """Replace a tensor by its mean over the ranks."""
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def main(rank):
    """Fit a random linear teacher on the CPU; rank 0 prints the loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    teacher = torch.randn(64, 64) / 8
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(PowerSGDState(rank), powersgd_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    for step in range(1, 301):
        inputs = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(ddp(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=4, help="r, the number of columns of P and Q")
    main(parser.parse_args().rank)
