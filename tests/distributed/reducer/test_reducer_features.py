"""Delayed parameters, optimizers in the backward, copies, buffer hooks, logging data and changed process groups.

See features.py for the oracle.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.features import FEATURES, Parts, assert_parity, features, views, ways, wrap, zero_grad
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, SMALLEST, WRAPPERS, build, gradients, message_of, own_batches
from tests.support.zoo import Probe


def delay_some(wrapper, hook, view, clear):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    named = dict(module.named_parameters())
    delayed = [(name, named[name]) for name in ("2.0.weight", "3.0.bias", "2.0.bias")]
    first = named["0.0.bias"]
    options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": first}
    ddp = wrap(wrapper, module, hook, view, **options)
    generator = own_batches()
    seen = []
    for _ in range(4):
        zero_grad(ddp, clear)
        ddp(torch.randn(3, 4, generator=generator)).square().sum().backward()
        dist.barrier()  # nothing else waits for the sum
        seen.append(gradients(ddp))
    return seen


@pytest.mark.parametrize("clear", ["to-none", "to-zero"])
@ways
@on_ranks(2, 3)
def test_law4_delayed_parameters_match_pytorch(hook, view, clear):
    ours = assert_parity(delay_some, hook=hook, view=view, clear=clear)
    assert_same_on_all_ranks(from_all_ranks(ours))


class Parted(nn.Module):
    """Parameters of the module itself, and of a layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.own = nn.Parameter(torch.ones(3, dtype=dtype))
        self.other = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return (self.own * x).sum() + self.other.sum() * x.sum() + self.layer(x).sum()


def wrap_delaying(module, *names):
    delayed = [(name, module.get_parameter(name)) for name in names]
    return wrap("gradwire", module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.own)


@on_ranks(2)
def test_delayed_gradient_that_was_cleared_after_the_forward_is_averaged():
    ddp = wrap_delaying(Parted(), "layer.weight")
    loss = ddp(torch.full((3,), 2.0 * dist.get_rank()))
    ddp.zero_grad()
    loss.backward()
    assert_same_bits(ddp.module.layer.weight.grad, torch.ones(1, 3))


@pytest.mark.parametrize("how", ["delayed", "ignored"])
@on_ranks(2)
def test_left_out_parameter_of_the_module_itself_is_in_no_bucket(how):
    module = Parted()
    if how == "delayed":
        ddp = wrap_delaying(module, "own")
    else:
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
        ddp = wrap("gradwire", module)
    assert sorted(name for bucket in ddp.reducer.buckets for name in bucket.parameter_names()) == [
        "layer.weight",
        "other",
    ]
    ddp(torch.full((3,), 2.0 * dist.get_rank())).backward()
    assert_same_bits(module.own.grad, torch.full((3,), 1.0 if how == "delayed" else 2.0 * dist.get_rank()))


@pytest.mark.parametrize(
    ("dtype", "names", "text"),
    [
        (torch.bfloat16, ["own"], "names own, which is torch.bfloat16 on cpu"),
        (torch.float32, ["own", "other", "layer.weight"], "names all parameters that are trained"),
    ],
    ids=["dtype", "all"],
)
@on_ranks(2)
def test_parameters_that_cannot_be_delayed_raise_at_construction(dtype, names, text):
    assert text in message_of(wrap_delaying, Parted(dtype), *names)


def large_gradients(wrapper, view, clear, accumulate, dtype):
    """Gradients of layers of more than 1 MiB and of small ones, one of them non-contiguous."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(700, 800), nn.Tanh(), nn.Linear(800, 700), nn.Linear(700, 3)).to(dtype)
    module[2].weight.data = module[2].weight.data.t().contiguous().t()
    ddp = WRAPPERS[wrapper](module, gradient_as_bucket_view=view)
    generator = own_batches()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clear", ["to-none", "kept"])
@views
@on_ranks(2, 3)
def test_law4_large_gradients_match_pytorch(view, clear, accumulate, dtype):
    ours = assert_parity(large_gradients, view=view, clear=clear, accumulate=accumulate, dtype=dtype)
    assert_same_on_all_ranks(from_all_ranks(ours))


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
    generator = own_batches()
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


@ways
@pytest.mark.parametrize(
    ("model", "in_backward", "optimizer"),
    [("mlp", "all", "adam"), ("mlp", "half", "sgd"), ("conv", "all", "sgd"), ("conv", "half", "adam")],
)
@on_ranks(3)
def test_optimizers_in_backward_match_ordinary_optimizers(model, in_backward, optimizer, hook, view):
    options = {"model": model, "optimizer": optimizer, "hook": hook, "view": view}
    ordinary = step_in_backward("gradwire" if hook != "none" else "pytorch", in_backward="none", **options)
    fused = step_in_backward("gradwire", in_backward=in_backward, **options)
    assert_same_bits(fused, ordinary)
    assert_same_on_all_ranks(from_all_ranks(fused))


@ways
@features
@pytest.mark.parametrize(("how", "trained"), [("pickle", 0), ("pickle", 3), ("deepcopy", 3)])
@on_ranks(2)
def test_copies_keep_their_hook_and_features(how, trained, feature, hook, view):
    torch.manual_seed(0)
    model = wrap("gradwire", Parts(), hook, view, bucket_cap_mb_list=[SMALLEST], **FEATURES[feature])
    generator = own_batches()
    uses = [(0, 2)] * 6 if feature == "static" else [(0, 1), (0, 2), (0, 3), (1,), (0, 1, 2), (3, 4)]
    for use in uses[:trained]:
        model.zero_grad()
        model(torch.randn(3, 4, generator=generator), use).backward()
    twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    for use in uses[trained:]:
        batch = torch.randn(3, 4, generator=generator)
        for ddp in (model, twin):
            ddp.zero_grad()
            ddp(batch, use).backward()
        assert_same_bits(gradients(twin), gradients(model))
    for name in (*FEATURES[feature], "gradient_as_bucket_view"):
        assert getattr(model, name) == getattr(twin, name)
    assert [hook for hook, _ in twin._comm_hooks] == [hook for hook, _ in model._comm_hooks]


def logged(wrapper, feature, hook, view):
    """Logging data after construction and after the last step."""
    torch.manual_seed(0)
    ddp = wrap(wrapper, Parts(), hook, view, **FEATURES.get(feature, {}))
    at_first = ddp._get_ddp_logging_data()
    for _ in range(4):
        ddp(torch.ones(3, 4), range(5) if feature == "none" else (0, 1, 3)).backward()
    return at_first, ddp._get_ddp_logging_data()


@views
@pytest.mark.parametrize("hook", ["none", "flat"])
@pytest.mark.parametrize("feature", ["none", *FEATURES])
@on_ranks(2)
def test_logging_data_match_pytorchs(feature, hook, view):
    theirs, ours = (logged(wrapper, feature, hook, view) for wrapper in WRAPPERS)
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


@pytest.mark.parametrize("before", [True, False], ids=["before-forward", "after-forward"])
@pytest.mark.parametrize("feature", ["none", "find-unused", "static"])
@on_ranks(2, 3)
def test_law4_buffer_hooks_match_pytorch(feature, before):
    ours = assert_parity(train_with_buffer_hook, feature=feature, before=before)
    if not before:
        assert_same_on_all_ranks(from_all_ranks([seen for _, seen in ours]))


@views
@pytest.mark.parametrize("feature", ["none", "find-unused", "static"])
@on_ranks(3)
def test_updated_process_group_averages_over_its_ranks(feature, view):
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
    results = from_all_ranks(seen)
    assert [len(steps) for steps in results] == [6, 6, 4]
    for steps in results:
        for pairs in steps:
            for actual, expected in pairs:
                assert_same_bits(actual, expected)


@ways
@on_ranks(2, 3)
def test_lazy_buckets_hold_no_memory_between_steps_and_change_no_bits(hook, view):
    seen, held = [], []
    for lazy in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        ddp = wrap("gradwire", module, hook, view, lazy_bucket_allocation=lazy)
        generator = own_batches()
        seen.append([])
        for _ in range(3):
            zero_grad(ddp, "to-none")
            ddp(torch.randn(3, 4, generator=generator)).square().sum().backward()
            seen[-1] += gradients(ddp)
        buffers = [bucket._buffer for bucket in ddp.reducer.buckets]
        held.append(sum(buffer.nbytes for buffer in buffers if buffer is not None))
    (eager, lazy), (held, held_lazy) = (seen, held)
    assert_same_bits(lazy, eager)
    assert (held > 0) == (view or hook != "powersgd"), "zero-copy hooks have no flat buffers"
    assert held_lazy == (held if view else 0)


@on_ranks(2, 3)
def test_backward_finalized_at_a_wrong_time_raises():
    parts = {
        "not required": "require_manual_backward_finalization is False",
        "before": "no complete reduction is in flight",
        "within": "a backward pass runs, which may still read gradients",
        "change": "require_manual_backward_finalization changes within a backward pass",
        "twice": "no complete reduction is in flight",
        "forgotten": "finalize_backward() was not called for the last backward pass",
    }
    ddp = wrap("gradwire", build("mlp"), "fp16")
    batch = ddp.module.batch(own_batches())
    errors = {"not required": message_of(ddp.finalize_backward)}
    ddp.require_manual_backward_finalization = True
    assert ddp.should_finalize_after_backward
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
    results = from_all_ranks((errors, gradients(ddp)))
    for errors, _ in results:
        for when, part in parts.items():
            assert part in errors[when], when
    assert_same_on_all_ranks([seen for _, seen in results])
