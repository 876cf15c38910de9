"""A custom compressor: top-k sends the largest elements of a bucket and keeps all others as errors for later steps.

    torchrun --nproc-per-node 2 examples/topk_hook.py

The ranks run on the CPU, with gloo.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gradwire
from gradwire.hooks import HookState, Memory, Step, hook_for


@dataclass(frozen=True)
class TopKOptions:
    """Options of `topk_hook`."""

    density: float = 0.01  # fraction of the elements to send
    start_iter: int = 2  # number of plain steps before the first compressed one


class TopKState(HookState):
    """Options and error memory of `topk_hook`."""

    def __init__(self, process_group=None, **options):
        memory = {"errors": Memory(merge="sum")}
        super().__init__("topk_hook", process_group, TopKOptions(**options), memory)


@hook_for(TopKState)
def topk_hook(state, bucket):
    """Average the largest elements of each rank's bucket."""
    return state.run(bucket, lambda step: topk_all_reduce(step, state.options.density))


async def topk_all_reduce(step: Step, density: float) -> None:
    """All-gather the largest elements of gradient + error, as indices and values, and add them up."""
    world_size, errors = step.transport.world_size, step.memory["errors"]
    share = torch.cat([gradient.flatten().float() for gradient in step.gradients]) / world_size
    total = share + torch.cat([error.flatten().float() for error in errors])
    indices = total.abs().topk(math.ceil(density * total.numel())).indices
    message = torch.cat([indices.int(), total[indices].view(torch.int32)])
    gathered = message.new_empty(1, world_size, message.numel())
    await step.transport.all_gather(gathered.view(torch.uint8), message[None].view(torch.uint8))
    result = torch.zeros_like(total)
    for received in gathered.view(world_size, 2, len(indices)):  # in rank order: bitwise equal on all ranks
        result.index_add_(0, received[0], received[1].view(torch.float32))
    is_finite = result.isfinite().all()  # equal on all ranks
    unsent = total.index_fill(0, indices, 0)
    sizes = [error.numel() for error in errors]
    for error, values in zip(errors, unsent.split(sizes), strict=True):
        error.copy_(torch.where(is_finite, values.view_as(error), error))
    for target, values in zip(step.results, result.split(sizes), strict=True):
        target.copy_(values.view_as(target))


def main():
    """Train a network to reproduce its input; rank 0 prints the loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gradwire.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
    gradwire.attach(model, TopKState(density=0.05), topk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(1, 101):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
