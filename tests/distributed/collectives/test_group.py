"""`compressed_group`: large gradient collectives are compressed, all others are those of the plain group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import all_reduce, compressed_group, reduce_scatter_tensor
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + dist.get_rank()))


@on_ranks(2)
def test_gradients_of_min_numel_or_more_are_compressed_and_all_else_is_exact():
    group = compressed_group(wire="int8", min_numel=1000)
    size, compressed = dist.get_world_size(), {"all_reduce": 0, "reduce_scatter_tensor": 0}
    for numel in (1000, 2000):
        large, single = drawn(numel), drawn(numel)
        dist.all_reduce(large, group=group)
        all_reduce(single, dist.ReduceOp.SUM, wire="int8")
        assert_same_bits(large, single)
        compressed["all_reduce"] += large.nbytes
    # A reduce-scatter counts the elements of its input, whatever the size of its output.
    for numel in (998, 1000, 1998, 2000):
        source, output, expected = drawn(numel), torch.empty(numel // size), torch.empty(numel // size)
        dist.reduce_scatter_tensor(output, source, dist.ReduceOp.AVG, group=group)
        if numel < 1000:
            dist.reduce_scatter_tensor(expected, source)
            expected /= size
        else:
            reduce_scatter_tensor(expected, source, wire="int8")
            compressed["reduce_scatter_tensor"] += source.nbytes
        assert_same_bits(output, expected)
    assert group.compressed == compressed

    for tensor, op in [
        (drawn(999), dist.ReduceOp.SUM),
        (drawn(40, 50), dist.ReduceOp.MAX),
        (torch.arange(2000) + dist.get_rank(), dist.ReduceOp.SUM),
    ]:
        plain = tensor.clone()
        dist.all_reduce(tensor, op, group=group)
        dist.all_reduce(plain, op)
        assert_same_bits(tensor, plain)
    parameter = drawn(2000)
    dist.broadcast(parameter, src=1, group=group)
    assert_same_on_all_ranks(from_all_ranks(parameter))
    gathered, part = torch.empty(size * 2000), drawn(2000)
    dist.all_gather_into_tensor(gathered, part, group=group)
    assert_same_bits(gathered.chunk(size)[dist.get_rank()], part)
    dist.barrier(group=group)
    assert dist.get_rank(group) == dist.get_rank() and dist.get_world_size(group) == size
    assert group.compressed == compressed
    assert group.passed["broadcast"] == parameter.nbytes
    assert "compressed: all_reduce: 12,000 B" in repr(group)


@on_ranks(2)
def test_handles_of_asynchronous_calls_wait_for_the_result():
    group = compressed_group(wire="bf16", min_numel=1)
    tensors = [drawn(100, seed=seed) for seed in range(3)]
    exact = [tensor.clone() for tensor in tensors]
    works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True) for tensor in tensors]
    for work, tensor, expected in zip(works, tensors, exact, strict=True):
        work.wait()
        dist.all_reduce(expected)
        assert torch.allclose(tensor, expected / 2, atol=2e-2)


def train(wrap, steps=3):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(drawn(8, 32, seed=10 * step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_fsdp1_is_compressed_by_its_process_group():
    group = compressed_group(wire="int8", min_numel=256)
    cpu = torch.device("cpu")
    found = train(lambda model: FullyShardedDataParallel(model, process_group=group, device_id=cpu))
    plain = train(lambda model: FullyShardedDataParallel(model, device_id=cpu))
    assert set(group.compressed) == {"reduce_scatter_tensor"}
    for own, other in zip(found, plain, strict=True):
        assert torch.allclose(own, other, atol=1e-3)


@on_ranks(2, 4)
def test_pytorchs_ddp_and_sharded_optimizer_take_the_group():
    group, trained = compressed_group(wire="int8", min_numel=256), []
    for process_group in (group, None):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(32, 64), process_group=process_group)
        # SGD: an optimizer that divides by the size of the gradients hides a wrong factor.
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=process_group, lr=1)
        for step in range(3):
            optimizer.zero_grad()
            model(drawn(8, 32, seed=10 * step)).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach() for parameter in model.parameters()])
    assert_same_on_all_ranks(from_all_ranks(trained[0]))
    for own, plain in zip(*trained, strict=True):
        assert torch.allclose(own, plain, atol=2e-3)
    assert group.compressed["all_reduce"] >= 3 * 4 * (32 * 64 + 64)


@on_ranks(2)
def test_formats_that_need_memory_and_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="Formats with error memory need names"):
        compressed_group(wire="int4")
    with pytest.raises(ValueError, match="min_numel"):
        compressed_group(min_numel=0)
    with pytest.raises(TypeError, match=r"group is 'int8'; expected .* Pass wire='int8'\."):
        compressed_group("int8")
