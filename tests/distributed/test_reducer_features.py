"""Delayed parameters, optimizers in the backward, copies, buffer hooks, logging data and changed process groups.

See features.py for the oracle.
"""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import (
    DDP,
    FEATURES,
    Parts,
    assert_parity,
    features,
    flat_hook,
    of_both,
    views,
    ways,
    wrap,
    zero_grad,
)
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, gradients, message_of, train
from tests.support.zoo import Probe


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


def large_gradients(wrapper, clear, accumulate, dtype):
    """Gradients of layers of more than 1 MiB beside small ones, one of them non-contiguous."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(700, 800), nn.Tanh(), nn.Linear(800, 700), nn.Linear(700, 3)).to(dtype)
    module[2].weight.data = module[2].weight.data.t().contiguous().t()
    ddp = WRAPPERS[wrapper](module)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        zero_grad(ddp, clear)
        batches = [torch.randn(3, 700, generator=generator).to(dtype) for _ in range(accumulate)]
        for batch in batches[:-1]:
            with ddp.no_sync():
                ddp(batch).square().sum().backward()
        ddp(batches[-1]).square().sum().backward()
        seen.append(gradients(ddp))
    return seen


def large_gradients_of_both(**options):
    return of_both(large_gradients, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clear", ["to-none", "kept"])
def test_law4_large_gradients_match_pytorch(world, clear, accumulate, dtype):
    options = {"clear": clear, "accumulate": accumulate, "dtype": dtype}
    ours = assert_parity(world.run(large_gradients_of_both, **options))
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
def test_optimizers_in_backward_match_ordinary_optimizers(worlds, model, in_backward, optimizer, hook, view):
    options = {"model": model, "in_backward": in_backward, "optimizer": optimizer}
    ours = assert_parity(worlds(3).run(steps_of_both, hook=hook, view=view, **options))
    assert_same_on_all_ranks(ours)


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
def test_feature_without_unused_parameters_changes_no_bits(worlds, model, feature, hook, view):
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
def test_create_graph_warns_and_gradients_are_unchanged(world, feature, view):
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
def test_training_resynchronized_after_hook_failure_continues(worlds, fault, bad_step, feature, view):
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


def free_buffers(hook, view):
    """Gradients with and without `lazy_bucket_allocation`, and the bytes of flat buffers between steps."""
    seen, held = [], []
    for lazy in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        ddp = wrap("gradwire", module, hook, view, lazy_bucket_allocation=lazy)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seen.append([])
        for _ in range(3):
            zero_grad(ddp, "to-none")
            ddp(torch.randn(3, 4, generator=generator)).square().sum().backward()
            seen[-1] += gradients(ddp)
        buffers = [bucket._buffer for bucket in ddp.reducer.buckets]
        held.append(sum(buffer.nbytes for buffer in buffers if buffer is not None))
    return seen, held


@ways
def test_lazy_buckets_hold_no_memory_between_steps_and_change_no_bits(world, hook, view):
    for (eager, lazy), (held, held_lazy) in world.run(free_buffers, hook=hook, view=view):
        assert_same_bits(lazy, eager)
        assert (held > 0) == (view or hook != "powersgd"), "zero-copy hooks have no flat buffers"
        assert held_lazy == (held if view else 0)


def train_in_two_ways(feature, hook, view):
    """Gradients where the caller ends each backward, some of them accumulated, and where autograd does."""
    seen = []
    for is_manual in (True, False):
        ddp = wrap("gradwire", build("mlp"), hook, view, **FEATURES.get(feature, {}))
        ddp.require_manual_backward_finalization = is_manual
        generator = torch.Generator().manual_seed(dist.get_rank())
        records = []
        for step in range(5):
            zero_grad(ddp, "to-none")
            if step == 3:
                with ddp.no_sync():
                    ddp(*ddp.module.batch(generator)).backward()
            ddp(*ddp.module.batch(generator)).backward()
            assert ddp.should_finalize_after_backward == is_manual
            if is_manual:
                ddp.finalize_backward()
            records.append(gradients(ddp))
        seen.append(records)
    return seen


@pytest.mark.parametrize("feature", ["none", *FEATURES])
@ways
def test_backward_finalized_by_the_caller_has_the_same_bits(world, feature, hook, view):
    for manual, automatic in world.run(train_in_two_ways, feature=feature, hook=hook, view=view):
        assert_same_bits(manual, automatic)


def finalize_at_wrong_times():
    """What is raised, and the gradients of a step after it."""
    ddp = wrap("gradwire", build("mlp"), "fp16")
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    errors = {"not required": message_of(ddp.finalize_backward)}
    ddp.require_manual_backward_finalization = True
    errors["before"] = message_of(ddp.finalize_backward)
    loss = ddp(*batch)
    loss.register_hook(lambda _: errors.update({"within": message_of(ddp.finalize_backward)}))
    loss.backward()
    errors["change"] = message_of(setattr, ddp, "require_manual_backward_finalization", False)
    ddp.finalize_backward()
    errors["twice"] = message_of(ddp.finalize_backward)
    ddp(*batch).backward()
    errors["forgotten"] = message_of(ddp, *batch)
    ddp.resynchronize()
    ddp.zero_grad()
    ddp(*batch).backward()
    ddp.finalize_backward()
    return errors, gradients(ddp)


def test_backward_finalized_at_a_wrong_time_raises(world):
    parts = {
        "not required": "require_manual_backward_finalization is False",
        "before": "no complete reduction is in flight",
        "within": "a backward pass runs, which may still read gradients",
        "change": "require_manual_backward_finalization changes within a backward pass",
        "twice": "no complete reduction is in flight",
        "forgotten": "finalize_backward() was not called for the last backward pass",
    }
    results = world.run(finalize_at_wrong_times)
    for errors, _ in results:
        for when, part in parts.items():
            assert part in errors[when], when
    assert_same_on_all_ranks([seen for _, seen in results])


def copy_with_manual_finalization(how):
    ddp = DDP(build("mlp"))
    ddp.require_manual_backward_finalization = True
    twin = copy.deepcopy(ddp) if how == "deepcopy" else pickle.loads(pickle.dumps(ddp))
    twin(*twin.module.batch(torch.Generator().manual_seed(dist.get_rank()))).backward()
    twin.finalize_backward()
    return gradients(twin)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_is_finalized_by_its_caller_too(world, how):
    assert_same_on_all_ranks(world.run(copy_with_manual_finalization, how=how))
