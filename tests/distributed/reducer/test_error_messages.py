"""Error messages begin with PyTorch's own, verbatim, at every level of TORCH_DISTRIBUTED_DEBUG."""

import os
import warnings
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from gradwire.hooks.default_hooks import CastState, fp16_compress_hook
from gradwire.reducer import unused_parameters
from tests.support.ranks import on_ranks
from tests.support.training import WRAPPERS, error_of


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
    return error_of(ddp, BATCH)


def without_gradient_of(parameter, **options):
    def case(wrapper):
        ddp = wrapper(Part(), **options)
        ddp(BATCH).backward(inputs=[p for name, p in ddp.module.named_parameters() if name != parameter])
        return error_of(ddp, BATCH)

    return case


def unused_in_a_static_graph(wrapper):
    ddp = wrapper(Part(), static_graph=True)
    ddp(BATCH).backward()
    ddp(BATCH, 0).backward()
    return error_of(ddp, BATCH)


def backward_of(make_module, *inputs):
    def case(wrapper):
        ddp = wrapper(make_module())
        return error_of(ddp(*inputs).backward)

    return case


def used_more_often_in_a_static_graph(wrapper):
    ddp = wrapper(Part(), static_graph=True)
    ddp(BATCH).backward()
    return error_of(ddp(BATCH, 2).backward)


def used_outside_forward(wrapper):
    """PyTorch's `_test_find_unused_parameters_kwarg`."""
    ddp = wrapper(Part(), find_unused_parameters=True)
    return error_of((ddp(BATCH, 0) + ddp.module.part(BATCH).sum()).backward)


def static_graph_too_late(wrapper):
    ddp = wrapper(Part())
    ddp(BATCH).backward()
    return error_of(ddp._set_static_graph)


def no_future(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return 3


def with_wrong_bucket(state, bucket: int):
    return None


def with_wrong_return(state, bucket: dist.GradBucket) -> torch.Tensor:
    return None


def hook_returns_no_future(wrapper):
    ddp = wrapper(Part())
    ddp.register_comm_hook(None, no_future)
    kind, message = error_of(ddp(BATCH).backward)
    return kind, message[message.index("DDP communication hook's") :]  # before that, PyTorch's is about pybind11


def registered(*hooks):
    """Registers hooks, of which the last is refused; a pair is a state and a hook."""

    def case(wrapper):
        ddp = wrapper(Part())
        for hook in hooks:
            is_builtin = isinstance(hook, dist.BuiltinCommHookType)
            state, hook = hook if isinstance(hook, tuple) else (None, hook)
            register = ddp._register_builtin_comm_hook if is_builtin else partial(ddp.register_comm_hook, state)
            error = error_of(register, hook)
        return error

    return case


def constructed(make_module, **options):
    """Wraps a module with options that are refused."""
    return lambda wrapper: error_of(lambda: wrapper(make_module(), **{name: make() for name, make in options.items()}))


BUILTIN = dist.BuiltinCommHookType.ALLREDUCE
ONCE = "can only be called once."
# Words of PyTorch's message, and the case that raises it.
MESSAGES = [
    ("Expected to have finished reduction in the prior iteration", unused),
    ("Expected to have finished reduction in the prior iteration", without_gradient_of("scale")),
    ("Since `find_unused_parameters=True` is enabled", without_gradient_of("part.weight", find_unused_parameters=True)),
    ("your training graph has changed in this iteration", unused_in_a_static_graph),
    ("Your training graph has changed in this iteration", used_more_often_in_a_static_graph),
    ("Expected to mark a variable ready only once.", backward_of(Part, BATCH, 2)),
    ("Parameter at index 3 with name part.weight has been marked as ready twice", used_outside_forward),
    ("", static_graph_too_late),
    ("Communication hook must be callable.", registered(1)),
    ("Communication hook must be callable.", registered((no_future, CastState()))),
    ("bucket annotation should be dist.GradBucket.", registered(with_wrong_bucket)),
    ("return annotation should be torch.futures.Future[torch.Tensor].", registered(with_wrong_return)),
    (ONCE, registered(no_future, no_future)),
    (ONCE, registered(no_future, BUILTIN)),
    (ONCE, registered(BUILTIN, BUILTIN)),
    ("must return a torch.futures.Future object", hook_returns_no_future),
    ("", backward_of(Words)),
    ("", constructed(lambda: Part().requires_grad_(False))),
    ("", constructed(lambda: nn.Sequential(nn.LazyLinear(3)))),
    ("", constructed(lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))),
    ("", constructed(Part, device_ids=lambda: [0])),
    ("", constructed(Part, device_mesh=lambda: init_device_mesh("cpu", (2,)), process_group=lambda: dist.group.WORLD)),
]


@contextmanager
def debug_level(level):
    with mock.patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG=level):
        dist.set_debug_level_from_env()
        yield
    dist.set_debug_level_from_env()


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
@on_ranks(2)
def test_error_messages_begin_with_those_of_pytorch(level):
    torch.manual_seed(0)
    for words, case in MESSAGES:
        with debug_level(level):
            (their_kind, theirs), (kind, ours) = (case(wrapper) for wrapper in WRAPPERS.values())
        assert theirs and words in theirs
        assert kind == their_kind, theirs
        assert ours.startswith(theirs), f"{ours}\n\ndoes not begin with\n{theirs}"
        rank = dist.get_rank()
        if f"did not receive grad for rank {rank}: 3\n" in theirs:  # PyTorch's names it at two levels only
            assert f"Parameters which did not receive grad for rank {rank}: part.weight\n" in ours


@on_ranks(2)
def test_swapped_state_and_hook_are_refused_with_their_order():
    ddp = WRAPPERS["gradwire"](Part())
    with pytest.raises(
        TypeError, match=r"CastState is not, .* are swapped. The order is register_comm_hook\(state, hook"
    ):
        ddp.register_comm_hook(no_future, CastState())
    ddp.register_comm_hook(CastState(), fp16_compress_hook)  # nothing was registered


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
    unused_parameters._warn_once_that_all_are_used.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[what]()
    found = [str(warning.message) for warning in caught]
    assert [text in warning for warning in found].count(True) == 1, found
