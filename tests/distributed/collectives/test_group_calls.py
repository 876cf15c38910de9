"""A table of the calls that a process group takes: a `compressed_group` does what the plain group does.

bf16 holds the numbers of the tensors and of their sums exactly, so that results are equal, compressed or not.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import compressed_group
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks

NUMEL, SMALLEST = 32, 16  # of tensors, and of those that are compressed
CALLS = {}


def call(function):
    CALLS[function.__name__] = function
    return function


def counted(*shape):
    """0 to 15, again and again, plus the rank."""
    return (torch.arange(torch.Size(shape).numel()) % 16).view(shape).float() + dist.get_rank()


def lists():
    return [torch.zeros(NUMEL) for _ in range(dist.get_world_size())]


def ranks():
    return dist.get_rank(), dist.get_world_size()


# All-reduces.


@call
def all_reduce(group):
    dist.all_reduce(tensor := counted(NUMEL), group=group)
    return tensor


@call
def all_reduce_async(group):
    work = dist.all_reduce(tensor := counted(NUMEL), group=group, async_op=True)
    work.wait()
    return tensor, work.is_completed()


@call
def all_reduce_future(group):
    dist.all_reduce(tensor := counted(NUMEL), group=group, async_op=True).get_future().wait()
    return tensor


@call
def all_reduce_mean(group):
    dist.all_reduce(tensor := counted(NUMEL), dist.ReduceOp.AVG, group=group)
    return tensor


@call
def all_reduce_max(group):
    dist.all_reduce(tensor := counted(NUMEL), dist.ReduceOp.MAX, group=group)
    return tensor


@call
def all_reduce_product(group):
    dist.all_reduce(tensor := counted(NUMEL), dist.ReduceOp.PRODUCT, group=group)
    return tensor


@call
def all_reduce_of_integers(group):
    dist.all_reduce(tensor := counted(NUMEL).long(), group=group)
    return tensor


@call
def all_reduce_of_bfloat16(group):
    dist.all_reduce(tensor := counted(NUMEL).bfloat16(), group=group)
    return tensor


@call
def all_reduce_of_complex(group):
    dist.all_reduce(tensor := torch.complex(counted(NUMEL), counted(NUMEL)), group=group)
    return tensor


@call
def all_reduce_of_sparse(group):
    dist.all_reduce(tensor := counted(NUMEL, 2).to_sparse(), group=group)
    return tensor.to_dense()


@call
def all_reduce_transposed(group):
    dist.all_reduce(tensor := counted(NUMEL, 4).t(), group=group)
    return tensor


@call
def all_reduce_0d(group):
    dist.all_reduce(tensor := counted(), group=group)
    return tensor


@call
def all_reduce_empty(group):
    dist.all_reduce(tensor := counted(0), group=group)
    return tensor


@call
def all_reduce_in_inference_mode(group):
    with torch.inference_mode():
        dist.all_reduce(tensor := counted(NUMEL), group=group)
    return tensor


@call
def all_reduce_coalesced(group):
    dist.all_reduce_coalesced(tensors := [counted(NUMEL), counted(3)], group=group)
    return tensors


# Reduce-scatters.


@call
def reduce_scatter_tensor(group):
    output = torch.zeros(NUMEL)
    dist.reduce_scatter_tensor(output, counted(dist.get_world_size() * NUMEL), group=group)
    return output


@call
def reduce_scatter_single(group):
    output = torch.zeros(NUMEL)
    function = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # since torch 2.13
    function(output, counted(dist.get_world_size() * NUMEL), group=group)
    return output


@call
def reduce_scatter_of_a_list(group):
    output = torch.zeros(NUMEL)
    dist.reduce_scatter(output, [counted(NUMEL) for _ in lists()], group=group)
    return output


# All else is passed on.


@call
def all_gather(group):
    dist.all_gather(outputs := lists(), counted(NUMEL), group=group)
    return outputs


@call
def all_gather_into_tensor(group):
    output = torch.zeros(dist.get_world_size() * NUMEL)
    dist.all_gather_into_tensor(output, counted(NUMEL), group=group)
    return output


@call
def all_gather_single(group):
    output = torch.zeros(dist.get_world_size() * NUMEL)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, counted(NUMEL), group=group)
    return output


@call
def all_gather_object(group):
    rank, size = ranks()
    dist.all_gather_object(outputs := [None] * size, {"rank": rank}, group=group)
    return outputs


@call
def broadcast(group):
    dist.broadcast(tensor := counted(NUMEL), 1, group=group)
    return tensor


@call
def broadcast_object_list(group):
    dist.broadcast_object_list(objects := [dist.get_rank(), "text"], 1, group=group)
    return objects


@call
def reduce(group):
    dist.reduce(tensor := counted(NUMEL), 0, group=group)
    return tensor if dist.get_rank() == 0 else None


@call
def gather(group):
    outputs = lists() if dist.get_rank() == 0 else None
    dist.gather(counted(NUMEL), outputs, 0, group=group)
    return outputs


@call
def gather_object(group):
    rank, size = ranks()
    outputs = [None] * size if rank == 0 else None
    dist.gather_object(rank, outputs, 0, group=group)
    return outputs


@call
def scatter(group):
    rank, size = ranks()
    dist.scatter(
        output := torch.zeros(NUMEL), [counted(NUMEL) + i for i in range(size)] if rank == 0 else None, 0, group
    )
    return output


@call
def scatter_object_list(group):
    rank, size = ranks()
    dist.scatter_object_list(output := [None], list(range(size)) if rank == 0 else [None] * size, 0, group)
    return output


@call
def all_to_all(group):
    dist.all_to_all(outputs := lists(), [counted(NUMEL) + i for i in range(dist.get_world_size())], group=group)
    return outputs


@call
def all_to_all_single(group):
    output = torch.zeros(dist.get_world_size() * NUMEL)
    dist.all_to_all_single(output, counted(dist.get_world_size() * NUMEL), group=group)
    return output


@call
def barrier(group):
    dist.barrier(group=group)


@call
def monitored_barrier(group):
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=30))


@call
def send_and_receive(group):
    tensor = counted(NUMEL)
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0, group=group)
    return tensor


@call
def send_and_receive_async(group):
    tensor = counted(NUMEL)
    if dist.get_rank() == 0:
        dist.isend(tensor, 1, group=group).wait()
    elif dist.get_rank() == 1:
        dist.irecv(tensor, 0, group=group).wait()
    return tensor


@call
def receive_from_any_rank(group):
    tensor = counted(NUMEL)
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
    elif dist.get_rank() == 1:
        assert dist.recv(tensor, None, group=group) == 0
    return tensor


@call
def batch_of_sends_and_receives(group):
    rank, size = ranks()
    received = torch.zeros(NUMEL)
    operations = [
        dist.P2POp(dist.isend, counted(NUMEL), (rank + 1) % size, group=group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@call
def send_object_list(group):
    objects = [dist.get_rank()]
    if dist.get_rank() == 0:
        dist.send_object_list(objects, 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv_object_list(objects, 0, group=group)
    return objects


# Names, and what finds groups by them.


@call
def functional_all_reduce(group):
    return functional.all_reduce(counted(NUMEL), "sum", group) + 0


@call
def functional_all_gather(group):
    return functional.all_gather_tensor(counted(NUMEL), 0, group) + 0


@call
def functional_reduce_scatter(group):
    return functional.reduce_scatter_tensor(counted(dist.get_world_size() * NUMEL), "sum", 0, group) + 0


@call
def functional_all_to_all(group):
    return functional.all_to_all_single(counted(dist.get_world_size() * NUMEL), None, None, group) + 0


@call
def functional_broadcast(group):
    return functional.broadcast(counted(NUMEL), 1, group) + 0


@call
def device_mesh(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh.get_group().group_name == group.group_name
    return mesh.get_local_rank(), mesh.size()


@call
def dtensor(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = distribute_tensor(torch.arange(24.0).view(12, 2), mesh, [Shard(0)])
    return (2 * sharded).redistribute(mesh, [Replicate()]).to_local(), sharded.sum().full_tensor() + 0


@call
def fsdp2(group):
    torch.manual_seed(0)
    model = nn.Linear(8, 12)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 8) * (1 + dist.get_rank() % 2)).sum().backward()
    return model.weight.grad.full_tensor() + 0, model.bias.grad.full_tensor() + 0  # waits


@call
def ddp(group):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    model(torch.ones(2, 8) * (1 + dist.get_rank() % 2)).sum().backward()
    return model.module.weight.grad


@call
def ranks_and_backend(group):
    rank = dist.get_rank()
    return (
        *(dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group), group.rank()),
        *(dist.get_global_rank(group, 0), dist.get_group_rank(group, rank), group.size(), dist.get_backend(group)),
    )


@call
def timeout(group):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)


def outcome(function, group):
    """The result of a call, or the text of its error."""
    try:
        return function(group)
    except Exception as error:  # gloo does not implement some calls
        return str(error)


@on_ranks(2, 4)
def test_calls_on_a_compressed_group_do_what_those_on_the_plain_group_do():
    plain = dist.new_group()
    group = compressed_group(dist.new_group(), wire="bf16", min_numel=SMALLEST)
    assert len(CALLS) >= 40
    for name, function in CALLS.items():
        try:
            assert_equal(outcome(function, group), outcome(function, plain))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert group.compressed.keys() == {"all_reduce", "reduce_scatter_tensor"}


def assert_equal(found, expected):
    if isinstance(found, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            assert_equal(own, other)
    elif torch.is_tensor(found):
        assert_same_bits(found, expected)
    else:
        assert found == expected


@on_ranks(2)
def test_tensors_with_gaps_are_compressed_and_what_lies_between_stays():
    """gloo's own all-reduce takes the memory from the first element on, whatever the strides are."""
    group = compressed_group(wire="bf16", min_numel=SMALLEST)
    whole, other = counted(NUMEL, 4), counted(NUMEL, 4)
    dist.all_reduce(whole[:, :2], group=group)
    dist.all_reduce(exact := other[:, :2].contiguous())
    other[:, :2] = exact
    assert_same_bits(whole, other)


@on_ranks(2, 3)
def test_destroyed_group_leaves_the_plain_group_as_it_is():
    plain = dist.new_group()
    name = plain.group_name
    group = compressed_group(plain, wire="bf16", min_numel=SMALLEST)
    dist.all_reduce(counted(NUMEL), group=group)
    assert (plain.group_name, group.group_name != name) == (name, True)
    dist.destroy_process_group(group)
    dist.all_reduce(tensor := counted(NUMEL), group=plain)
    size = dist.get_world_size()
    assert_same_bits(tensor, (torch.arange(NUMEL) % 16) * float(size) + sum(range(size)))
    again = compressed_group(plain, wire="bf16", min_numel=SMALLEST)
    dist.all_reduce(other := counted(NUMEL), group=again)
    assert_same_bits(other, tensor)


@on_ranks(3)
def test_order_of_ranks_is_that_of_the_plain_group():
    plain = dist.new_group([2, 0, 1], sort_ranks=False)
    group = compressed_group(plain, wire="bf16", min_numel=SMALLEST)
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(plain)
    assert (dist.get_rank(group), group.rank()) == (dist.get_rank(plain), plain.rank())
    dist.all_gather(found := lists(), counted(NUMEL), group=group)
    dist.all_gather(expected := lists(), counted(NUMEL), group=plain)
    assert_same_bits(found, expected)
