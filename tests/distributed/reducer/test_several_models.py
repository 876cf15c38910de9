"""Several models in one process: one hook for all of them, one backward through them, one process group or several."""

import itertools
import threading
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradwire
from gradwire.comm import connections
from gradwire.exchange.decorators import zero_copy
from gradwire.hooks import default_hooks, powerSGD_hook, quantization_hooks
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import (
    WRAPPERS,
    build,
    error_of,
    failing_hook,
    gradients,
    own_batches,
    plainly_named,
    train_steps,
    wrapped,
)

DDP = gradwire.DistributedDataParallel

# Without memory, so one pair of state and hook may serve several models.
STATELESS = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "cast state": lambda: (default_hooks.CastState(), default_hooks.fp16_compress_hook),
    "fp32 sums": lambda: (default_hooks.CastState(accumulate="fp32"), default_hooks.bf16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "fp16 wrapper of pytorch's": lambda: (None, default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)),
    "per tensor": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "per channel": lambda: (None, quantization_hooks.quantization_perchannel_hook),
}


# PyTorch's hook on its own DDP issues collectives of both models in the order of their futures.
@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [pair for pair in itertools.product(STATELESS, WRAPPERS) if pair != ("fp16 wrapper of pytorch's", "pytorch")],
)
@on_ranks(2)
def test_one_hook_for_two_models_in_one_backward_averages_both(hook, wrapper):
    shared = STATELESS[hook]()  # the same objects as state and hook of both
    models, generators = (
        [wrapped(wrapper, hook=shared, seed=seed) for seed in range(2)],
        [own_batches(), own_batches(1)],
    )
    together = []
    for _ in range(4):
        for ddp in models:
            ddp.zero_grad()
        sum(ddp(*ddp.module.batch(each)) for ddp, each in zip(models, generators, strict=True)).backward()
        together.append([gradients(ddp) for ddp in models])
    apart = [
        train_steps(wrapped(wrapper, hook=STATELESS[hook](), seed=seed), 4, own_batches(seed)) for seed in range(2)
    ]
    assert_same_bits(together, [list(pair) for pair in zip(*apart, strict=True)])


@zero_copy
def straggling_hook(state, bucket):
    """fp16, which on rank 0 returns only once its result is there, so that the other wrapper's hook comes late."""
    future = default_hooks.fp16_compress_hook(state, bucket)
    if dist.get_rank() == 0:
        future.wait()
    return future


class Head(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.own = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.shared(x)).square().sum()


def train_with_shared_layer(first, second, hook):
    """Gradients of two models that share a layer, after one backward through both."""
    torch.manual_seed(0)
    shared = torch.nn.Linear(4, 4)
    hooks = ((None, straggling_hook), hook) if hook is not None else (None, None)
    models = [wrapped(name, Head(shared), hook=each) for name, each in zip((first, second), hooks, strict=True)]
    x = torch.randn(3, 4, generator=own_batches())
    seen = []
    for _ in range(10):
        for ddp in models:
            ddp.zero_grad()
        sum(ddp(x) for ddp in models).backward()
        seen.append([gradients(ddp) for ddp in models])
    return seen


@pytest.mark.parametrize("pair", [("gradwire", "gradwire"), ("gradwire", "pytorch"), ("pytorch", "gradwire")])
@pytest.mark.parametrize("hook", [None, "fp16"])
@on_ranks(2)
def test_layer_shared_by_two_wrappers_has_pytorchs_gradients(hook, pair):
    assert_same_bits(train_with_shared_layer(*pair, hook), train_with_shared_layer("pytorch", "pytorch", hook))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2, limit=60)
def test_second_models_hook_is_compared_too(wrapper):
    hooks = [default_hooks.fp16_compress_hook, default_hooks.allreduce_hook]
    group = dist.new_group()

    def step(hook):
        ddp = WRAPPERS[wrapper](build("mlp"), process_group=group)
        ddp.register_comm_hook(group, hook)
        train_steps(ddp)

    for hook in hooks:  # both are agreed on for other models
        step(hook)
    kind, text = error_of(step, hooks[dist.get_rank()])
    assert kind == "RuntimeError"
    assert "hook: fp16_compress_hook on rank 0; allreduce_hook on rank 1" in text


# The process group of a hook and that of its DDP.

STATES = {
    "powersgd": (
        lambda group: powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1),
        powerSGD_hook.powerSGD_hook,
    ),
    "int4": (quantization_hooks.QuantizationState, quantization_hooks.quantization_hook),
    "scaled": (ScaledCastState, scaled_cast_hook),
    "cast state": (default_hooks.CastState, default_hooks.fp16_compress_hook),
    "fp16": (lambda group: group, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (lambda group: group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "per channel": (lambda group: group, quantization_hooks.quantization_perchannel_hook),
}


def half_of_three():
    """The group of ranks 0 and 1, or of rank 2."""
    return [dist.new_group([0, 1]), dist.new_group([2])][int(dist.get_rank() == 2)]


def train_in_subgroup(wrapper, hook, group_of_hook):
    """The error and the gradients on ranks 0 and 1 and on rank 2, each with a DDP of its own ranks."""
    half, twin = half_of_three(), half_of_three()
    make, function = STATES[hook]
    chosen = {"none": None, "same": half, "twin": twin, "world": dist.group.WORLD}[group_of_hook]
    ddp, seen = wrapped(wrapper, group=half), []

    def train():
        named = plainly_named(function) if wrapper == "pytorch" and hook == "fp16 wrapper" else function
        ddp.register_comm_hook(make(chosen), named)
        seen.extend(train_steps(ddp, 4))

    return error_of(train), seen


@pytest.mark.parametrize("group_of_hook", ["none", "twin"])
@pytest.mark.parametrize("hook", STATES)
@on_ranks(3)
def test_hook_without_a_group_averages_over_the_ranks_of_its_ddp(hook, group_of_hook):
    error, seen = train_in_subgroup("gradwire", hook, group_of_hook)
    assert error is None
    assert_same_bits(seen, train_in_subgroup("gradwire", hook, "same")[1])
    first, second, _ = from_all_ranks(seen)
    assert_same_bits(first, second)


# A hook of the user's, or a wrapper, may pass the group to several hooks.
@pytest.mark.parametrize(
    ("hook", "wrapper", "group_of_hook"),
    [
        (hook, *pair)
        for hook in STATES
        for pair in (("gradwire", "world"), ("pytorch", "world"), ("pytorch", "none"))
        if hook != "fp16 wrapper" or pair == ("pytorch", "none")
    ],
)
@on_ranks(3, limit=60)
def test_hook_with_other_ranks_than_its_ddp_raises(hook, wrapper, group_of_hook):
    (kind, text), seen = train_in_subgroup(wrapper, hook, group_of_hook)
    assert kind == "ValueError"
    assert "would be averaged over other ranks than its parameters" in text
    assert "model.process_group" in text
    assert seen == []


def fail_on_rank_1(ddp):
    """The error of a step whose hook fails on rank 1."""
    with failing_hook(ddp, 1 if dist.get_rank() == 1 else -1):
        return error_of(train_steps, ddp)[0]


@pytest.mark.parametrize("hook", STATES)
@on_ranks(2, limit=90)
def test_hook_in_another_group_of_the_same_ranks_starts_again_with_its_ddp(hook):
    group, twin = dist.new_group(), dist.new_group()
    make, function = STATES[hook]
    ddp = wrapped(group=group, hook=(make(twin), function))
    train_steps(ddp, 3)
    assert fail_on_rank_1(ddp) == ["RuntimeError", "Fault"][dist.get_rank()]
    ddp.resynchronize()
    assert_same_on_all_ranks(from_all_ranks(train_steps(ddp, 3)))


@pytest.mark.parametrize("hook", ["cast state", "int4", "powersgd", "scaled"])
@on_ranks(3, limit=60)
def test_other_ranks_assigned_to_a_registered_state_raise(hook):
    half = half_of_three()
    make, function = STATES[hook]
    state = make(None)
    ddp = wrapped(hook=(state, function))
    train_steps(ddp)
    state.process_group = half
    kind, text = error_of(train_steps, ddp)
    assert kind == "ValueError"
    assert "would be averaged over other ranks than its parameters" in text


@pytest.mark.parametrize("second", WRAPPERS)
@on_ranks(2)
def test_views_shared_with_pytorchs_wrapper_raise(second):
    shared = torch.nn.Linear(4, 4)
    models = [WRAPPERS[name](Head(shared), gradient_as_bucket_view=True) for name in ("gradwire", second)]
    error = error_of(lambda: sum(ddp(torch.ones(2, 4)) for ddp in models).backward())
    if second == "pytorch":
        assert error[0] == "ValueError"
        assert "share parameters" in error[1]
    else:
        assert error is None


# Hooks and states that do not belong together, and a model that another wrapper shards.


@on_ranks(1)
def test_pytorchs_hook_with_gradwires_state_raises_with_the_remedy():
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    kind, text = error_of(DDP(build("mlp")).register_comm_hook, state, torch_powersgd.powerSGD_hook)
    assert kind == "TypeError"
    assert "from gradwire.hooks.powerSGD_hook import powerSGD_hook" in text
    theirs = WRAPPERS["pytorch"](build("mlp"))
    theirs.register_comm_hook(state, torch_powersgd.powerSGD_hook)
    kind, text = error_of(train_steps, theirs, 4)
    assert kind == "AttributeError"
    assert "register gradwire.hooks.powerSGD_hook.powerSGD_hook" in text


@on_ranks(2)
def test_ddp_around_fully_sharded_modules_raises_with_the_remedy():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(module[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    kind, text = error_of(DDP, module)
    assert kind == "ValueError"
    assert "its submodule 1 is sharded by fully_shard" in text
    assert "replicate" in text


# Threads.


def train_in_two_threads(wrapper, hook, same_group):
    """The errors of two threads that train a model each, and their gradients.

    Each trains for 40 steps, on a common group until its error: the other thread may begin late.
    """
    groups = [dist.new_group(timeout=timedelta(seconds=60)) for _ in range(1 if same_group else 2)]
    groups = groups * 2 if same_group else groups
    models = [wrapped(wrapper, seed=seed, group=group) for seed, group in enumerate(groups)]
    for ddp, group in zip(models, groups, strict=True):
        if hook is not None:
            ddp.register_comm_hook(group, hook)
    errors, seen = [None, None], [None, None]
    both = threading.Barrier(2)

    def train(k):
        generator = own_batches(k)
        both.wait()
        for _ in itertools.count() if same_group else range(40):
            models[k].zero_grad()
            errors[k] = error_of(lambda: models[k](*models[k].module.batch(generator)).backward())
            if errors[k] is not None:
                break
        seen[k] = gradients(models[k])

    in_threads(partial(train, 0), partial(train, 1))
    return errors, seen


def in_threads(*actions):
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("wrapper", "hook"),
    [("gradwire", None), ("gradwire", default_hooks.fp16_compress_hook), ("pytorch", default_hooks.fp16_compress_hook)],
)
def test_two_threads_on_one_group_raise_on_every_rank(worlds, wrapper, hook):
    outcomes = worlds(2).run_fresh(in_default_group, wrapper=wrapper, hook=hook, same_group=True, limit=90)
    texts = []
    for outcome in outcomes:
        assert outcome.how == "returned", outcome
        errors, _ = outcome.value
        assert None not in errors, errors  # a thread that was connecting gets the error of its connection
        texts += [text for _, text in errors]
    assert any("Two threads exchange gradients on one process group" in text for text in texts), texts


def in_default_group(**options):
    dist.init_process_group("gloo")
    return train_in_two_threads(**options)


@pytest.mark.parametrize("use", ["executor", "transport"])
@on_ranks(2)
def test_failure_while_another_thread_connects_raises_in_that_thread(use):
    device = torch.device("cpu")
    open_connections = {
        "executor": lambda found: found.executor(device),
        "transport": lambda found: found.transport("backward", device),
    }[use]
    found = connections.connections_of(dist.new_group())
    duplicate, n_made = connections.duplicate_group, {"executor": 2, "transport": 1}[use]
    made = []

    def duplicate_while_the_step_fails(*arguments):
        made.append(duplicate(*arguments))
        if len(made) == n_made:
            dist.barrier()  # all ranks have connected
            found.fail("the other thread failed")
        return made[-1]

    with mock.patch.object(connections, "duplicate_group", duplicate_while_the_step_fails):
        for _ in range(2):
            kind, text = error_of(open_connections, found)
            assert kind == "RuntimeError"
            assert "the other thread failed" in text
    assert len(made) == n_made


@on_ranks(2)
def test_two_threads_on_groups_of_their_own_train():
    errors, seen = train_in_two_threads("gradwire", default_hooks.fp16_compress_hook, same_group=False)
    assert errors == [None, None]
    assert_same_on_all_ranks(from_all_ranks(seen))


@on_ranks(2)
def test_forward_in_a_helper_thread_and_one_backward_train():
    group = dist.new_group()
    models = [wrapped(seed=seed, group=group) for seed in range(2)]
    losses = [None, None]

    def forward(k):
        losses[k] = models[k](*models[k].module.batch(own_batches(k)))

    forward(0)
    in_threads(partial(forward, 1))
    sum(losses).backward()
    assert_same_on_all_ranks(from_all_ranks([gradients(ddp) for ddp in models]))


@on_ranks(2)
def test_wrapper_whose_constructor_has_raised_does_not_disturb_the_next():
    module = torch.nn.Linear(4, 4)
    module.bias.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(RuntimeError) as kept:  # its traceback keeps the wrapper alive
        DDP(module)
    module.bias.requires_grad_(True)
    ddp = DDP(module)
    ddp(torch.ones(1, 4)).sum().backward()
    assert kept.value is not None
    assert module.bias.grad is not None
