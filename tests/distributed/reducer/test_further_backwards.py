"""Several backward passes for one forward, and several forwards before their backwards: all are averaged exactly."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.hooks import quantization_hooks
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALLEST, Fault, error_of, gradients, own_batches, wrapped


class TwoHeads(nn.Module):
    """A trunk with two heads; an output for each."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x, both=True):
        hidden = self.trunk(x).tanh()
        return {"left": self.left(hidden), "right": self.right(hidden) if both else None}


def loss_of(output):
    return sum(each.square().mean() for each in output.values() if each is not None)


def forwards(count, order, is_local=()):
    """A step of ``count`` forwards, then their backwards in this order; those in ``is_local`` run in `no_sync`."""

    def step(model, batches):
        losses = []
        for i in range(count):
            with model.no_sync() if i in is_local and hasattr(model, "no_sync") else nullcontext():
                losses.append(loss_of(model(batches[i])))
        for i in order:
            losses[i].backward()

    return step


def two_losses(model, batches):
    """Two backwards of one forward."""
    output = model(batches[0])
    loss_of(output).backward(retain_graph=True)
    output["right"].abs().sum().backward()


def two_losses_with_zeroed_gradients(model, batches):
    """The second loss leaves the left head without a gradient."""
    output = model(batches[0])
    loss_of(output).backward(retain_graph=True)
    model.zero_grad()
    output["right"].abs().sum().backward()


def accumulated(model, batches):
    """A micro-batch in `no_sync`, then two forwards and two backwards."""
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        loss_of(model(batches[0])).backward()
    first, second = loss_of(model(batches[1])), loss_of(model(batches[2]))
    second.backward()
    first.backward()


STEPS = {
    "two": forwards(2, (0, 1)),
    "three, reversed": forwards(3, (2, 1, 0)),
    "second forward local, its backward first": forwards(2, (1, 0), is_local=(1,)),
    "two losses": two_losses,
    "two losses, gradients zeroed": two_losses_with_zeroed_gradients,
    "accumulated": accumulated,
}
OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "buffers freed": {"lazy_bucket_allocation": True},
    "compared": {"check_every": 1},
}
LARGEST_ERROR = {None: 1e-6, "fp16": 2e-2, "int8": 5e-2}


def pair(options, hook, kind=TwoHeads):
    torch.manual_seed(0)
    local = kind()
    torch.manual_seed(0)
    if hook == "int8":
        hook = quantization_hooks.QuantizationState(wire="int8", block_size=32), quantization_hooks.quantization_hook
    return wrapped(model=kind(), hook=hook, group=dist.new_group(), **({"bucket_cap_mb": SMALLEST} | options)), local


def assert_mean(ddp, local, limit):
    of_ranks = from_all_ranks(gradients(local))
    for name, gradient in gradients(ddp).items():
        of_this = [each[name] for each in of_ranks]
        if of_this[0] is None:
            assert gradient is None
            continue
        mean = torch.stack(of_this).mean(0)
        assert (gradient - mean).norm() <= limit * mean.norm(), name
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@pytest.mark.parametrize("hook", LARGEST_ERROR)
@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2, 3)
def test_every_backward_of_a_synchronized_forward_is_averaged(options, hook):
    for name, step in STEPS.items():
        if options == "static" and "zeroed" in name:
            continue  # another graph
        ddp, local = pair(OPTIONS[options], hook)
        generator = own_batches()
        for _ in range(3):
            batches = torch.randn(3, 5, 6, generator=generator)
            for model in (ddp, local):
                model.zero_grad()
                step(model, batches)
            assert_mean(ddp, local, LARGEST_ERROR[hook])


class Heads(TwoHeads):
    """A forward for each head, and a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 2)

    def forward(self, x, head):
        return self.get_submodule(head)(self.trunk(x).tanh()).square().mean()


def of_heads(order, *heads):
    """A step of a forward for each of these heads, then one backward of the sum, or a backward for each in an order."""

    def step(model, batches):
        losses = [model(batches[i], head) for i, head in enumerate(heads)]
        for loss in [sum(losses)] if order is None else [losses[i] for i in order]:
            loss.backward()

    return step


def after_a_forward_alone(model, batches):
    """The loss of the first forward is not used."""
    model(batches[0], "left")
    model(batches[1], "right").backward()


OF_HEADS = {
    "one backward": of_heads(None, "left", "right"),
    "one backward of three": of_heads(None, "left", "right", "left"),
    "in order": of_heads((0, 1), "left", "right"),
    "reversed": of_heads((1, 0), "left", "right"),
    "three": of_heads((1, 2, 0), "left", "right", "right"),
    "after a forward alone": after_a_forward_alone,
}


@pytest.mark.parametrize("hook", LARGEST_ERROR)
@pytest.mark.parametrize("options", ["unused", "skipped", "unused, view", "static"])
@pytest.mark.parametrize("step", OF_HEADS)
@on_ranks(2, 3)
def test_heads_of_several_forwards_are_averaged(step, options, hook):
    chosen = {**OPTIONS, "unused, view": OPTIONS["unused"] | OPTIONS["view"]}[options]
    if options == "static" and step == "after a forward alone":
        return  # its first backward counts the calls of both graphs
    ddp, local = pair(chosen, hook, Heads)
    generator = own_batches()
    for _ in range(3):
        batches = torch.randn(3, 5, 6, generator=generator)
        for model in (ddp, local):
            model.zero_grad()
            OF_HEADS[step](model, batches)
        assert_mean(ddp, local, LARGEST_ERROR[hook])
        assert ddp.module.spare.weight.grad is None


@pytest.mark.parametrize("hook", [None, "int8"])
@pytest.mark.parametrize("step", ["one backward", "one backward of three", "in order", "reversed", "three"])
@on_ranks(2, 3)
def test_heads_with_find_unused_give_the_bits_of_a_static_graph(step, hook):
    options = {"bucket_cap_mb": None, "bucket_cap_mb_list": [0]}  # a bucket for every parameter
    models = [pair(OPTIONS[name] | options, hook, Heads)[0] for name in ("unused", "static")]
    generator = own_batches()
    for _ in range(4):
        batches = torch.randn(3, 5, 6, generator=generator)
        for model in models:
            model.zero_grad()
            OF_HEADS[step](model, batches)
        assert_same_bits(*map(gradients, models))


@pytest.mark.parametrize("first", ["local", "synchronized"])
@on_ranks(2)
def test_head_that_only_a_local_forward_uses_raises_in_a_joint_backward(first):
    ddp, _ = pair(OPTIONS["unused"], None, Heads)

    def losses():
        for kind in ("local", "synchronized") if first == "local" else ("synchronized", "local"):
            with ddp.no_sync() if kind == "local" else nullcontext():
                yield ddp(torch.ones(5, 6), "left" if kind == "local" else "right")

    kind, text = error_of(lambda: sum(losses()).backward())
    assert kind == "RuntimeError"
    assert text.startswith("Expected to mark a variable ready only once")
    assert "name left." in text
    assert "and outside of `no_sync()`" in text


@on_ranks(2)
def test_buckets_of_equal_heads_are_launched_during_the_backward():
    ddp, _ = pair(OPTIONS["unused"], None, Heads)
    launched = []
    ddp.module.trunk.weight.register_hook(lambda _: launched.append(ddp.reducer._backward.n_launched))
    for _ in range(2):
        of_heads(None, "left", "left")(ddp, torch.ones(2, 5, 6))
    assert launched[-1] > 1  # the heads come first


# --- on one rank only


def after_one_backward():
    """A DDP after three steps, a function that makes a step, and the latest output."""
    ddp, _ = pair({}, "fp16")
    generator = own_batches()

    def step():
        ddp.zero_grad()
        output = ddp(torch.randn(5, 6, generator=generator))
        loss_of(output).backward(retain_graph=True)
        return output

    outputs = [step() for _ in range(3)]
    return ddp, step, outputs[-1]


def assert_resumes(ddp, step):
    ddp.resynchronize()
    step()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


@on_ranks(2, 3, limit=60)
def test_further_backward_of_one_rank_raises_on_all_with_both_counts():
    ddp, step, output = after_one_backward()
    kind, text = error_of(loss_of(output).backward if dist.get_rank() == 1 else step)
    assert kind == "RuntimeError"
    assert "The ranks are out of step; synchronized forward passes: " in text
    assert "3 on rank 1" in text
    assert "4 on rank " in text
    assert_resumes(ddp, step)


@on_ranks(2)
def test_gradients_of_inputs_and_backwards_of_the_bare_module_stay_local():
    ddp, step, output = after_one_backward()
    if dist.get_rank() == 1:
        torch.autograd.grad(loss_of(output), list(ddp.parameters()), retain_graph=True)
        ddp.zero_grad()
        loss_of(ddp.module(torch.ones(2, 6))).backward()
        assert all(parameter.grad is not None for parameter in ddp.parameters())
    step()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))


def raise_fault(_):
    raise Fault


@on_ranks(2, limit=60)
def test_further_backward_that_raised_early_can_be_repeated():
    ddp, step, output = after_one_backward()
    handle = output["right"].register_hook(raise_fault)  # comes first: no parameter has a gradient yet
    assert error_of(loss_of(output).backward, retain_graph=True)[0] == "Fault"
    handle.remove()
    ddp.zero_grad()
    loss_of(output).backward()
    assert_same_on_all_ranks(from_all_ranks(gradients(ddp)))
    step()


@on_ranks(2, limit=60)
def test_further_backward_that_raised_late_cannot_be_repeated():
    ddp, step, output = after_one_backward()
    handle = output["left"].register_hook(raise_fault)  # the right head has its gradients
    assert error_of(loss_of(output).backward, retain_graph=True)[0] == "Fault"
    handle.remove()
    dist.barrier()
    kind, text = error_of(loss_of(output).backward)
    assert kind == "RuntimeError"
    assert "a further backward pass of a synchronized forward pass raised an exception" in text
    assert_resumes(ddp, step)


@on_ranks(2, 3, limit=60)
def test_error_in_a_further_backward_raises_on_every_rank():
    ddp, step, output = after_one_backward()
    if dist.get_rank() == 1:
        handle = ddp.module.trunk.weight.register_hook(raise_fault)  # the heads have their gradients
        assert error_of(loss_of(output).backward)[0] == "Fault"
        handle.remove()
        kind, text = error_of(step)
        assert "a further backward pass of a synchronized forward pass raised an exception" in text
    else:
        kind, text = error_of(loss_of(output).backward)
    assert kind == "RuntimeError"
    assert_resumes(ddp, step)
