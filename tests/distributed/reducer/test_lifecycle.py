"""Being PyTorch's class, copies, subgroups, and process groups that come and go."""

import gc
import inspect
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import gradwire
from gradwire.reducer import distributed
from gradwire.reducer.logger import Logger
from gradwire.reducer.reducer import Reducer
from tests.support.bits import assert_same_bits
from tests.support.ranks import on_ranks
from tests.support.training import (
    HOOKS,
    SMALL,
    WRAPPERS,
    build,
    error_of,
    gradients,
    own_batches,
    register,
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
    for _ in range(100):  # threads of the executor and of gloo may still be in the callbacks of the last future
        gc.collect()
        if all(reference() is None for reference in references):
            return
    raise AssertionError([reference() for reference in references])


@on_ranks(2, 3)
def test_module_that_outlives_its_wrapper_has_local_gradients():
    ddp = wrapped()
    model = ddp.module
    train_steps(ddp)
    del ddp
    gc.collect()
    assert_same_bits(local_gradients(model), local_gradients(build("mlp")))


def local_gradients(model):
    model.zero_grad()
    model(*model.batch(own_batches())).backward()
    return gradients(model)
