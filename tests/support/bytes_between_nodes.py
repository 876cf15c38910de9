"""A program for torchrun on two nodes: the bytes that each of them sends in one backward, plainly and in int4.

    torchrun --nnodes 2 --nproc-per-node 2 ... tests/support/bytes_between_nodes.py RECORDS

Every rank writes RECORDS/RANK.json: by case, the bytes that its node's interface sends, the relative error of the
gradients, and whether all ranks have the same bits.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.bench import namespaces
from gradwire.hooks.quantization_hooks import QuantizationState

SIZE = 1024


def ddp(model):
    return gradwire.DistributedDataParallel(model)


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, int(os.environ["LOCAL_WORLD_SIZE"])), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


CASES = {
    "ddp": (ddp, None),
    "ddp int4": (ddp, {}),  # local_size="auto"
    "ddp int4 flat": (ddp, {"local_size": 1}),
    "hsdp": (hsdp, None),
    "hsdp int4": (hsdp, {}),
}


def bytes_at_rest():
    """Both ranks of a node share its interface: it is read when all ranks have arrived and before any goes on."""
    dist.barrier()
    sent = namespaces.sent_bytes()
    dist.barrier()
    return sent


def gradient_of(wrap, options):
    """The gradient of this rank's batch, averaged over all ranks, and the bytes that its node sends meanwhile."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(SIZE, SIZE, bias=False))
    if options is not None:
        gradwire.attach(model, QuantizationState(wire="int4", start_iter=0, **options))
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(2, SIZE)
    for _ in range(2):  # the first one also connects the ranks and compares their settings
        model.zero_grad()
        before = bytes_at_rest()
        model(batch).square().sum().backward()
        sent = bytes_at_rest() - before
    (parameter,) = model.parameters()
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, sent


def main(folder):
    if os.environ["LOCAL_RANK"] == "0":
        namespaces.limit(namespaces.Rate.parse("200mbit"))
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    records, exact = {}, None
    for name, (wrap, options) in CASES.items():
        gradient, sent = gradient_of(wrap, options)
        exact = gradient if exact is None else exact
        first = gradient.clone()
        dist.broadcast(first, 0)
        error = ((gradient - exact).norm() / exact.norm()).item()
        records[name] = {"sent": sent, "error": error, "same_bits": torch.equal(gradient, first)}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(records))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
