"""Hooks of `register_post_accumulate_grad_hook`, which run before the reducer's: those that step an optimizer raise on
every rank, all others work.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALLEST, build, gradients, message_of, own_batches, train_steps, wrapped
from tests.support.zoo import SparseTable

RATE = 0.125


class Table(SparseTable):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self):
        super().__init__(has_dense_layer=True)

    def batch(self, generator):
        return (torch.randint(64, (4,), generator=generator),)


def on_each_parameter(make):
    """Register the hook ``make(parameter)`` on each parameter of a wrapped model; returns the handles."""
    return lambda ddp: [each.register_post_accumulate_grad_hook(make(each)) for each in ddp.module.parameters()]


def step_of_optimizer(parameter, clear):
    """PyTorch's tutorial: an optimizer for each parameter."""
    optimizer = torch.optim.SGD([parameter], lr=RATE)

    def hook(_):
        optimizer.step()
        if clear is not None:
            optimizer.zero_grad(set_to_none=clear == "to None")

    return hook


def move_away(parameter):
    """Accumulate gradients elsewhere, as training with gradients in the CPU's memory does."""
    parameter.elsewhere = torch.zeros_like(parameter)

    def hook(_):
        parameter.elsewhere += parameter.grad
        parameter.grad = None

    return hook


def steps_of_earlier_parameters(ddp):
    """LOMO: the hook of a gradient applies those that came before it, to ``.data``."""

    def apply(_):
        for parameter in ddp.module.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(RATE * parameter.grad)
                parameter.grad = None

    return [each.register_hook(apply) for each in ddp.module.parameters()]


def optimizers_after_wrapping(ddp):
    parameters = list(ddp.module.parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": RATE})
    handles = torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
    return [handle for parameter in parameters for handle in handles[parameter]]


EARLY = {
    "tutorial": on_each_parameter(partial(step_of_optimizer, clear="to None")),
    "zeroed": on_each_parameter(partial(step_of_optimizer, clear="to zero")),
    "not cleared": on_each_parameter(partial(step_of_optimizer, clear=None)),
    "moved away": on_each_parameter(move_away),
    "lomo": steps_of_earlier_parameters,
    "after wrapping": optimizers_after_wrapping,
}
OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
    "sparse": {},  # another model
}
WORDS = ("before the gradient was averaged", "_apply_optimizer_in_backward", "resynchronize(from_rank=0)")


def assert_equal_parameters(ddp):
    assert_same_on_all_ranks(from_all_ranks([parameter.detach().clone() for parameter in ddp.module.parameters()]))


def assert_trains_on(ddp):
    """After ``resynchronize(from_rank=0)``, gradients are the mean over the ranks again."""
    ddp.resynchronize(from_rank=0)
    assert_equal_parameters(ddp)
    local = build_like(ddp)
    train_steps_of(local)
    train_steps(ddp)
    for name, gradient in gradients(ddp).items():
        mean = torch.stack([each[name].to_dense() for each in from_all_ranks(gradients(local))]).mean(0)
        torch.testing.assert_close(gradient.to_dense(), mean)


def build_like(ddp):
    module = type(ddp.module)()
    module.load_state_dict(ddp.module.state_dict())
    return module


def train_steps_of(module):
    module.zero_grad()
    module(*module.batch(own_batches())).backward()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("early", EARLY)
@on_ranks(2, 3)
def test_optimizer_step_before_the_average_raises_on_every_rank_with_the_remedy(early, options):
    torch.manual_seed(0)
    model = Table() if options == "sparse" else "mlp"
    ddp = wrapped(model=model, group=dist.new_group(), **{"bucket_cap_mb": SMALLEST} | OPTIONS[options])
    if early == "after wrapping" or early == "lomo":
        train_steps(ddp, 2)
    handles = EARLY[early](ddp)
    message = message_of(train_steps, ddp, 2)
    names = [name for name, _ in ddp.module.named_parameters()]
    assert any(name in message for name in names)
    assert all(words in message for words in WORDS)
    for handle in handles:
        handle.remove()
    assert_trains_on(ddp)


@on_ranks(2)
def test_optimizers_registered_after_wrapping_raise_with_a_bucket_for_each_parameter():
    # Their hooks come after the reducer's own: each gradient is in flight before it is removed.
    ddp = wrapped(group=dist.new_group(), bucket_cap_mb=SMALLEST)
    train_steps(ddp, 2)
    EARLY["after wrapping"](ddp)
    assert WORDS[0] in message_of(train_steps, ddp)
    ddp.resynchronize(from_rank=0)


@on_ranks(2)
def test_sparse_gradient_that_a_hook_removes_raises():
    torch.manual_seed(0)
    ddp = wrapped(model=Table(), group=dist.new_group())
    handle = ddp.module.table.weight.register_post_accumulate_grad_hook(move_away(ddp.module.table.weight))
    assert message_of(train_steps, ddp).startswith("The gradient of table.weight was removed")
    handle.remove()
    assert_trains_on(ddp)


@on_ranks(2, 3)
def test_removed_gradient_is_not_taken_for_an_unused_one():
    ddp = wrapped(group=dist.new_group(), find_unused_parameters=True)
    weight = ddp.module.layers[2].weight
    handle = weight.register_post_accumulate_grad_hook(move_away(weight))
    assert "The gradient of layers.2.weight was removed" in message_of(train_steps, ddp)
    handle.remove()
    assert_trains_on(ddp)


@on_ranks(2, 3)
def test_optimizer_step_before_the_average_on_one_rank_raises_on_all():
    ddp = wrapped(group=dist.new_group(), hook="int4")
    handles = EARLY["tutorial"](ddp) if dist.get_rank() == 0 else []
    assert WORDS[0] in message_of(train_steps, ddp, 2)
    for handle in handles:
        handle.remove()
    ddp.resynchronize(from_rank=0)
    assert_same_on_all_ranks(from_all_ranks(train_steps(ddp)))


@on_ranks(2)
def test_optimizer_step_after_the_backward_and_before_it_is_finalized_raises():
    ddp = wrapped(group=dist.new_group())
    ddp.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    ddp(*ddp.module.batch(own_batches())).backward()
    optimizer.step()
    assert WORDS[0] in message_of(ddp.finalize_backward)
    ddp.resynchronize(from_rank=0)


@on_ranks(2)
def test_delayed_parameter_that_a_hook_steps_raises_with_its_name():
    module = build("mlp")
    name, delayed = next(iter(module.named_parameters()))
    options = {"delay_all_reduce_named_params": [(name, delayed)], "param_to_hook_all_reduce": delayed}
    ddp = wrapped(model=module, group=dist.new_group(), **options)
    handle = delayed.register_post_accumulate_grad_hook(step_of_optimizer(delayed, clear=None))
    assert message_of(train_steps, ddp).startswith(f"{name} was changed")
    handle.remove()
    ddp.resynchronize(from_rank=0)


@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph", None])
@on_ranks(2)
def test_gradients_removed_in_no_sync_are_the_ranks_own_affair(kind):
    ddp = wrapped(group=dist.new_group(), **({kind: True} if kind else {}))
    handles = EARLY["moved away"](ddp)
    with ddp.no_sync():
        ddp(*ddp.module.batch(own_batches())).backward()
    moved = [each.elsewhere.clone() for each in ddp.module.parameters()]
    for handle in handles:
        handle.remove()
    local = build_like(ddp)
    train_steps_of(local)
    assert_same_bits(moved, [each.grad for each in local.parameters()])
    train_steps(ddp, 2)


class Halves(torch.autograd.Function):
    """The identity of x, whose gradient for p is undefined."""

    @staticmethod
    def forward(ctx, x, p):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class WithUndefined(nn.Module):
    """A layer, and a parameter for which autograd has no gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.p = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Halves.apply(self.layer(x), self.p)


@pytest.mark.parametrize("options", ["plain", "unused", "static", "view"])
@on_ranks(2)
def test_undefined_gradient_under_a_hook_is_zero(options):
    ddp = wrapped(model=WithUndefined(), group=dist.new_group(), **OPTIONS[options])
    seen = []
    for parameter in ddp.module.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
    gradient = ddp.module.p.grad
    assert len(seen) == 9
    assert gradient is None if options in ("unused", "static") else not gradient.any()


def norms(parameter, seen):
    return lambda _: seen.append(parameter.grad.norm().item())


def scaled(parameter, seen):
    return lambda _: seen.append(parameter.grad.mul_(2))


def replaced(parameter, seen):
    def hook(_):
        parameter.grad = 2 * parameter.grad

    return hook


def copied(parameter, seen):
    return lambda _: seen.append(parameter.grad.clone())


LEGITIMATE = {"norms": (norms, 1), "scaled": (scaled, 2), "replaced": (replaced, 2), "copied": (copied, 1)}


@pytest.mark.parametrize("hook", [None, "bf16"])
@pytest.mark.parametrize("options", ["plain", "unused", "static", "view"])
@pytest.mark.parametrize("kind", LEGITIMATE)
@on_ranks(2)
def test_hooks_that_read_or_scale_gradients_work(kind, options, hook):
    make, factor = LEGITIMATE[kind]
    expected, seen = train_steps(wrapped(group=dist.new_group(), hook=hook, **OPTIONS[options]), 3), []
    ddp = wrapped(group=dist.new_group(), hook=hook, **OPTIONS[options])
    on_each_parameter(partial(make, seen=seen))(ddp)
    got = train_steps(ddp, 3)
    assert_same_bits(got, [{name: factor * each for name, each in step.items()} for step in expected])


@on_ranks(2)
def test_optimizer_step_between_two_backwards_of_watched_parameters_works():
    # The second forward comes before the step, its backward after it: no gradient needs what the step has changed.
    ddp = wrapped(model=nn.Linear(4, 2), group=dist.new_group())
    on_each_parameter(lambda _: lambda _: None)(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    batch = torch.full((3, 4), 1.0 + dist.get_rank())
    first, second = ddp(batch), ddp(2 * batch)
    first.sum().backward()
    optimizer.step()
    ddp.zero_grad()
    second.sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((2, 4), 9.0))  # 3 samples, and 2 times the mean of 1 and 2


@pytest.mark.parametrize("hook", ["int4", "allreduce", "fp16"])
@on_ranks(2, 3)
def test_tutorials_optimizer_step_raises_under_a_hook_on_pytorchs_ddp(hook):
    ddp = wrapped("pytorch", group=dist.group.WORLD, hook=hook)
    EARLY["tutorial"](ddp)
    assert WORDS[0] in message_of(train_steps, ddp)


@on_ranks(2)
def test_hooks_that_read_gradients_work_on_pytorchs_ddp():
    seen = []
    ddp = wrapped("pytorch", hook="int4")
    on_each_parameter(partial(norms, seen=seen))(ddp)
    expected = train_steps(wrapped("pytorch", hook="int4"), 3)
    assert_same_bits(train_steps(ddp, 3), expected)
    assert len(seen) == 3 * len(list(ddp.module.parameters()))
