"""Being PyTorch's class, copies, subgroups, and process groups that come and go."""

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import gradwire
from gradwire.comm.connections import executor_for
from gradwire.hooks import default_hooks
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.reducer.ddp_interface import Logger
from gradwire.reducer.reducer import Reducer
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.training import HOOKS, SMALL, WRAPPERS, build, gradients, register, train

LATER_ARGUMENTS = {"lazy_bucket_allocation"}  # since PyTorch 2.15


def arguments(ddp):
    names = list(inspect.signature(type(ddp)).parameters)
    return [name for name in names if name not in LATER_ARGUMENTS]


def surface():
    ours = gradwire.DistributedDataParallel(build("conv"), bucket_cap_mb=SMALL)
    theirs = WRAPPERS["pytorch"](build("conv"), bucket_cap_mb=SMALL)
    for _ in range(4):
        for ddp in (ours, theirs):
            ddp(*ddp.module.batch(torch.Generator())).backward()
    logged = [ddp._get_ddp_logging_data() for ddp in (theirs, ours)]
    return {
        "is PyTorch's": isinstance(ours, torch.nn.parallel.DistributedDataParallel),
        "is gradwire's": isinstance(ours.reducer, Reducer) and isinstance(ours.logger, Logger),
        "arguments": (arguments(theirs), arguments(ours)),
        "state": (list(theirs.state_dict()), list(ours.state_dict())),
        "checkpoint": (list(get_model_state_dict(theirs)), list(get_model_state_dict(ours))),
        "rebuilt": (theirs._has_rebuilt_buckets, ours._has_rebuilt_buckets),
        "logged": tuple(
            {key: data[key] for key in ("rebuilt_bucket_sizes", "has_rebuilt_buckets", "world_size", "rank")}
            for data in logged
        ),
    }


def test_surface_matches_pytorch(world):
    for found in world.run(surface):
        assert found.pop("is PyTorch's")
        assert found.pop("is gradwire's")
        for name, (theirs, ours) in found.items():
            assert ours == theirs, name


def mesh_and_group():
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return [
        train(wrapper, "mlp", steps=3, bucket_cap_mb=SMALL, **options)
        for options in ({}, {"device_mesh": mesh})
        for wrapper in WRAPPERS
    ]


def test_device_mesh_matches_pytorch(world):
    for records in world.run(mesh_and_group):
        for record in records:
            assert_same_bits(record, records[0])


def copies(wrapper, how, trained, hook):
    """Gradients of a model and of its copy on the same batches, or the type of the error."""
    model = WRAPPERS[wrapper](build("mlp"), bucket_cap_mb=SMALL)
    if hook is not None:
        register(model, (None, HOOKS[hook](None)[1]) if hook == "fp16" else (ScaledCastState(), scaled_cast_hook))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(trained):
        model.zero_grad()
        model(*model.module.batch(generator)).backward()
    try:
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        elif how == "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        else:
            twin = copy.deepcopy(model)
    except Exception as error:
        return type(error).__name__
    results = []
    for _ in range(3):
        batch = model.module.batch(generator)
        step = []
        for ddp in (model, twin):
            ddp.zero_grad()
            ddp(*batch).backward()
            step.append(gradients(ddp))
        results.append(step)
    return results


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("how", ["pickle", "save", "deepcopy"])
def test_copies_work_as_pytorchs(world, how, trained):
    ours = world.run(copies, wrapper="gradwire", how=how, trained=trained, hook=None)
    theirs = world.run(copies, wrapper="pytorch", how=how, trained=trained, hook=None)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert_same_bits(of_ours, of_theirs)
        for model, twin in of_ours[2:]:  # the copy starts with one bucket again, whose sums may have another order
            for name in model:
                torch.testing.assert_close(twin[name], model[name])


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("hook", ["fp16", "scaled_fp16"])
def test_copies_keep_their_hook(worlds, how, hook):
    # On two ranks the bits do not depend on the buckets.
    for steps in worlds(2).run(copies, wrapper="gradwire", how=how, trained=3, hook=hook):
        for model, twin in steps:
            assert_same_bits(twin, model)


def initialise_anew(path, number):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}_{number}", rank=rank, world_size=size)


def several_lives(path):
    records = []
    for life in range(3):
        records.append([train(wrapper, "mlp", hook="fp16", bucket_cap_mb=SMALL) for wrapper in WRAPPERS])
        records[-1].append(train("gradwire", "mlp", bucket_cap_mb=SMALL))
        initialise_anew(path, life)
    return records


def test_training_continues_with_a_new_process_group(world, tmp_path):
    for lives in world.run(several_lives, path=tmp_path / "rendezvous"):
        for records in lives:
            assert_same_bits(records, lives[0])


def several_groups(path):
    """A subgroup without the last rank, then the default group, then the subgroup again; each trains."""
    initialise_anew(path, 0)
    size = dist.get_world_size()
    subgroup = dist.new_group(list(range(size - 1)))
    records = []
    for group, members in ((subgroup, size - 1), (None, size), (subgroup, size - 1), (None, size)):
        if dist.get_rank() < members:
            records.append(train("gradwire", "mlp", hook="fp16", group=group, bucket_cap_mb=SMALL, steps=2))
    return records


# A group that only some ranks belong to must not put the others out of step.
def test_executors_of_a_subgroup_and_of_the_default_group(worlds, tmp_path):
    results = worlds(3).run(several_groups, path=tmp_path / "rendezvous")
    assert [len(records) for records in results] == [4, 4, 2]
    for records in results[:2]:
        assert_same_bits(records[2], records[0])
        assert_same_bits(records[3], records[1])
    assert_same_bits(results[2][1], results[0][3])


def executors():
    group = dist.new_group(list(range(dist.get_world_size())))
    cpu = torch.device("cpu")
    first, second, third = executor_for(None, cpu), executor_for(None, cpu), executor_for(group, cpu)
    return {
        "kept": first is second,
        "default": first is executor_for(dist.group.WORLD, cpu),
        "apart": first is not third,
        "own group": first.transport.group is not dist.group.WORLD and third.transport.group is not group,
        "size": first.transport.world_size == third.transport.world_size == dist.get_world_size(),
    }


def test_one_executor_for_each_group(world):
    for found in world.run(executors):
        assert all(found.values()), found


def leftovers(hook):
    """Whether a model, its wrapper and its gradients go away when nobody holds them."""
    model = build("mlp")
    ddp = gradwire.DistributedDataParallel(model, bucket_cap_mb=SMALL)
    register(ddp, hook)
    for _ in range(3):
        ddp(*model.batch(torch.Generator())).backward()
    references = [weakref.ref(thing) for thing in (model, ddp, ddp.reducer, model.layers[0].weight)]
    del model, ddp
    gc.collect()
    return [reference() is None for reference in references]


@pytest.mark.parametrize("hook", HOOKS)
def test_deleted_model_is_freed(world, hook):
    assert world.run(leftovers, hook=hook) == [[True] * 4] * world.size


def unwrapped_again():
    """A module that outlives its wrapper trains alone, without communication."""
    model = build("mlp")
    ddp = gradwire.DistributedDataParallel(model, bucket_cap_mb=SMALL)
    ddp(*model.batch(torch.Generator())).backward()
    del ddp
    gc.collect()
    model.zero_grad()
    batch = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    model(*batch).backward()
    alone = build("mlp")
    alone(*batch).backward()
    return gradients(model), gradients(alone)


def test_module_outlives_its_wrapper(world):
    for model, alone in world.run(unwrapped_again):
        assert_same_bits(model, alone)


def hooks_removed():
    ddp = gradwire.DistributedDataParallel(build("mlp"), bucket_cap_mb=SMALL)
    ddp._remove_autograd_hooks()
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    ddp(*batch).backward()
    alone = build("mlp")
    alone(*batch).backward()
    return gradients(ddp), gradients(alone)


def test_removed_autograd_hooks_leave_gradients_alone(world):
    for ours, alone in world.run(hooks_removed):
        assert_same_bits(ours, alone)


def threads_after_many_models():
    """Names of the threads that remain; the executor's one is shared by all."""
    for _ in range(3):
        train("gradwire", "mlp", hook=(None, default_hooks.fp16_compress_hook), steps=2)
    return sum(thread.name == "gradwire" for thread in threading.enumerate())


def test_models_of_one_group_share_one_thread(worlds):
    before = worlds(2).run(threads_after_many_models)
    assert worlds(2).run(threads_after_many_models) == before


def initial_parameters():
    torch.manual_seed(dist.get_rank())
    ddp = gradwire.DistributedDataParallel(torch.nn.Linear(3, 3))
    synchronised = ddp.module.weight.detach().clone()
    torch.manual_seed(dist.get_rank())
    other = gradwire.DistributedDataParallel(torch.nn.Linear(3, 3), init_sync=False)
    return synchronised, other.module.weight.detach().clone()


def test_initial_parameters_are_those_of_rank_0(world):
    results = world.run(initial_parameters)
    assert_same_on_all_ranks([synchronised for synchronised, _ in results])
    assert not torch.equal(results[0][1], results[1][1])
    assert_same_bits(results[0][0], results[0][1])
