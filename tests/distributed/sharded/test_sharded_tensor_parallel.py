"""`gradwire.attach` on FSDP2 with tensor parallelism, two shards of two tensor parallel ranks."""

import functools
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire.sharded import ReduceScatterOptions
from gradwire.sharded.reduce_scatter import QuantizedReduceScatter
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.training import Fault, error_of, message_of


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))


def built():
    """Each rank has half of the columns and rows of the linear layers,."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 9), nn.LayerNorm(9))
    parallelize_module(model, mesh()["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh()["shard"])
    return fully_shard(model, mesh=mesh()["shard"])


def backward(model, step):
    generator = torch.Generator().manual_seed(1000 * step + mesh()["shard"].get_local_rank())
    model(torch.randn(5, 9, generator=generator)).square().mean().backward()


def whole_gradients(model):
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@on_ranks(4)
def test_law1_holds_and_replicated_parameters_are_equal_on_tensor_parallel_ranks():
    native, ours = built(), built()
    options = ReduceScatterOptions(wire="int4", block_size=32, exempt=(), error_dtype=torch.float32)
    attachment = gradwire.attach(ours, within=options)
    total = {}
    for step in range(4):
        for model in (native, ours):
            model.zero_grad()
            backward(model, step)
        exact = whole_gradients(native)
        for name, gradient in whole_gradients(ours).items():
            total[name] = total.get(name, 0) + exact[name] - gradient
    errors = attachment.state_dict()["within"]
    assert torch.stack([each.abs().max() for each in total.values()]).max() > 1e-4
    for name, missing in total.items():
        torch.testing.assert_close(errors[name].full_tensor(), missing, atol=1e-6, rtol=1e-5)
    for each in ours.parameters():
        if each.device_mesh.ndim == 1 or each.placements[1].is_replicate():
            copies = [torch.empty_like(each.grad.to_local()) for _ in range(2)]
            dist.all_gather(copies, each.grad.to_local().contiguous(), group=mesh().get_group("tensor"))
            assert_same_bits(*copies)


@on_ranks(4)
def test_error_on_one_rank_raises_on_tensor_parallel_ranks_too_and_training_resumes():
    model = built()
    attachment = gradwire.attach(model, within=ReduceScatterOptions(wire="int4"))
    backward(model, 0)
    fails = mock.patch.object(QuantizedReduceScatter, "_reduce", side_effect=Fault("planted"))
    with fails if dist.get_rank() == 3 else nullcontext():
        assert "planted" in message_of(backward, model, 1)
    model.zero_grad()
    attachment.resynchronize()
    assert error_of(backward, model, 1) is None
