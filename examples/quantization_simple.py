"""Block quantization to read: int4 or int8 with error feedback, as a hook for PyTorch's DDP, in plain torch.

    torchrun --nproc-per-node 2 examples/quantization_simple.py --bits 4

Every parameter takes an all-to-all and an all-gather of its own, and the backward pass waits for them. The state has no
checkpoints, and a NaN stays in its error memory. gradwire's version, in compress/quantization.py, sends all
parameters of a bucket in one message, overlaps its collectives with the backward pass, and has kernels for GPUs and
CPUs (kernels/quantize.py). tests/distributed/hooks/test_simple_examples.py compares the two.

Sources: Tang, Lian, Yu, Zhang, Liu, "DoubleSqueeze", ICML 2019: error feedback for both exchanges. Wang et al.,
"ZeRO++", 2023: blocks with a scale each, all-to-all.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import pad

BLOCK = 64  # elements that share a scale


class QuantizationState:
    """Memory by parameter: the error of this rank's gradient, and that of the shard of the mean that it adds up."""

    def __init__(self, bits=4):
        self.bits = bits
        self.errors, self.shard_errors = {}, {}


def quantization_hook(state, bucket):
    """Average each gradient: quantize, all-to-all, add up one shard in fp32, quantize, all-gather."""
    n_ranks, bits = dist.get_world_size(), state.bits
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        shards = pad(gradient.flatten(), (0, -gradient.numel() % (n_ranks * BLOCK))).view(n_ranks, -1)
        shards = shards + state.errors.get(parameter, 0)
        message = quantize(shards, bits)
        state.errors[parameter] = shards - dequantize(message, bits)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message)  # shard r of every rank goes to rank r

        shard = dequantize(received, bits).mean(0) + state.shard_errors.get(parameter, 0)
        message = quantize(shard, bits)
        state.shard_errors[parameter] = shard - dequantize(message, bits)
        gathered = message.new_empty(n_ranks * len(message), message.shape[1])
        dist.all_gather_into_tensor(gathered, message)
        gradient.copy_(dequantize(gathered, bits)[: gradient.numel()].view_as(gradient))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def quantize(x, bits):
    """Round x [..., blocks * 64] to bytes [..., blocks, n]: codes from -L to L - 1, and a scale in bf16.

    The scale is negative if the largest element is positive, so that this element has the code -L.
    """
    half, per_byte = 2 ** (bits - 1), 8 // bits  # L is 8 or 128
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = (-blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / half).bfloat16()
    codes = (blocks / torch.where(scales == 0, 1, scales.float())).round().clamp(-half, half - 1).long() + half
    packed = (codes.unflatten(-1, (-1, per_byte)) << bits * torch.arange(per_byte, device=x.device)).sum(-1)
    return torch.cat([packed.byte(), scales.view(torch.uint8)], -1)


def dequantize(message, bits):
    """The numbers [..., blocks * 64] that the bytes of `quantize` stand for: codes times scales, in fp32."""
    half, per_byte = 2 ** (bits - 1), 8 // bits
    packed, scales = message[..., :-2, None].long(), message[..., -2:].contiguous().view(torch.bfloat16)
    codes = (packed >> bits * torch.arange(per_byte, device=message.device)) % 2**bits - half
    return (codes.flatten(-2) * scales.float()).flatten(-2)


def main(bits):
    """Fit a random linear teacher on the CPU; rank 0 prints the loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and teacher on every rank
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    teacher = torch.randn(64, 64) / 8
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(QuantizationState(bits), quantization_hook)
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
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4, help="bits of a code")
    main(parser.parse_args().bits)
