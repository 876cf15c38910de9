"""Error messages begin with PyTorch's own, verbatim, at every level of TORCH_DISTRIBUTED_DEBUG."""

import os
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.reducer import parameters
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, message_of


class Part(nn.Module):
    """A layer of which one use can be left out, repeated, or left to the caller."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.part = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, uses=1):
        x = self.second(self.first(x) * self.scale)
        if uses == 1:
            x = self.part(x)
        for _ in range(uses if uses > 1 else 0):
            x = checkpoint(self.part, x, use_reentrant=True)
        return x.sum()


class Words(nn.Module):
    """An embedding that announces sparse gradients and gets dense ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self):
        return self.embedding.weight.sum()


BATCH = torch.ones(2, 4)


def unused(wrapper):
    ddp = wrapper(Part())
    ddp(BATCH, 0).backward()
    return message_of(ddp, BATCH)


def unused_root_parameter(wrapper):
    ddp = wrapper(Part())
    weights = [parameter for name, parameter in ddp.module.named_parameters() if name != "scale"]
    ddp(BATCH).backward(inputs=weights)
    return message_of(ddp, BATCH)


def unused_though_looked_for(wrapper):
    ddp = wrapper(Part(), find_unused_parameters=True)
    weights = [parameter for name, parameter in ddp.module.named_parameters() if name != "part.weight"]
    ddp(BATCH).backward(inputs=weights)
    return message_of(ddp, BATCH)


def unused_in_a_static_graph(wrapper):
    ddp = wrapper(Part(), static_graph=True)
    ddp(BATCH).backward()
    ddp(BATCH, 0).backward()
    return message_of(ddp, BATCH)


def used_more_often_in_a_static_graph(wrapper):
    ddp = wrapper(Part(), static_graph=True)
    ddp(BATCH).backward()
    return message_of(ddp(BATCH, 2).backward)


def marked_twice(wrapper):
    ddp = wrapper(Part())
    return message_of(ddp(BATCH, 2).backward)


def used_outside_forward(wrapper):
    """PyTorch's `_test_find_unused_parameters_kwarg`."""
    ddp = wrapper(Part(), find_unused_parameters=True)
    return message_of((ddp(BATCH, 0) + ddp.module.part(BATCH).sum()).backward)


def static_graph_too_late(wrapper):
    ddp = wrapper(Part())
    ddp(BATCH).backward()
    return message_of(ddp._set_static_graph)


def hook_registered_twice(wrapper):
    ddp = wrapper(Part())
    ddp.register_comm_hook(None, no_future)
    return message_of(ddp.register_comm_hook, None, no_future)


def builtin_hook_registered_twice(wrapper):
    ddp = wrapper(Part())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return message_of(ddp._register_builtin_comm_hook, dist.BuiltinCommHookType.ALLREDUCE)


def hook_returns_no_future(wrapper):
    ddp = wrapper(Part())
    ddp.register_comm_hook(None, no_future)
    message = message_of(ddp(BATCH).backward)
    return message[message.index("DDP communication hook's") :]  # before that, PyTorch's is about pybind11


def no_future(state, bucket):
    return 3


def dense_gradient(wrapper):
    ddp = wrapper(Words())
    return message_of(ddp().backward)


MESSAGES = {
    case.__name__: case
    for case in (
        unused,
        unused_root_parameter,
        unused_though_looked_for,
        unused_in_a_static_graph,
        used_more_often_in_a_static_graph,
        marked_twice,
        used_outside_forward,
        static_graph_too_late,
        hook_registered_twice,
        builtin_hook_registered_twice,
        hook_returns_no_future,
        dense_gradient,
    )
}


@contextmanager
def debug_level(level):
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG=level):
        dist.set_debug_level_from_env()
        yield
    dist.set_debug_level_from_env()


# What PyTorch's own tests look for.
PARTS = {
    "unused": [
        "Expected to have finished reduction in the prior iteration",
        "passing the keyword argument `find_unused_parameters=True`",
        "`forward` function outputs participate in calculating loss",
    ],
    "unused_though_looked_for": ["Since `find_unused_parameters=True` is enabled"],
    "unused_in_a_static_graph": ["your training graph has changed in this iteration"],
    "used_more_often_in_a_static_graph": ["Your training graph has changed in this iteration"],
    "marked_twice": ["Expected to mark a variable ready only once."],
    "used_outside_forward": ["Parameter at index 3 with name part.weight has been marked as ready twice"],
}


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
@on_ranks(2)
def test_error_messages_begin_with_those_of_pytorch(level):
    torch.manual_seed(0)
    for name, case in MESSAGES.items():
        with debug_level(level):
            theirs, ours = (case(wrapper) for wrapper in WRAPPERS.values())
        assert theirs, name
        assert ours.startswith(theirs), f"{name}:\n{ours}\n\ndoes not begin with\n{theirs}"
        for part in PARTS.get(name, []):
            assert part in ours, name
        if name in ("unused", "unused_in_a_static_graph", "unused_though_looked_for"):
            rank = dist.get_rank()
            assert f"Parameter indices which did not receive grad for rank {rank}: 3\n" in ours, name
            assert f"Parameters which did not receive grad for rank {rank}: part.weight\n" in ours, name
            advice = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
            assert (advice in ours) == (level == "OFF"), name


def misfit():
    ddp = WRAPPERS["gradwire"](Part())
    ddp.module.part.weight.grad = torch.zeros(4, 4).t()
    ddp(BATCH).backward()


def with_a_graph():
    ddp = WRAPPERS["gradwire"](Part())
    ddp(BATCH).backward(create_graph=True)


def nothing_unused():
    ddp = WRAPPERS["gradwire"](Part(), find_unused_parameters=True)
    for _ in range(3):
        ddp(BATCH).backward()


# PyTorch's come from C++ and mostly go past the warnings of Python, so the texts stand here.
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("misfit", "Grad strides do not match bucket view strides. This may indicate grad was not created according"),
        ("misfit", "grad.sizes() = [4, 4], strides() = [1, 4]\nbucket_view.sizes() = [4, 4], strides() = [4, 1]"),
        ("with_a_graph", "Using DistributedDataParallel with create_graph=True  is not well-supported."),
        ("nothing_unused", "find_unused_parameters=True was specified in DDP constructor, but did not find any unused"),
    ],
)
@on_ranks(2)
def test_warnings_begin_with_those_of_pytorch(what, text):
    parameters._warn_once_that_all_are_used.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[what]()
    found = [str(warning.message) for warning in caught]
    assert [text in warning for warning in found].count(True) == 1, found
