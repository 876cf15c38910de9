"""Being PyTorch's class, copies, subgroups, and process groups that come and go."""

import gc
import inspect
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import gradwire
from gradwire.comm.connections import executor_for
from gradwire.reducer import distributed
from gradwire.reducer.logger import Logger
from gradwire.reducer.reducer import Reducer
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    WRAPPERS,
    build,
    error_of,
    gradients,
    own_batches,
    register,
    train,
    train_steps,
    wrapped,
)

LATER_ARGUMENTS = {"lazy_bucket_allocation"}  # since PyTorch 2.15
OWN_ARGUMENTS = {"check_every"}


@on_ranks(1)
def test_argument_missing_in_this_pytorch_raises_unless_left_out():
    earlier = {name: value for name, value in distributed._DEFAULTS.items() if name != "skip_all_reduce_unused_params"}
    with mock.patch.object(distributed, "_DEFAULTS", earlier):
        assert error_of(gradwire.DistributedDataParallel, build("mlp")) is None
        kind, text = error_of(gradwire.DistributedDataParallel, build("mlp"), skip_all_reduce_unused_params=True)
    assert kind == "TypeError" and text.startswith("skip_all_reduce_unused_params: PyTorch ")


@on_ranks(1)
def test_arguments_left_out_are_left_to_pytorch():
    other = distributed._DEFAULTS | {"broadcast_buffers": True}  # as in PyTorch 2.11
    with (
        mock.patch.object(distributed, "_DEFAULTS", other),
        mock.patch.object(torch.nn.parallel.DistributedDataParallel, "__init__", return_value=None) as init,
    ):
        gradwire.DistributedDataParallel(build("mlp"))
    assert init.call_args.kwargs == {"init_sync": False}


def arguments(ddp):
    names = list(inspect.signature(type(ddp)).parameters)
    return [name for name in names if name not in LATER_ARGUMENTS | OWN_ARGUMENTS]


@on_ranks(2, 3)
def test_arguments_state_dict_and_logging_data_match_pytorch():
    theirs, ours = models = [wrapped(wrapper, "conv") for wrapper in WRAPPERS]
    for ddp in models:
        train_steps(ddp, 4)
    assert isinstance(ours, torch.nn.parallel.DistributedDataParallel)
    assert isinstance(ours.reducer, Reducer) and isinstance(ours.logger, Logger)
    logged = [ddp._get_ddp_logging_data() for ddp in models]
    for key in ("rebuilt_bucket_sizes", "has_rebuilt_buckets", "world_size", "rank"):
        assert logged[1][key] == logged[0][key], key
    for surface in (
        arguments,
        lambda ddp: list(ddp.state_dict()),
        lambda ddp: list(get_model_state_dict(ddp)),
        lambda ddp: ddp._has_rebuilt_buckets,
    ):
        assert surface(ours) == surface(theirs)


# A group that only some ranks belong to must not put the others out of step.
@on_ranks(3)
def test_subgroup_and_default_group_train_in_turns(tmp_path):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=size)
    subgroup, records = dist.new_group([0, 1]), []
    for group, members in ((subgroup, 2), (None, 3), (subgroup, 2), (None, 3)):
        if rank < members:
            records.append(train("gradwire", "mlp", hook="fp16", group=group, bucket_cap_mb=SMALL, steps=2))
    *results, last = from_all_ranks(records)
    assert len(last) == 2
    for first, second, third, fourth in results:
        assert_same_bits(third, first)
        assert_same_bits(fourth, second)
        assert_same_bits(last[1], fourth)


@on_ranks(2, 3)
def test_each_group_has_one_executor():
    group = dist.new_group(list(range(dist.get_world_size())))
    cpu = torch.device("cpu")
    first, second, third = executor_for(None, cpu), executor_for(None, cpu), executor_for(group, cpu)
    assert first is second is executor_for(dist.group.WORLD, cpu) is not third
    assert first.transport.group is not dist.group.WORLD and third.transport.group is not group
    assert first.transport.world_size == third.transport.world_size == dist.get_world_size()


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2, 3)
def test_deleted_model_is_freed(hook):
    model = build("mlp")
    ddp = gradwire.DistributedDataParallel(model, bucket_cap_mb=SMALL)
    register(ddp, hook)
    for _ in range(3):
        ddp(*model.batch(torch.Generator())).backward()
    references = [weakref.ref(thing) for thing in (model, ddp, ddp.reducer, model.layers[0].weight)]
    del model, ddp
    gc.collect()
    assert [reference() is None for reference in references] == [True] * 4


@on_ranks(2, 3)
def test_module_that_outlives_its_wrapper_has_local_gradients():
    ddp = wrapped()
    model = ddp.module
    train_steps(ddp)
    del ddp
    gc.collect()
    assert_same_bits(local_gradients(model), local_gradients(build("mlp")))


@on_ranks(2, 3)
def test_removed_autograd_hooks_leave_gradients_alone():
    ddp = wrapped()
    ddp._remove_autograd_hooks()
    assert_same_bits(train_steps(ddp), [local_gradients(build("mlp"))])


def local_gradients(model):
    model.zero_grad()
    model(*model.batch(own_batches())).backward()
    return gradients(model)
