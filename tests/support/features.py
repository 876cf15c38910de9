"""Models, plans, and combinations of hooks and views for the tests of the reducer's features.

The oracle is PyTorch's DDP in the same process group wherever that is right, with the same hook if there is one; else
the values that the definition of the feature gives.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.conformance.no_stream import NoStream
from tests.support.bits import assert_same_bits
from tests.support.training import WRAPPERS, gradients, register

DDP = gradwire.DistributedDataParallel
CAP = 0.0001  # MiB: buckets of two or three parameters of `Parts`
MixedPrecision = torch.nn.parallel.distributed._MixedPrecision


@contextmanager
def no_streams():
    """Streams and events do nothing: on CPUs, mixed precision runs with such streams only."""
    with (
        mock.patch.multiple(torch, Stream=NoStream, Event=NoStream),
        mock.patch.object(torch.accelerator, "current_stream", NoStream),
    ):
        yield


def flat_hook(group, bucket):
    """A hook as in PyTorch's documentation."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


hooks = pytest.mark.parametrize("hook", ["none", "allreduce", "fp16", "powersgd", "flat"])
# Of all pairs of hook and view, those that take different code paths in the buckets.
WAYS = [(hook, view) for hook in ("none", "flat") for view in (False, True)] + [("powersgd", False), ("fp16", True)]
UNDER_HOOKS = [*WAYS[2:], ("allreduce", False), ("powersgd", True)]
# Run by `make test`; the other pairs are slow.
QUICK = [("none", False), ("flat", True), ("powersgd", False)]


def over(pairs):
    marks = {pair: () if pair in QUICK else pytest.mark.slow for pair in pairs}
    names = {(hook, view): f"{hook}-{'views' if view else 'copies'}" for hook, view in pairs}
    return pytest.mark.parametrize(
        ("hook", "view"), [pytest.param(*pair, marks=marks[pair], id=names[pair]) for pair in pairs]
    )


ways = over(WAYS)
under_hooks = over(UNDER_HOOKS)
views = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
clearings = pytest.mark.parametrize("clear", ["to-none", "to-zero", "kept"])
FEATURES = {
    "find-unused": {"find_unused_parameters": True},
    "skip-unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
}
features = pytest.mark.parametrize("feature", FEATURES)


def wrap(wrapper, module, hook="none", view=False, **options):
    options = (
        {"gradient_as_bucket_view": view}
        | ({} if "bucket_cap_mb_list" in options else {"bucket_cap_mb": CAP})
        | options
    )
    ddp = WRAPPERS[wrapper](module, **options)
    if hook != "none":
        register(ddp, (options.get("process_group"), flat_hook) if hook == "flat" else hook)
    return ddp


def zero_grad(model, clear):
    if clear != "kept":
        model.zero_grad(set_to_none=clear == "to-none")


def assert_parity(case, **options):
    """``case(wrapper, **options)`` gives the same bits with PyTorch's class and gradwire's; returns ours."""
    theirs, ours = case("pytorch", **options), case("gradwire", **options)
    assert_same_bits(ours, theirs)
    return ours


class Parts(nn.Module):
    """Layers, of which a forward uses the given ones, in that order."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, use, run=lambda part, x: part(x)):
        for i in use:
            x = run(self.parts[i], x).tanh()
        return x.square().sum()


class AfterAnother(Parts):
    """Begins with a layer that no checkpoint wraps."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(4, 4)

    def forward(self, x, use, **options):
        return super().forward(self.begin(x), use, **options)


def reentrant(part, x):
    return checkpoint(part, x, use_reentrant=True)


# The micro-batches of a step on a rank; all but the last under no_sync. Layer 4 is used nowhere in the first two.
PLANS = {
    "on some ranks": lambda step, rank: [(0, 1, 2, 3) if rank == 0 else (0, 3)],
    "changing": lambda step, rank: [[i for i in range(4) if (i + step + rank) % 3]],
    "used by nobody at times": lambda step, rank: [[i for i in range(5) if i != step % 3]],
    "only in no_sync": lambda step, rank: [(0, 1 + rank), (3, 4)],
    "only in no_sync at times": lambda step, rank: [(0, 1)] * (step % 3) + [(0, 2 + rank % 2)],
}
STATIC_PLANS = {
    "all": lambda step, rank: [(0, 1, 2, 3, 4)],
    "unused": lambda step, rank: [(0, 2, 3)],
    "repeated": lambda step, rank: [(0, 2, 3, 2, 0)],
}
plans = pytest.mark.parametrize("plan", PLANS)
static_plans = pytest.mark.parametrize("plan", STATIC_PLANS)


def run_plan(wrapper, plan, clear="to-none", model=Parts, steps=5, run=None, **options):
    torch.manual_seed(0)
    ddp = wrap(wrapper, model(), **options)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    forward_options = {} if run is None else {"run": run}
    seen = []
    for step in range(steps):
        zero_grad(ddp, clear)
        *local, last = (PLANS | STATIC_PLANS)[plan](step, rank)
        for use in local:
            with ddp.no_sync():
                ddp(torch.randn(3, 4, generator=generator), use, **forward_options).backward()
        ddp(torch.randn(3, 4, generator=generator), last, **forward_options).backward()
        seen.append(gradients(ddp))
    return seen
