"""Several models in one process: one hook for all of them, one backward through them, one process group or several."""

import copy
import gc
import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradwire
from gradwire.hooks import _parameter_names, default_hooks, powerSGD_hook, quantization_hooks
from gradwire.hooks._bucket import zero_copy
from gradwire.hooks.auto_hook import AutoState, auto_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState, scaled_cast_hook
from gradwire.reducer import parameters
from tests.support.bits import assert_same_bits
from tests.support.training import SMALL, WRAPPERS, FailsInBackward, build, error_of, gradients, plainly_named, register

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


def train_together(names, wrapper, hook, steps):
    """The gradients of models whose losses are added up; all register the same objects as state and hook."""
    state, function = STATELESS[hook]()
    function = plainly_named(function) if wrapper == "pytorch" else function
    models = [WRAPPERS[wrapper](build(name, seed), bucket_cap_mb=SMALL) for seed, name in enumerate(names)]
    for ddp in models:
        ddp.register_comm_hook(state, function)
    generators = [torch.Generator().manual_seed(10 * seed + dist.get_rank()) for seed in range(len(names))]
    seen = []
    for _ in range(steps):
        for ddp in models:
            ddp.zero_grad()
        losses = [ddp(*ddp.module.batch(of)) for ddp, of in zip(models, generators, strict=True)]
        sum(losses).backward()
        seen.append([gradients(ddp) for ddp in models])
    return seen


def together_and_apart(wrapper, hook):
    together = train_together(["mlp", "mlp"], wrapper, hook, steps=4)
    apart = [train_apart(seed, wrapper, hook, steps=4) for seed in range(2)]
    return together, [[step[seed] for seed, step in enumerate(steps)] for steps in zip(*apart, strict=True)]


def train_apart(seed, wrapper, hook, steps):
    """As `train_together`, but the other model's losses are in backwards of their own."""
    state, function = STATELESS[hook]()
    function = plainly_named(function) if wrapper == "pytorch" else function
    ddp = WRAPPERS[wrapper](build("mlp", seed), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(state, function)
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    seen = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
        seen.append([None] * seed + [gradients(ddp)])
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", STATELESS)
def test_one_hook_for_two_models_in_one_backward_averages_both(worlds, hook, wrapper):
    if (hook, wrapper) == ("fp16 wrapper of pytorch's", "pytorch"):
        pytest.skip("PyTorch's hook on its own DDP issues collectives of both models in the order of their futures")
    for together, apart in worlds(2).run(together_and_apart, hook=hook, wrapper=wrapper):
        assert_same_bits(together, apart)


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
    models = [WRAPPERS[name](Head(shared), bucket_cap_mb=SMALL) for name in (first, second)]
    if hook is not None:
        register(models[0], (None, straggling_hook))
        register(models[1], hook)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    seen = []
    for _ in range(10):
        for ddp in models:
            ddp.zero_grad()
        sum(ddp(x) for ddp in models).backward()
        seen.append([gradients(ddp) for ddp in models])
    return seen


def shared_layer_on_both(first, second, hook):
    return train_with_shared_layer(first, second, hook), train_with_shared_layer("pytorch", "pytorch", hook)


@pytest.mark.parametrize("pair", [("gradwire", "gradwire"), ("gradwire", "pytorch"), ("pytorch", "gradwire")])
@pytest.mark.parametrize("hook", [None, "fp16"])
def test_layer_shared_by_two_wrappers_has_pytorchs_gradients(worlds, hook, pair):
    for ours, theirs in worlds(2).run(shared_layer_on_both, first=pair[0], second=pair[1], hook=hook):
        assert_same_bits(ours, theirs)


def shared_layer_in_a_frozen_heap():
    """As `shared_layer_on_both`, where the garbage collector finds no wrapper."""
    gc.collect()
    theirs = train_with_shared_layer("pytorch", "pytorch", "fp16")
    with (
        mock.patch.object(_parameter_names, "live_wrappers", lambda: []),
        mock.patch.object(parameters, "live_wrappers", list),
    ):
        return train_with_shared_layer("gradwire", "gradwire", "fp16"), theirs


def test_wrappers_that_share_a_layer_find_each_other_in_a_frozen_heap(worlds):
    for ours, theirs in worlds(2).run(shared_layer_in_a_frozen_heap):
        assert_same_bits(ours, theirs)


def second_model_with_another_hook(wrapper):
    """The error of the second model's first backward, whose hook is another on each rank, and its gradients."""
    hooks = [default_hooks.fp16_compress_hook, default_hooks.allreduce_hook]
    group = dist.new_group()

    def step(hook):
        ddp = WRAPPERS[wrapper](build("mlp"), process_group=group)
        ddp.register_comm_hook(group, hook)
        ddp(*ddp.module.batch(torch.Generator())).backward()

    for hook in hooks:  # both are agreed on for other models
        step(hook)
    return error_of(step, hooks[dist.get_rank()])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_second_models_hook_is_compared_too(worlds, wrapper):
    for kind, text in worlds(2).run(second_model_with_another_hook, wrapper=wrapper, limit=60):
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
    "auto": (lambda group: AutoState(group, plan={"layers.0.weight": "int8"}), auto_hook),
    "cast state": (default_hooks.CastState, default_hooks.fp16_compress_hook),
    "fp16": (lambda group: group, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (lambda group: group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "per channel": (lambda group: group, quantization_hooks.quantization_perchannel_hook),
}


def train_in_subgroup(wrapper, hook, group_of_hook):
    """Gradients on ranks 0 and 1 and on rank 2, each with a DDP of its own ranks, or the error."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    twins = [dist.new_group([0, 1]), dist.new_group([2])]
    half = int(dist.get_rank() == 2)
    make, function = STATES[hook]
    chosen = {"none": None, "same": halves[half], "twin": twins[half], "world": dist.group.WORLD}[group_of_hook]
    ddp = WRAPPERS[wrapper](build("mlp"), process_group=halves[half], bucket_cap_mb=SMALL)
    register = plainly_named(function) if wrapper == "pytorch" and hook == "fp16 wrapper" else function
    seen = []

    def train():
        ddp.register_comm_hook(make(chosen), register)
        for step in range(4):
            ddp.zero_grad()
            ddp(*ddp.module.batch(torch.Generator().manual_seed(10 * step + dist.get_rank()))).backward()
            seen.append(gradients(ddp))

    return error_of(train), seen


@pytest.mark.parametrize("group_of_hook", ["none", "twin"])
@pytest.mark.parametrize("hook", STATES)
def test_hook_without_a_group_averages_over_the_ranks_of_its_ddp(worlds, hook, group_of_hook):
    options = {"wrapper": "gradwire", "hook": hook}
    results = worlds(3).run(train_in_subgroup, group_of_hook=group_of_hook, **options)
    expected = worlds(3).run(train_in_subgroup, group_of_hook="same", **options)
    for (error, seen), (_, wanted) in zip(results, expected, strict=True):
        assert error is None
        assert_same_bits(seen, wanted)
    assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("wrapper", "group_of_hook"), [("gradwire", "world"), ("pytorch", "world"), ("pytorch", "none")]
)
@pytest.mark.parametrize("hook", STATES)
def test_hook_with_other_ranks_than_its_ddp_raises(worlds, hook, wrapper, group_of_hook):
    if (wrapper == "gradwire" and hook == "fp16 wrapper") or (wrapper, hook, group_of_hook) == (
        "pytorch",
        "fp16 wrapper",
        "world",
    ):
        pytest.skip("a hook of the user's, or a wrapper, may pass the group to several hooks")
    for error, seen in worlds(3).run(
        train_in_subgroup, wrapper=wrapper, hook=hook, group_of_hook=group_of_hook, limit=60
    ):
        assert error[0] == "ValueError"
        assert "would be averaged over other ranks than its parameters" in error[1]
        assert "model.process_group" in error[1]
        assert seen == []


def fail_with_twin_group(hook):
    """Gradients after an error on rank 1 and a resynchronization; the hook was given a group of the same ranks."""
    group, twin = dist.new_group(), dist.new_group()
    make, function = STATES[hook]
    ddp = DDP(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    ddp.register_comm_hook(make(twin), function)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ddp(*ddp.module.batch(generator)).backward()
    run = ddp.reducer._run_comm_hook

    def failing(bucket):
        if bucket.index() == 1 and dist.get_rank() == 1:
            raise ValueError("expected")
        return run(bucket)

    ddp.reducer._run_comm_hook = failing
    error = error_of(lambda: ddp(*ddp.module.batch(generator)).backward())
    del ddp.reducer._run_comm_hook
    ddp.resynchronize()
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(*ddp.module.batch(generator)).backward()
        seen.append(gradients(ddp))
    return error[0], seen


@pytest.mark.parametrize("hook", STATES)
def test_hook_in_another_group_of_the_same_ranks_starts_again_with_its_ddp(worlds, hook):
    (first, seen), (second, other) = worlds(2).run(fail_with_twin_group, hook=hook, limit=90)
    assert (first, second) == ("RuntimeError", "ValueError")
    assert_same_bits(seen, other)


def one_cast_state_for_two_groups():
    """Gradients of two models with one state, on two groups of the same ranks, around an error in the first."""
    state = default_hooks.CastState()
    models = [DDP(build("mlp", seed), process_group=dist.new_group(), bucket_cap_mb=SMALL) for seed in range(2)]
    for ddp in models:
        ddp.register_comm_hook(state, default_hooks.fp16_compress_hook)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step():
        for ddp in models:
            ddp.zero_grad()
            ddp(*ddp.module.batch(generator)).backward()

    step()
    run = models[0].reducer._run_comm_hook

    def failing(bucket):
        if bucket.index() == 1 and dist.get_rank() == 1:
            raise ValueError("expected")
        return run(bucket)

    models[0].reducer._run_comm_hook = failing
    error = error_of(step)
    del models[0].reducer._run_comm_hook
    models[0].resynchronize()
    for _ in range(3):
        step()
    return error[0], state.process_group is None, [gradients(ddp) for ddp in models]


def test_one_state_for_two_models_uses_the_process_group_of_each(worlds):
    (first, is_none, seen), (second, _, other) = worlds(2).run(one_cast_state_for_two_groups, limit=90)
    assert (first, second) == ("RuntimeError", "ValueError")
    assert is_none
    assert_same_bits(seen, other)


def one_state_for_world_and_subgroup(hook):
    """Mean gradients of a model of all ranks and of one of a subgroup, which share a state without a group."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    half = halves[int(dist.get_rank() == 2)]
    make, function = STATES[hook]
    state, means = make(None), []
    for group in (dist.group.WORLD, half):
        ddp = DDP(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
        ddp.register_comm_hook(state, function)
        batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
        ddp(*batch).backward()
        local = build("mlp")
        local(*batch).backward()
        for name, gradient in gradients(local).items():
            dist.all_reduce(gradient, group=group)
            means.append((gradients(ddp)[name], gradient / dist.get_world_size(group)))
        if hook != "cast state":  # which serves one model at a time
            state = copy.deepcopy(state)
    return means


@pytest.mark.parametrize("hook", ["cast state", "int4", "powersgd"])
def test_state_without_a_group_averages_over_the_ranks_of_each_of_its_models(worlds, hook):
    for means in worlds(3).run(one_state_for_world_and_subgroup, hook=hook):
        for seen, mean in means:
            torch.testing.assert_close(seen, mean, rtol=0, atol=1e-2 * mean.abs().max().item() + 1e-6)


def assign_other_ranks(hook):
    """What a step raises after the state got a group of other ranks."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    make, function = STATES[hook]
    state, ddp = make(None), DDP(build("mlp"), bucket_cap_mb=SMALL)
    ddp.register_comm_hook(state, function)
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    ddp(*batch).backward()
    state.process_group = halves[int(dist.get_rank() == 2)]
    return error_of(lambda: ddp(*batch).backward())


@pytest.mark.parametrize("hook", ["cast state", "int4", "powersgd", "scaled"])
def test_other_ranks_assigned_to_a_registered_state_raise(worlds, hook):
    for kind, text in worlds(3).run(assign_other_ranks, hook=hook, limit=60):
        assert kind == "ValueError"
        assert "would be averaged over other ranks than its parameters" in text


def wrap_twice_in_a_subgroup():
    """What PyTorch's DDP of a subgroup raises with a hook without a group, if an older wrapper is still alive."""
    half = [dist.new_group([0, 1]), dist.new_group([2])][int(dist.get_rank() == 2)]
    module = build("mlp")
    older = WRAPPERS["pytorch"](module, process_group=half)
    older.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ddp = WRAPPERS["pytorch"](module, process_group=half)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return error_of(lambda: ddp(*module.batch(torch.Generator())).backward())


def test_older_wrapper_of_a_model_hides_no_wrong_group(worlds):
    for kind, text in worlds(3).run(wrap_twice_in_a_subgroup, limit=60):
        assert kind == "ValueError"
        assert "The default group has ranks [0, 1, 2], the DistributedDataParallel" in text


def share_views(first, second):
    shared = torch.nn.Linear(4, 4)
    models = [WRAPPERS[name](Head(shared), gradient_as_bucket_view=True) for name in (first, second)]
    return error_of(lambda: sum(ddp(torch.ones(2, 4)) for ddp in models).backward())


@pytest.mark.parametrize("pair", [("gradwire", "pytorch"), ("gradwire", "gradwire")])
def test_views_shared_with_pytorchs_wrapper_raise(worlds, pair):
    for error in worlds(2).run(share_views, first=pair[0], second=pair[1]):
        if "pytorch" in pair:
            assert error[0] == "ValueError"
            assert "share parameters" in error[1]
        else:
            assert error is None


# Hooks and states that do not belong together, and a model that another wrapper shards.


def register_mixed():
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ours = error_of(DDP(build("mlp")).register_comm_hook, state, torch_powersgd.powerSGD_hook)
    theirs = WRAPPERS["pytorch"](build("mlp"))
    theirs.register_comm_hook(state, torch_powersgd.powerSGD_hook)

    def train():
        for _ in range(4):
            theirs(*theirs.module.batch(torch.Generator())).backward()

    return ours, error_of(train)


def test_pytorchs_hook_with_gradwires_state_raises_with_the_remedy(worlds):
    ((ours, theirs),) = worlds(1).run(register_mixed)
    assert ours[0] == "TypeError"
    assert "from gradwire.hooks.powerSGD_hook import powerSGD_hook" in ours[1]
    assert theirs[0] == "AttributeError"
    assert "register gradwire.hooks.powerSGD_hook.powerSGD_hook" in theirs[1]


def wrap_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(module[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return error_of(DDP, module)


def test_ddp_around_fully_sharded_modules_raises_with_the_remedy(worlds):
    for kind, text in worlds(2).run(wrap_sharded):
        assert kind == "ValueError"
        assert "its submodule 1 is sharded by fully_shard" in text
        assert "replicate" in text


# Threads.


def train_in_two_threads(wrapper, hook, same_group):
    """The errors of two threads that train a model each, and their gradients."""
    timeout = timedelta(seconds=60)
    groups = (
        [dist.new_group(timeout=timeout)] * 2 if same_group else [dist.new_group(timeout=timeout) for _ in range(2)]
    )
    models = [
        WRAPPERS[wrapper](build("mlp", seed), process_group=group, bucket_cap_mb=SMALL)
        for seed, group in enumerate(groups)
    ]
    for ddp, group in zip(models, groups, strict=True):
        if hook is not None:
            ddp.register_comm_hook(group, hook)
    errors, seen = [None, None], [None, None]
    both = threading.Barrier(2)

    def train(k):
        generator = torch.Generator().manual_seed(10 * k + dist.get_rank())
        both.wait()
        for _ in range(40):
            models[k].zero_grad()
            if errors[k] is None:
                errors[k] = error_of(lambda: models[k](*models[k].module.batch(generator)).backward())
        seen[k] = gradients(models[k])

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, seen


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
    assert any("Two threads exchange gradients on one process group" in text for text in texts)


def in_default_group(**options):
    dist.init_process_group("gloo")
    return train_in_two_threads(**options)


def test_two_threads_on_groups_of_their_own_train(worlds):
    results = worlds(2).run(
        train_in_two_threads, wrapper="gradwire", hook=default_hooks.fp16_compress_hook, same_group=False
    )
    for errors, _ in results:
        assert errors == [None, None]
    assert_same_bits(results[0][1], results[1][1])


def wrap_again_in_another_thread():
    """Gradients of a new wrapper, in a thread of its own, after a backward of the old one has raised on all ranks."""
    group = dist.new_group()
    ddp = DDP(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
    first = ddp.module.layers[0]
    handle = first.register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
    batch = ddp.module.batch(torch.Generator().manual_seed(dist.get_rank()))
    error, seen = error_of(lambda: ddp(*batch).backward()), []
    handle.remove()

    def train():
        again = DDP(build("mlp"), process_group=group, bucket_cap_mb=SMALL)
        again(*batch).backward()
        seen.append(gradients(again))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return error[0], seen


def test_model_wrapped_again_in_another_thread_trains(worlds):
    (first, seen), (second, other) = worlds(2).run(wrap_again_in_another_thread)
    assert first == second == "Fault"
    assert_same_bits(seen, other)
    assert len(seen) == 1


def forward_in_a_helper_thread():
    """Gradients of two models on one group in one backward; the forward of one ran in another thread."""
    group = dist.new_group()
    models = [DDP(build("mlp", seed), process_group=group, bucket_cap_mb=SMALL) for seed in range(2)]
    losses = [None, None]

    def forward(k):
        generator = torch.Generator().manual_seed(10 * k + dist.get_rank())
        losses[k] = models[k](*models[k].module.batch(generator))

    forward(0)
    thread = threading.Thread(target=forward, args=(1,))
    thread.start()
    thread.join()
    sum(losses).backward()
    return [gradients(ddp) for ddp in models]


def test_forward_in_a_helper_thread_and_one_backward_train(worlds):
    first, second = worlds(2).run(forward_in_a_helper_thread)
    assert_same_bits(first, second)
