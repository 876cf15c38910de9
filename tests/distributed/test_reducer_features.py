"""Unused parameters, static graphs, sparse gradients, joins and the rest of what the wrapper does beside averaging.

The oracle is PyTorch's DDP in the same process group wherever that is right, with the same hook if there is one;
else the values that the definition of the feature gives.
"""

import copy
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits, assert_same_on_all_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from training import SMALL, SMALLEST, WRAPPERS, build, gradients, one_thread_group, register, train
from zoo import Probe

import gradwire
from gradwire.hooks import default_hooks
from gradwire.hooks._powersgd_checkpoint import entries_of

DDP = gradwire.DistributedDataParallel
CAP = 0.0001  # MiB: buckets of two or three parameters of `Parts`


def flat_hook(group, bucket):
    """As PyTorch's documentation writes hooks."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


hooks = pytest.mark.parametrize("hook", ["none", "allreduce", "fp16", "powersgd", "flat"])
# Of all pairs with a view or not, those that go different ways through the buckets.
WAYS = [(hook, view) for hook in ("none", "flat") for view in (False, True)] + [("powersgd", False), ("fp16", True)]
UNDER_HOOKS = [*WAYS[2:], ("allreduce", False), ("powersgd", True)]


# Of these, what the ordinary lane takes; the others are slow.
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


def of_both(case, **options):
    return case("pytorch", **options), case("gradwire", **options)


def assert_parity(results):
    for theirs, ours in results:
        assert_same_bits(ours, theirs)
    return [ours for _, ours in results]


class Parts(nn.Module):
    """Layers, of which a forward uses those that it is told to, in that order."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, use, run=lambda part, x: part(x)):
        for i in use:
            x = run(self.parts[i], x).tanh()
        return x.square().sum()


class ZeroedParts(Parts):
    """Gives the layers that are not used a gradient of zeros."""

    def forward(self, x, use, **options):
        zeros = [0 * p.sum() for i in range(len(self.parts)) if i not in use for p in self.parts[i].parameters()]
        return super().forward(x, use, **options) + sum(zeros)


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


def plan_on_both(**options):
    return of_both(run_plan, **options)


@clearings
@views
@plans
def test_law4_find_unused_matches_pytorch(worlds, plan, view, clear):
    # On three ranks PyTorch rounds a kept view that no rank uses: a third of it, thrice.
    sizes = [2] if (plan, view, clear) == ("used by nobody at times", True, "kept") else [2, 3]
    options = {"plan": plan, "clear": clear, "view": view}
    for size in sizes:
        assert_parity(worlds(size).run(plan_on_both, find_unused_parameters=True, **options))


@under_hooks
@plans
def test_law4_find_unused_under_a_hook_matches_pytorch(worlds, plan, hook, view):
    # With PyTorch's DDP, PowerSGD's memory loses what is not applied because no rank uses the parameter.
    steps = 2 if hook == "powersgd" and plan.endswith("at times") else 5
    options = {"plan": plan, "hook": hook, "view": view, "steps": steps}
    ours = assert_parity(worlds(3).run(plan_on_both, find_unused_parameters=True, **options))
    assert_same_on_all_ranks(ours)


def unused_and_zeroed(**options):
    return run_plan("gradwire", **options), run_plan("gradwire", model=ZeroedParts, **options)


@under_hooks
def test_unused_on_this_rank_is_a_gradient_of_zeros(worlds, hook, view):
    options = {"hook": hook, "view": view, "find_unused_parameters": True}
    for unused, zeroed in worlds(3).run(unused_and_zeroed, plan="on some ranks", **options):
        for step, reference in zip(unused, zeroed, strict=True):
            used = {name: value for name, value in reference.items() if "parts.4" not in name}
            assert_same_bits({name: step[name] for name in used}, used)


FEATURES = {
    "find-unused": {"find_unused_parameters": True},
    "skip-unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
}
features = pytest.mark.parametrize("feature", FEATURES)


def unused_everywhere(hook, view, feature):
    """Gradients of layer 4 before and after a backward that uses it on no rank, and whether the tensors are the same.

    Before that, every rank has a gradient of its own there.
    """
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), hook, view, **FEATURES[feature])
    batch = torch.ones(3, 4) * (1 + dist.get_rank())
    part = ddp.module.parts[4]
    seen = []
    for step in range(6):
        if step % 3 == 0:
            part.zero_grad()
        elif step % 3 == 1:
            part.weight.grad = torch.full((4, 4), 1.0 + dist.get_rank())
        before, held = gradients(part), part.weight.grad
        ddp(batch, (0, 1, 2)).backward()
        seen.append((before, gradients(part), view or part.weight.grad is held))
    return seen


@views
@hooks
@features
def test_gradient_of_a_parameter_that_no_rank_uses_stays_as_it_is(worlds, feature, hook, view):
    for steps in worlds(2).run(unused_everywhere, hook=hook, view=view, feature=feature):
        for before, after, is_held in steps:
            assert_same_bits(after, before)
            assert is_held


class TwoHeads(nn.Module):
    """Returns two outputs; a third layer is in neither."""

    def __init__(self, container):
        super().__init__()
        self.trunk, self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(4))
        self.container = container

    def forward(self, x):
        x = self.trunk(x).tanh()
        outputs = {"first": self.first(x).sum(), "second": [self.second(x).sum(), "text"]}
        return outputs if self.container == "dict" else (outputs["first"], outputs["second"])


def use_one_head(wrapper, container, hook, view, clear):
    torch.manual_seed(0)
    ddp = wrap(wrapper, TwoHeads(container), hook, view, find_unused_parameters=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(5):
        zero_grad(ddp, clear)
        outputs = ddp(torch.randn(3, 4, generator=generator))
        first, second = outputs.values() if container == "dict" else outputs
        loss = first if (step + dist.get_rank()) % 2 or step == 3 else second[0]
        loss.backward()
        seen.append(gradients(ddp))
    return seen


def one_head_of_both(**options):
    return of_both(use_one_head, **options)


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@ways
@pytest.mark.parametrize("container", ["dict", "tuple"])
def test_law4_outputs_that_the_loss_leaves_out_match_pytorch(worlds, container, hook, view, clear):
    assert_parity(worlds(2).run(one_head_of_both, container=container, hook=hook, view=view, clear=clear))


@ways
@static_plans
def test_law4_static_graph_matches_pytorch(world, plan, hook, view):
    assert_parity(world.run(plan_on_both, static_graph=True, plan=plan, hook=hook, view=view))


@pytest.mark.parametrize("clear", ["to-zero", "kept"])
@views
@static_plans
def test_law4_static_graph_with_gradients_of_before_matches_pytorch(worlds, plan, view, clear):
    assert_parity(worlds(2).run(plan_on_both, static_graph=True, plan=plan, view=view, clear=clear))


def reentrant(part, x):
    return checkpoint(part, x, use_reentrant=True)


def not_reentrant(part, x):
    return checkpoint(part, x, use_reentrant=False)


@ways
@pytest.mark.parametrize("run", [reentrant, not_reentrant])
@static_plans
def test_law4_checkpoints_in_a_static_graph_match_pytorch(worlds, plan, run, hook, view):
    # The input of the first checkpoint needs a gradient, or a reentrant one has none for its layer.
    options = {"plan": plan, "hook": hook, "view": view, "run": run, "model": AfterAnother}
    assert_parity(worlds(3).run(plan_on_both, static_graph=True, **options))


class AfterAnother(Parts):
    """Begins with a layer that no checkpoint wraps."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(4, 4)

    def forward(self, x, use, **options):
        return super().forward(self.begin(x), use, **options)


def static_with_no_sync(hook, view, unused, accumulate, checkpointed):
    """Accumulation with a static graph, and with ``find_unused_parameters`` in its place.

    Args:
        accumulate: micro-batches of each step.
    """
    use = (0, 2, 3) if unused else range(5)
    torch.manual_seed(0)
    models = [AfterAnother(), AfterAnother()]
    models[1].load_state_dict(models[0].state_dict())
    models = [
        wrap("gradwire", models[0], hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST]),
        wrap("pytorch", models[1], hook, view, find_unused_parameters=True, bucket_cap_mb_list=[SMALLEST]),
    ]
    run = reentrant if checkpointed else lambda part, x: part(x)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for number in accumulate:
        batches = [torch.randn(3, 4, generator=generator) for _ in range(number)]
        for ddp, how in zip(models, (run, lambda part, x: part(x)), strict=True):
            ddp.zero_grad()
            for batch in batches[:-1]:
                with ddp.no_sync():
                    ddp(batch, use, run=how).backward()
            ddp(batches[-1], use, run=how).backward()
        seen.append([gradients(ddp) for ddp in models])
    return seen


# PyTorch's static graph fails under no_sync. One bucket a parameter, so that sums have one order at any time.
@ways
@pytest.mark.parametrize(
    ("unused", "checkpointed"), [(False, False), (True, True)], ids=["all-plain", "unused-checkpointed"]
)
@pytest.mark.parametrize("accumulate", [(3, 1, 2, 1), (1, 2, 1, 3)], ids=["at-first", "later"])
def test_static_graph_accumulates_under_no_sync(worlds, accumulate, unused, checkpointed, hook, view):
    options = {"accumulate": accumulate, "unused": unused, "checkpointed": checkpointed}
    for steps in worlds(3).run(static_with_no_sync, hook=hook, view=view, **options):
        for ours, theirs in steps:
            assert_same_bits(ours, theirs)


@dataclass
class Wrapped:
    """An output that is no list, tuple or dictionary."""

    value: torch.Tensor


class WrappedProbe(Probe):
    def forward(self, *inputs):
        return Wrapped(super().forward(*inputs))


def outputs_in_a_dataclass(view):
    ddp = wrap("gradwire", WrappedProbe(3, 2), view=view, static_graph=True)
    seen = []
    for step in range(3):
        ddp.zero_grad()
        ddp(*(torch.full((size,), 6.0 * (dist.get_rank() + step)) for size in (3, 2))).value.backward()
        seen.append([weight.grad.clone() for weight in ddp.module.weights])
    return seen


# PyTorch's static graph reduces nothing here.
@views
def test_static_graph_reduces_what_a_dataclass_leads_to(world, view):
    for steps in world.run(outputs_in_a_dataclass, view=view):
        for step, grads in enumerate(steps):
            mean = sum(6.0 * (rank + step) for rank in range(world.size)) / world.size
            assert_same_bits(grads, [torch.full((3,), mean), torch.full((2,), mean)])


def message_of(action, *arguments, **options):
    """What ``action(*arguments, **options)`` raises, as text; None if it does not."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def change_the_graph(hook, view, uses, bad_step):
    """Errors of the backward of a step that uses other layers and of the next forward, and gradients of good steps."""
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST])
    torch.manual_seed(0)
    reference = wrap("gradwire", Parts(), hook, view, static_graph=True, bucket_cap_mb_list=[SMALLEST])
    batch = torch.ones(3, 4) * (1 + dist.get_rank())
    errors, seen = [], []
    for step in range(bad_step + 3):
        if step == bad_step:
            errors.append(message_of(ddp(batch, uses[1]).backward))
            errors.append(message_of(ddp, batch, uses[0]))
            ddp.resynchronize()
        ddp.zero_grad()
        reference.zero_grad()
        ddp(batch, uses[0]).backward()
        reference(batch, uses[0]).backward()
        seen.append((gradients(ddp), gradients(reference)))
    return errors, seen


@views
@pytest.mark.parametrize("hook", ["none", "flat"])
@pytest.mark.parametrize("bad_step", [1, 3])
@pytest.mark.parametrize("change", ["unused-then-used", "used-then-unused"])
def test_static_graph_that_changes_raises_until_resynchronized(worlds, change, bad_step, hook, view):
    uses = ((0, 1, 2), (0, 1, 2, 3)) if change == "unused-then-used" else ((0, 1, 2, 3), (0, 1, 2))
    results = worlds(3).run(change_the_graph, hook=hook, view=view, uses=uses, bad_step=bad_step)
    for (backward, forward), steps in results:
        text = forward if change == "used-then-unused" else backward
        assert text is not None
        assert text.startswith("RuntimeError: ")
        assert "our training graph has changed in this iteration" in text
        assert "parts.3." in text
        assert change == "unused-then-used" or "parts.2." not in text
        for ours, reference in steps:
            assert_same_bits(ours, reference)
    assert_same_on_all_ranks([steps for _, steps in results])


def skip_unused(wrapper, hook, view):
    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = wrap(wrapper, Parts(), hook, view, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for use in ((0, 1), (0, 1, 2, 3, 4), (4,), (0, 3), (2, 3)):
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=generator), use).backward()
        seen.append(gradients(ddp))
    return seen


def skip_unused_with_both(**options):
    return of_both(skip_unused, **options)


# With views that are kept, PyTorch divides the gradients of a bucket that it skips.
@views
@hooks
def test_law4_skipping_unused_buckets_matches_pytorch(worlds, hook, view):
    assert_parity(worlds(2).run(skip_unused_with_both, hook=hook, view=view))


def buckets_seen(cap, **options):
    """Names of the parameters in the buckets that the hook was called with, for a backward through layer 0 alone."""
    seen = []

    def hook(group, bucket):
        seen.append(bucket.parameter_names())
        return default_hooks.allreduce_hook(group, bucket)

    ddp = DDP(Parts(), bucket_cap_mb=cap, find_unused_parameters=True, **options)
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(2, 4), (0,)).backward()
    return seen


def test_buckets_of_which_nothing_is_used_are_skipped(world):
    for seen in world.run(buckets_seen, cap=SMALLEST, skip_all_reduce_unused_params=True):
        assert seen == [["parts.0.bias"], ["parts.0.weight"]]
    for seen in world.run(buckets_seen, cap=100, skip_all_reduce_unused_params=True):
        assert len(seen[0]) == 10
    assert [len(seen) for seen in world.run(buckets_seen, cap=SMALLEST)] == [10] * world.size


class Words(nn.Module):
    """Embeddings, alone or among other layers; every sum of their gradients is exact."""

    def __init__(self, kind, sparse=True):
        super().__init__()
        self.kind = kind
        self.first = nn.Embedding(7, 4, sparse=sparse)
        if kind != "alone":
            self.linear = nn.Linear(4, 4)
            self.dense = nn.Embedding(5, 4)
            self.second = nn.EmbeddingBag(5, 4, sparse=sparse, mode="sum")
        if kind == "shared":
            self.third = nn.Embedding(7, 4, sparse=sparse)
            self.third.weight = self.first.weight

    def forward(self, words, use_second):
        x = self.first(words)
        if self.kind == "shared":
            x = x + 2 * self.third(words.flip(0))
        if use_second and self.kind != "alone":
            x = x + 4 * self.second(words.view(-1, 1))
        return x.sum() if self.kind == "alone" else x.sum() + self.linear(self.dense(words)).sum()


def as_dense(named):
    """Whether each gradient is sparse, and its values."""
    return {name: None if g is None else (g.is_sparse, g.to_dense()) for name, g in named.items()}


def train_words(wrapper, kind, hook, view, clear, sparse=True, **options):
    """Gradients of every step, and the parameters at the end. `second` is used on some ranks, and on none in step 3."""
    torch.manual_seed(0)
    group = {"process_group": one_thread_group()} if wrapper == "pytorch" or hook == "flat" else {}
    ddp = wrap(wrapper, Words(kind, sparse), hook, view, **group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(5):
        zero_grad(ddp, clear)
        use_second = not options or (step != 3 and (step + dist.get_rank()) % 2 == 0)
        ddp(torch.randint(5, (6,), generator=generator), use_second).backward()
        seen.append(as_dense(gradients(ddp)))
        optimizer.step()
    return seen, [p.detach().clone() for p in ddp.parameters()]


def words_with_both(**options):
    return of_both(train_words, **options)


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@ways
@pytest.mark.parametrize("kind", ["alone", "mixed", "shared"])
def test_law4_sparse_gradients_match_pytorch(worlds, kind, hook, view, clear):
    ours = assert_parity(worlds(2).run(words_with_both, kind=kind, hook=hook, view=view, clear=clear))
    assert_same_on_all_ranks(ours)
    if clear == "to-none":
        assert all(steps[-1]["first.weight"][0] for steps, _ in ours), "sparse, as without a wrapper"


@views
@pytest.mark.parametrize("kind", ["alone", "mixed", "shared"])
def test_law4_sparse_gradients_match_pytorch_on_three_ranks(worlds, kind, view):
    assert_parity(worlds(3).run(words_with_both, kind=kind, hook="none", view=view, clear="to-none"))


def sparse_and_dense(hook, **options):
    options |= {"find_unused_parameters": True, "kind": "mixed"}
    sparse = train_words("gradwire", hook=hook, **options)
    return sparse, train_words("pytorch", hook="none", sparse=False, **options)


# PyTorch's DDP fails where a sparse gradient is undefined on some rank.
@clearings
@views
@pytest.mark.parametrize("hook", ["none", "allreduce", "flat"])
def test_unused_sparse_gradients_equal_dense_ones(worlds, hook, view, clear):
    for sparse, dense in worlds(2).run(sparse_and_dense, hook=hook, view=view, clear=clear):
        for step, reference in zip(sparse[0], dense[0], strict=True):
            for name, gradient in reference.items():
                assert_same_bits(step[name] and step[name][1], gradient and gradient[1])
        assert_same_bits(sparse[1], dense[1])


def join_with_inputs(wrapper, hook, view, lengths, divide, clear="to-none", joins=True, find_unused=False, **options):
    """Train on ``lengths[rank]`` inputs under ``join``; without it, on inputs of zeros for as long as any rank.

    The gradients of `Probe` are its inputs, whatever its parameters are.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(6, 5), (7,), (4, 4), (3,)]
    ddp = wrap(wrapper, Probe(*shapes), hook, view, find_unused_parameters=find_unused, **options)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide, enable=joins):
        for step in range(lengths[rank] if joins else max(lengths)):
            zero_grad(ddp, clear)
            inputs = [torch.randint(-8, 9, shape, generator=generator) * (step < lengths[rank]) for shape in shapes]
            ddp(*(12.0 * x for x in inputs)).backward()
            live = sum(length > step for length in lengths)
            gradient = gradients(ddp)
            if not joins and not divide:
                gradient = {name: g * (size / live) for name, g in gradient.items()}
            if step < lengths[rank]:
                seen.append(gradient)
    return seen, [p.detach().clone() for p in ddp.parameters()]


def join_with_both(**options):
    return of_both(join_with_inputs, **options)


divisions = pytest.mark.parametrize("divide", [True, False], ids=["by-all", "by-the-rest"])
uneven = pytest.mark.parametrize("lengths", [(5, 3, 1), (0, 4, 4), (2, 6, 3)], ids=str)


@pytest.mark.parametrize("clear", ["to-none", "kept"])
@views
@divisions
@uneven
@pytest.mark.parametrize("find_unused", [False, True], ids=["all-used", "find-unused"])
def test_law4_join_matches_pytorch(worlds, find_unused, lengths, divide, view, clear):
    options = {"lengths": lengths, "divide": divide, "find_unused": find_unused}
    ours = assert_parity(worlds(3).run(join_with_both, hook="none", view=view, clear=clear, **options))
    assert_same_on_all_ranks([parameters for _, parameters in ours])


def joined_and_zero_fed(**options):
    return join_with_inputs("gradwire", **options), join_with_inputs("gradwire", joins=False, **options)


@under_hooks
@divisions
@uneven
def test_rank_that_has_joined_adds_zeros_under_a_hook(worlds, lengths, divide, hook, view):
    # PyTorch's DDP divides by the number of all ranks under a hook, whatever is asked for.
    results = worlds(3).run(joined_and_zero_fed, lengths=lengths, divide=divide, hook=hook, view=view)
    for (joined, _), (fed, _) in results:
        assert_same_bits(joined, fed)


def join_exactly(hook, view, divide, lengths):
    """The gradient of every step under `join`; rank r's is 3 * 2 ** r, step s's 2 ** s times that."""
    rank = dist.get_rank()
    ddp = wrap("gradwire", Probe((3, 1), (2,)), hook, view)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            ddp.zero_grad()
            ddp(torch.full((3, 1), 3.0 * 2 ** (rank + step)), torch.full((2,), -3.0 * 2 ** (rank + step))).backward()
            seen.append([weight.grad.clone() for weight in ddp.module.weights])
    return seen


@ways
@divisions
@uneven
def test_join_averages_over_those_that_have_inputs(world, lengths, divide, hook, view):
    # Matrices of one column are not compressed. A third of each gradient, and the sum of those, are exact in fp16 too.
    size, lengths = world.size, lengths[: world.size]
    results = world.run(join_exactly, hook=hook, view=view, divide=divide, lengths=lengths)
    for steps, length in zip(results, lengths, strict=True):
        assert len(steps) == length
        for step, (matrix, vector) in enumerate(steps):
            live = [rank for rank in range(size) if lengths[rank] > step]
            mean = sum(3 * 2 ** (rank + step) for rank in live) / (size if divide else len(live))
            assert_same_bits([matrix, vector], [torch.full((3, 1), mean), torch.full((2,), -mean)])


def end_early(wrapper, lengths):
    """The steps taken and the error of training that ends with the first rank's inputs; then a step that goes well."""
    ddp = wrap(wrapper, Probe(3))
    steps = []

    def train_on():
        with ddp.join(throw_on_early_termination=True):
            for step in range(lengths[dist.get_rank()]):
                ddp(torch.ones(3)).backward()
                steps.append(step)

    error = message_of(train_on)
    ddp.zero_grad()
    ddp(torch.full((3,), 6.0 * dist.get_rank())).backward()
    return steps, error, gradients(ddp)


def end_early_with_both(lengths):
    return of_both(end_early, lengths=lengths)


@uneven
def test_law4_join_that_throws_on_early_termination_matches_pytorch(world, lengths):
    lengths = lengths[: world.size]
    results = assert_parity(world.run(end_early_with_both, lengths=lengths))
    for rank, (steps, error, _) in enumerate(results):
        assert len(steps) == min(lengths)
        is_first = lengths[rank] == min(lengths)
        assert (
            f"Rank {rank} exhausted all inputs" if is_first else "Detected at least one rank that exhausted"
        ) in error


def delay_some(wrapper, hook, view, clear):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    named = dict(module.named_parameters())
    delayed = [(name, named[name]) for name in ("2.0.weight", "3.0.bias", "2.0.bias")]
    first = named["0.0.bias"]
    options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": first}
    ddp = wrap(wrapper, module, hook, view, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        zero_grad(ddp, clear)
        ddp(torch.randn(3, 4, generator=generator)).square().sum().backward()
        dist.barrier()  # nothing else waits for the sum
        seen.append(gradients(ddp))
    return seen


def delay_some_with_both(**options):
    return of_both(delay_some, **options)


@pytest.mark.parametrize("clear", ["to-none", "to-zero"])
@ways
def test_law4_delayed_parameters_match_pytorch(world, hook, view, clear):
    ours = assert_parity(world.run(delay_some_with_both, hook=hook, view=view, clear=clear))
    assert_same_on_all_ranks(ours)


OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (torch.optim.Adam, {"lr": 0.1})}


def step_in_backward(wrapper, model, hook, view, optimizer, in_backward):
    """Parameters after every step, and which of them have a gradient then."""
    optimizer, arguments = OPTIMIZERS[optimizer]
    module = build(model)
    parameters = [p for p in module.parameters() if p.requires_grad]
    early = {"all": parameters, "half": parameters[::2], "none": []}[in_backward]
    rest = [p for p in parameters if all(p is not other for other in early)]
    _apply_optimizer_in_backward(optimizer, early, arguments)
    ddp = wrap(wrapper, module, hook, view, bucket_cap_mb=SMALL)
    ordinary = optimizer(rest, **arguments) if rest else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(*module.batch(generator)).backward()
        assert all(p.grad is None for p in early)
        assert all(p.grad is not None for p in rest)
        if ordinary is not None:
            ordinary.step()
        seen.append([p.detach().clone() for p in parameters])
    return seen


def steps_of_both(in_backward, **options):
    theirs = "gradwire" if options["hook"] != "none" else "pytorch"
    return step_in_backward(theirs, in_backward="none", **options), step_in_backward(
        "gradwire", in_backward=in_backward, **options
    )


@ways
@pytest.mark.parametrize(
    ("model", "in_backward", "optimizer"),
    [("mlp", "all", "adam"), ("mlp", "half", "sgd"), ("conv", "all", "sgd"), ("conv", "half", "adam")],
)
def test_optimizers_in_backward_equal_plain_ones(worlds, model, in_backward, optimizer, hook, view):
    options = {"model": model, "in_backward": in_backward, "optimizer": optimizer}
    ours = assert_parity(worlds(3).run(steps_of_both, hook=hook, view=view, **options))
    assert_same_on_all_ranks(ours)


def kept_errors(feature, view):
    """PowerSGD's error of layer 1 before and after each step, and whether the layer had a gradient then."""
    torch.manual_seed(0)
    ddp = wrap("gradwire", Parts(), view=view, **FEATURES[feature])
    state = register(ddp, "powersgd")
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen, error = [], torch.zeros(())
    for step in range(8):
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=generator), (0, 2) if step in (4, 6) else (0, 1, 2)).backward()
        before, error = error, entries_of(state._memory)["errors"].get("parts.1.weight", torch.zeros(())).clone()
        seen.append((before, error, ddp.module.parts[1].weight.grad is not None))
    return seen


@views
@pytest.mark.parametrize("feature", ["find-unused", "skip-unused"])
def test_law1_error_of_a_parameter_that_no_rank_uses_is_kept(world, feature, view):
    for steps in world.run(kept_errors, feature=feature, view=view):
        assert [has_gradient for *_, has_gradient in steps] == [step not in (4, 6) for step in range(8)]
        assert all(after.count_nonzero() for _, after, _ in steps[3:])
        for before, after, has_gradient in steps:
            if not has_gradient:
                # What was sent is subtracted, then added again: two roundings of sums no larger than what they are of.
                # An approximation in an orthonormal basis is no longer than the mean of the errors, here below 8.
                assert before.norm() < 8
                assert (after - before).abs().max() <= 2 * 16 * 2.0**-24


def copies(how, hook, feature, trained, view):
    """Gradients of a model and of its copy on the same batches, and whether the copy has the model's options."""
    torch.manual_seed(0)
    model = wrap("gradwire", Parts(), hook, view, bucket_cap_mb_list=[SMALLEST], **FEATURES[feature])
    generator = torch.Generator().manual_seed(dist.get_rank())
    uses = [(0, 2)] * 6 if feature == "static" else [(0, 1), (0, 2), (0, 3), (1,), (0, 1, 2), (3, 4)]
    for step in range(trained):
        model.zero_grad()
        model(torch.randn(3, 4, generator=generator), uses[step]).backward()
    twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    seen = []
    for step in range(trained, 6):
        batch = torch.randn(3, 4, generator=generator)
        for ddp in (model, twin):
            ddp.zero_grad()
            ddp(batch, uses[step]).backward()
        seen.append((gradients(model), gradients(twin)))
    same = all(getattr(model, name) == getattr(twin, name) for name in (*FEATURES[feature], "gradient_as_bucket_view"))
    return seen, same and [hook for hook, _ in twin._comm_hooks] == [hook for hook, _ in model._comm_hooks]


@ways
@features
@pytest.mark.parametrize(("how", "trained"), [("pickle", 0), ("pickle", 3), ("deepcopy", 3)])
def test_copies_keep_their_hook_and_features(worlds, how, trained, feature, hook, view):
    options = {"how": how, "trained": trained, "feature": feature, "hook": hook, "view": view}
    for steps, same_options in worlds(2).run(copies, **options):
        assert same_options
        for model, twin in steps:
            assert_same_bits(twin, model)


def with_and_without(feature, **options):
    options["bucket_cap_mb_list"] = [SMALLEST]
    return train("gradwire", steps=5, **options), train("gradwire", steps=5, **options, **FEATURES[feature])


@ways
@pytest.mark.parametrize("feature", ["find-unused", "static"])
@pytest.mark.parametrize("model", ["conv", "complex", "odd", "mixed"])
def test_feature_changes_nothing_where_all_is_used(worlds, model, feature, hook, view):
    options = {"model": model, "hook": {"none": None, "flat": (None, flat_hook)}.get(hook, hook)}
    for without, featured in worlds(2).run(with_and_without, feature=feature, gradient_as_bucket_view=view, **options):
        assert_same_bits(featured, without)


def create_graph(feature, view):
    """Gradients with and without a graph of the backward, and what was warned of."""
    seen = []
    for keep in (False, True):
        torch.manual_seed(0)
        ddp = wrap("gradwire", Parts(), view=view, **FEATURES[feature])
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            ddp.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ddp(torch.randn(3, 4, generator=generator), (0, 2)).backward(create_graph=keep)
            seen.append(
                (gradients(ddp), any("create_graph=True  is not well-supported" in str(w.message) for w in caught))
            )
    return seen[:3], seen[3:]


@views
@features
def test_create_graph_warns_and_leaves_the_gradients_as_without_it(world, feature, view):
    for without, with_graph in world.run(create_graph, feature=feature, view=view):
        assert [warned for _, warned in without] == [False] * 3
        assert [warned for _, warned in with_graph] == [True] * 3
        assert_same_bits([step for step, _ in with_graph], [step for step, _ in without])


class FaultyHook:
    """`flat_hook`, until a fault is chosen."""

    def __init__(self):
        self.fault = None

    def __call__(self, group, bucket):
        if self.fault is None or bucket.index() != 1:
            return flat_hook(group, bucket)
        return getattr(self, self.fault)(group, bucket)

    def raises(self, group, bucket):
        raise ValueError("from the hook")

    def returns_a_tensor(self, group, bucket):
        return bucket.buffer()

    def returns_too_little(self, group, bucket):
        return flat_hook(group, bucket).then(lambda future: future.value()[:-1])


def train_through_a_fault(fault, feature, bad_step, view):
    """Errors, and gradients of the good steps of a model with a hook that fails once and of one with a good hook."""
    hook = FaultyHook()
    models = []
    for function in (hook, flat_hook):
        torch.manual_seed(0)
        ddp = wrap("gradwire", Parts(), view=view, bucket_cap_mb_list=[SMALLEST], **FEATURES[feature])
        ddp.register_comm_hook(None, function)
        models.append(ddp)
    generator = torch.Generator().manual_seed(dist.get_rank())
    errors, seen = [], []
    for step in range(5):
        batch, use = torch.randn(3, 4, generator=generator), (0, 1, 3) if feature == "static" or step % 2 else (0, 2, 4)
        for ddp in models:
            ddp.zero_grad()
        if step == bad_step:
            hook.fault = fault
            errors.append(message_of(models[0](batch, use).backward))
            hook.fault = None
            models[0].resynchronize()
        else:
            for ddp in models:
                ddp(batch, use).backward()
            seen.append(tuple(map(gradients, models)))
    return errors, seen


FAULTS = {
    "raises": "from the hook",
    "returns_a_tensor": "callback must return a torch.futures.Future object, but got",
    "returns_too_little": "elements for bucket 1",
}


@views
@features
@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_hook_once_resynchronized_trains_on(worlds, fault, bad_step, feature, view):
    results = worlds(3).run(train_through_a_fault, fault=fault, feature=feature, bad_step=bad_step, view=view)
    for (error,), steps in results:
        assert error is not None
        assert FAULTS[fault] in error
        for ours, reference in steps:
            assert_same_bits(ours, reference)
    assert_same_on_all_ranks([steps for _, steps in results])


def logged(wrapper, feature, hook, view):
    """What is logged after construction and after the last of some steps."""
    torch.manual_seed(0)
    ddp = wrap(wrapper, Parts(), hook, view, **FEATURES.get(feature, {}))
    at_first = ddp._get_ddp_logging_data()
    for _ in range(4):
        ddp(torch.ones(3, 4), range(5) if feature == "none" else (0, 1, 3)).backward()
    return at_first, ddp._get_ddp_logging_data()


def logged_by_both(**options):
    return of_both(logged, **options)


@views
@pytest.mark.parametrize("hook", ["none", "flat"])
@pytest.mark.parametrize("feature", ["none", *FEATURES])
def test_logging_data_match_pytorchs(worlds, feature, hook, view):
    for theirs, ours in worlds(2).run(logged_by_both, feature=feature, hook=hook, view=view):
        for expected, actual in zip(theirs, ours, strict=True):
            assert actual.keys() == expected.keys()
            times = {key for key in expected if "_time" in key}
            others = expected.keys() - times - {"comm_hook"}  # PyTorch sees a hook under another name
            assert {key: actual[key] for key in others} == {key: expected[key] for key in others}
            assert all(isinstance(actual[key], int) and actual[key] >= 0 for key in times)
        assert "avg_backward_comm_time" in ours[1]


class Counting(nn.Module):
    """Counts its forwards in a buffer, which the hook below sums over the ranks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += x.sum() * torch.tensor([1.0, 2.0])
        return (self.linear(x) + self.seen.sum()).square().sum()


def sum_buffers(group, buffers):
    return [dist.all_reduce(buffer, group=group, async_op=True).get_future() for buffer in buffers.values()]


def train_with_buffer_hook(wrapper, before, feature):
    torch.manual_seed(0)
    ddp = wrap(wrapper, Counting(), **FEATURES.get(feature, {}))
    locations = torch.nn.parallel.distributed._BufferCommHookLocation
    location = locations.PRE_FORWARD if before else locations.POST_FORWARD
    hook = (
        (lambda *arguments: [future.wait() for future in sum_buffers(*arguments)] and None) if before else sum_buffers
    )
    ddp._register_buffer_comm_hook(None, hook, location)
    seen = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.full((1, 3), float(step + dist.get_rank()))).backward()
        seen.append((gradients(ddp), ddp.module.seen.clone()))
    return seen


def buffer_hook_of_both(**options):
    return of_both(train_with_buffer_hook, **options)


@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-forward"])
@pytest.mark.parametrize("feature", ["none", "find-unused", "static"])
def test_law4_buffer_hooks_match_pytorch(world, feature, before):
    ours = assert_parity(world.run(buffer_hook_of_both, feature=feature, before=before))
    if not before:
        assert_same_on_all_ranks([[seen for _, seen in steps] for steps in ours])


def shrink_and_grow(feature, hook, view):
    """Two steps on all ranks, two on all but the last, two on all again; the gradients, and what they must be."""
    size, rank = dist.get_world_size(), dist.get_rank()
    some, everybody = dist.new_group(list(range(size - 1))), dist.new_group(list(range(size)))
    ddp = wrap("gradwire", Probe((2, 3), 4, 5), view=view, **FEATURES.get(feature, {}))
    groups = [dist.group.WORLD, some, everybody]
    seen = []
    for index, (group, members) in enumerate(zip(groups, (size, size - 1, size), strict=True)):
        if index:
            ddp._update_process_group(group)
        if rank < members:
            for step in range(2):
                ddp.zero_grad()
                ddp(*(torch.full(shape, 6.0 * (rank + step)) for shape in ((2, 3), (4,), (5,)))).backward()
                mean = sum(6.0 * (r + step) for r in range(members)) / members
                seen.append([(weight.grad.clone(), torch.full_like(weight, mean)) for weight in ddp.module.weights])
    return seen


@views
@pytest.mark.parametrize("feature", ["none", "find-unused", "static"])
def test_updated_process_group_averages_over_its_ranks(worlds, feature, view):
    results = worlds(3).run(shrink_and_grow, feature=feature, hook="none", view=view)
    assert [len(steps) for steps in results] == [6, 6, 4]
    for steps in results:
        for pairs in steps:
            for actual, expected in pairs:
                assert_same_bits(actual, expected)
