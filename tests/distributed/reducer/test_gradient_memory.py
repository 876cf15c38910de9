"""Before the end of a backward, the reducer writes only memory that nothing else can reach.

Autograd may give a parameter a gradient whose memory it goes on reading: ``h + p.view(...)`` makes h and p share one.
Layers here wait in the backward until every launched bucket is done, so a result that is written too early is written
before autograd reads on.
"""

import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from sys import getrefcount as real_count
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.reducer import torch_internals
from tests.support.bits import differences
from tests.support.ranks import on_ranks
from tests.support.rehearsal import gpu_on_cpu, register_backend
from tests.support.training import HOOKS, SMALLEST, WRAPPERS, gradients, register, train_steps, wrapped

WIDTH, ROWS = 4, 3
STEPS = 3
PROPERTY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


class Wait(torch.autograd.Function):
    """The identity, whose backward calls ``wait`` first."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


class Saves(torch.autograd.Function):
    """x + p, whose gradient for p is a view of a tensor that it has saved, or keeps as an attribute."""

    @staticmethod
    def forward(ctx, x, p, kept):
        gradient = torch.linspace(-1, 1, 2 * p.numel())
        if kept is None:
            ctx.save_for_backward(gradient)
        else:
            ctx.kept = gradient
            kept.append((gradient, gradient.clone()))
        return x + p

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors or (ctx.kept,)  # read once: a checkpoint recomputes them for one use
        return gradient, saved[: ROWS * WIDTH].view(ROWS, WIDTH), None


# How a layer uses its parameter p [3, 4] and, in some, a second one q of the same shape; h is [3, 4]. ``kept`` collects
# pairs of a tensor and a copy of it, which must stay equal during the backward.
USES = {
    "direct": lambda h, p, q, kept: h + p,
    "view": lambda h, p, q, kept: (h.view(-1) + p.view(-1)).view(ROWS, WIDTH),
    "unsqueezed": lambda h, p, q, kept: (h[None] + p.unsqueeze(0))[0],
    "indexed": lambda h, p, q, kept: (h[None] + p[None]).squeeze(0),
    "reshaped": lambda h, p, q, kept: (h.reshape(2, -1) + p.reshape(2, -1)).reshape(ROWS, WIDTH),
    "transposed": lambda h, p, q, kept: (h.t() + p.t()).t(),
    "expanded": lambda h, p, q, kept: (h.expand(2, -1, -1) + p.expand(2, -1, -1)).mean(0),
    "two views": lambda h, p, q, kept: (h[None] + p[None] + q[None])[0],
    "concatenated": lambda h, p, q, kept: h + torch.cat([p, q])[:ROWS] + torch.cat([p, q])[ROWS:],
    "stacked": lambda h, p, q, kept: (h + torch.stack([p, q])).sum(0),
    "chunked": lambda h, p, q, kept: h + torch.cat([torch.cat([p, q]).chunk(2)[1], p]).unflatten(0, (2, ROWS)).sum(0),
    "product": lambda h, p, q, kept: h * p.view(ROWS, WIDTH) + q.view_as(p),
    "matrix": lambda h, p, q, kept: h @ p.t() @ q,
    "twice": lambda h, p, q, kept: (h[None] + p[None])[0] * q + p,
    "saved": lambda h, p, q, kept: Saves.apply(h, p, None),
    "kept": lambda h, p, q, kept: Saves.apply(h, p, kept),
    "captured": lambda h, p, q, kept: captured(h + p, kept),
    "captured view": lambda h, p, q, kept: captured(h[None] + p[None], kept)[0],
    "retained": lambda h, p, q, kept: retained((h[None] + p[None])[0]),
}


NEED_Q = {"two views", "concatenated", "stacked", "chunked", "product", "matrix", "twice"}


def captured(x, kept):
    """x, whose gradient a hook keeps."""
    if x.requires_grad:
        x.register_hook(lambda gradient: kept.append((gradient.detach(), gradient.clone())))
    return x


def retained(x):
    if x.requires_grad:
        x.retain_grad()
    return x


@dataclass(frozen=True)
class Layer:
    """A layer of a graph."""

    use: str  # a name of `USES`
    tied: bool = False  # its first parameter is that of the layer before
    wait: bool = True  # the backward waits for all launched buckets before and after this layer
    checkpointed: bool = False  # recomputed
    watched: bool = False  # a hook on the parameter keeps its gradient


@dataclass(frozen=True)
class Plan:
    """A graph and a training loop. ``clear`` tells how gradients are cleared; the graph may be retained."""

    layers: tuple
    clear: str = "to-none"
    retain: bool = False
    cap: float = SMALLEST
    local: bool = False  # a micro-batch under no_sync in each step


class Graph(nn.Module):
    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.p = nn.ParameterList(torch.randn(ROWS, WIDTH) for _ in plan.layers)
        self.q = nn.ParameterList(torch.randn(ROWS, WIDTH if layer.use in NEED_Q else 0) for layer in plan.layers)
        for i, layer in enumerate(plan.layers):
            if layer.tied and i > 0:
                self.p[i] = self.p[i - 1]
        self.wait = lambda: None
        self.kept = []

    def forward(self, x):
        h = Wait.apply(self.begin(x), lambda: self.wait())
        for layer, p, q in zip(self.plan.layers, self.p, self.q, strict=True):
            run = partial(self.run, layer)
            h = checkpoint(run, h, p, q, use_reentrant=False) if layer.checkpointed else run(h, p, q)
            h = h.tanh()
        return h.square().sum() + sum(q.sum() for q in self.q if q.numel() == 0)

    def run(self, layer, h, p, q):
        if layer.wait:
            h = Wait.apply(h, lambda: self.wait())
        h = USES[layer.use](h, p, q, self.kept)
        if layer.wait:
            h = Wait.apply(h, lambda: self.wait())
        return h


def batch_of(rank, step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def watch(module, plan, kept):
    for layer, p in zip(plan.layers, module.p, strict=True):
        if layer.watched:
            p.register_hook(lambda gradient: kept.append((gradient.detach(), gradient.clone())))


def batches(plan, step):
    return [step, step + 50] if plan.local else [step]


def expected_gradients(plan):
    """For each step the mean over all ranks, in fp64, of what a rank computes without DDP, and of its magnitude."""
    size = dist.get_world_size()
    rank_gradients = []
    for rank in range(size):
        module = Graph(plan)
        steps = []
        for step in range(STEPS):
            clear(module, plan)
            for number in batches(plan, step):
                module(batch_of(rank, number)).backward()
            steps.append({name: p.grad.double().clone() for name, p in module.named_parameters()})
            if plan.clear == "kept":
                break
        rank_gradients.append(steps)
    return [
        {name: torch.stack([ranks[name] for ranks in step]) for name in step[0]}
        for step in zip(*rank_gradients, strict=True)
    ]


def clear(module, plan):
    if plan.clear != "kept":
        module.zero_grad(set_to_none=plan.clear == "to-none")


def train(wrapper, hook, plan, group=None):
    """The gradients of every step, and how many tensors that others kept have changed during a backward."""
    module = Graph(plan)
    ddp = WRAPPERS[wrapper](module, process_group=group, bucket_cap_mb=plan.cap)
    if hook is not None:
        register(ddp, hook, group)
    watch(module, plan, module.kept)
    changed = 0

    def wait():
        nonlocal changed
        if wrapper == "gradwire":
            ddp.reducer.exchange.connections.finish()
            for future in ddp.reducer._backward.futures:
                if future is not None:
                    future.wait()
        changed += sum(not torch.equal(*pair) for pair in module.kept)

    module.wait = wait
    seen = []
    for step in range(1 if plan.clear == "kept" else STEPS):
        clear(ddp, plan)
        *local, last = batches(plan, step)
        for number in local:
            with ddp.no_sync():
                ddp(batch_of(dist.get_rank(), number)).backward()
            module.kept.clear()  # autograd itself adds to a gradient that a hook has kept
        ddp(batch_of(dist.get_rank(), last)).backward(retain_graph=plan.retain)
        seen.append(gradients(ddp))
        module.kept.clear()
    return seen, changed


# Largest error of an element in units of the ranks' largest magnitude in its tensor or block: rounding to 16 bits, on
# each rank and of the sum; to 8 or 4 bits, of the contributions and of the sum, with the residual of earlier steps.
EXACT = {None: 2**-22, "allreduce": 2**-22}
BOUNDS = EXACT | {"fp16": 2**-9, "bf16": 2**-6, "bf16_in_fp32": 2**-6, "scaled_fp16": 2**-9, "fp16_of_allreduce": 2**-8}


def errors_of(seen, expected, bound):
    lines = []
    for step, (ours, ranks) in enumerate(zip(seen, expected, strict=True)):
        for name, rank_gradients in ranks.items():
            if rank_gradients.numel() == 0:
                continue
            scale = rank_gradients.abs().max().item()
            error = (ours[name].double() - rank_gradients.mean(0)).abs().max().item()
            if error > bound * scale:
                lines.append(f"step {step}: {name} differs from the mean by {error / scale:.2g} of its largest element")
    return lines


def check_graph(hook, plan, device):
    """Errors on this rank, against the mean of local gradients, or for lossy hooks against PyTorch's DDP."""
    with ExitStack() as stack:
        group = None
        if device == "double":
            stack.enter_context(gpu_on_cpu())
            group = dist.new_group(backend=register_backend())
            stack.callback(dist.destroy_process_group, group)
        seen, changed = train("gradwire", hook, plan, group)
    lines = [f"{changed} tensors of others have changed"] if changed else []
    if hook in BOUNDS:
        return lines + errors_of(seen, expected_gradients(plan), BOUNDS[hook])
    return lines + differences(seen, train("pytorch", hook, plan)[0])


# Two convolutions would do; the sum of a view is what matters.
POSITIONS = Plan((Layer("matrix"), Layer("unsqueezed"), Layer("matrix")))
ALL_HOOKS = [None, *(hook for hook in HOOKS if hook != "fp16_of_pytorch")]


@pytest.mark.parametrize("device", ["cpu", "double"])
@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_learned_positions_with_one_sample_leave_other_gradients_right(worlds, hook, device):
    assert worlds(2).run(check_graph, hook=hook, plan=POSITIONS, device=device) == [[], []]


@pytest.mark.parametrize("device", ["cpu", "double"])
@pytest.mark.parametrize("use", USES)
def test_gradients_sharing_memory_equal_exact_mean(worlds, use, device):
    plan = Plan((Layer("matrix"), Layer(use, watched=True), Layer("matrix", wait=False)))
    for hook in (None, "fp16", "int4"):
        assert worlds(2).run(check_graph, hook=hook, plan=plan, device=device) == [[], []]


LAYERS = st.builds(
    Layer,
    use=st.sampled_from(sorted(USES)),
    tied=st.booleans(),
    wait=st.booleans(),
    checkpointed=st.booleans(),
    watched=st.booleans(),
)


def without_aliases(plan):
    """PyTorch gives two views one memory for both ``.grad``, and adds both later gradients to it, with DDP or not."""
    if plan.clear == "to-none" and not plan.local:
        return plan
    layers = (replace(layer, use="view") if layer.use == "two views" else layer for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


PLANS = st.builds(
    Plan,
    layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple),
    clear=st.sampled_from(["to-none", "to-zero", "kept"]),
    retain=st.booleans(),
    cap=st.sampled_from([SMALLEST, 0.0001, 1.0]),
    local=st.booleans(),
).map(without_aliases)


@pytest.mark.parametrize(
    ("size", "examples"), [(2, 60), *(pytest.param(size, 300, marks=pytest.mark.slow) for size in (2, 3))]
)
def test_random_graphs_of_views_have_right_gradients(worlds, size, examples):
    @settings(PROPERTY, max_examples=examples)
    @given(plan=PLANS, hook=st.sampled_from(ALL_HOOKS), device=st.sampled_from(["cpu", "double"]))
    def gradients_are_right(plan, hook, device):
        assert worlds(size).run(check_graph, hook=hook, plan=plan, device=device) == [[]] * size

    gradients_are_right()


# Python 3.14 leaves out references from the stack, and without the GIL not all objects are counted.
COUNTS = {
    "fewer": (lambda count, call: count - 1, True),
    "more": (lambda count, call: count + 2, True),
    "immortal": (lambda count, call: 2**32 - 1, False),
    "fewer in one function": (lambda count, call: count - (call > 0), False),
    "unsteady": (lambda count, call: count + call % 2, False),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_self_test_finds_out_whether_references_are_counted(kind):
    count_of, is_known = COUNTS[kind]
    calls = count()
    with mock.patch.object(sys, "getrefcount", lambda value: count_of(real_count(value), next(calls))):
        assert (torch_internals.count_of_own_base() is not None) == is_known
    assert torch_internals.count_of_own_base() == torch_internals.OWN_BASE is not None


def check_without_counts(hook, plan):
    with mock.patch.object(torch_internals, "OWN_BASE", None), warnings.catch_warnings(record=True) as caught:
        torch_internals._warn_of_copies.cache_clear()
        warnings.simplefilter("always")
        lines = check_graph(hook, plan, "cpu")
    return lines, [str(each.message) for each in caught if "counts references" in str(each.message)]


@pytest.mark.parametrize("hook", ["fp16", "scaled_fp16", "int4", "powersgd"])
def test_gradients_are_copied_with_one_warning_if_references_are_not_counted(worlds, hook):
    uses = ("matrix", "direct", "unsqueezed", "saved", "captured view", "matrix")
    plan = Plan(tuple(Layer(use, watched=True) for use in uses))
    for lines, texts in worlds(2).run(check_without_counts, hook=hook, plan=plan):
        assert lines == []
        assert len(texts) == 1


def test_all_dense_gradients_count_as_shared_if_references_are_not_counted():
    dense, sparse = torch.ones(2), torch.ones(2).to_sparse()
    with mock.patch.object(torch_internals, "OWN_BASE", None):
        assert torch_internals.aliased([dense, None, sparse, dense], None) == [0, 3]


@pytest.mark.parametrize("cap", [SMALLEST, 25], ids=["many-buckets", "one-bucket"])
@pytest.mark.parametrize("model", ["conv", "lstm", "transformer"])
@on_ranks(2)
def test_gradients_of_ordinary_layers_are_not_copied(model, cap):
    # Also the one whose autograd hook launches a bucket, while autograd still holds what it came from.
    ddp, seen, copied = wrapped(model=model, hook="fp16", bucket_cap_mb=cap), [], []
    aliased = torch_internals.aliased

    def observed(gradients, incoming):
        seen.extend(gradients)
        copied.extend(aliased(gradients, incoming))
        return copied

    with mock.patch.object(torch_internals, "aliased", observed):
        train_steps(ddp, 4)
    assert len(seen) == 4 * len(list(ddp.parameters()))
    assert copied == []
