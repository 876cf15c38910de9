"""Hooks and states reject wrong arguments, naming the argument, its value and the expectation."""

import copy
import itertools
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from gradwire.hooks import debugging_hooks, default_hooks, powerSGD_hook, scaled_cast_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from tests.support.training import WRAPPERS, build, plainly_named

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
    "batched": powerSGD_hook.batched_powerSGD_hook,
    "scaled": scaled_cast_hooks.scaled_cast_hook,
    "noop": debugging_hooks.noop_hook,
    "fp16_of_powersgd": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "bf16_of_allreduce": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
}
OF_GROUPS = ["allreduce", "fp16", "bf16", "bf16_of_allreduce"]
STATES = {
    "None": lambda: None,
    "group": lambda: dist.group.WORLD,
    "model": lambda: nn.Linear(2, 2),
    "string": lambda: "gloo",
    "powersgd": lambda: PowerSGDState(None),
    "scaled": lambda: ScaledCastState(),
}
NOT_GROUPS = {
    "model": nn.Linear(2, 2),
    "string": "x",
    "number": 4,
    "true": True,
    "list": [0, 1],
    "tensor": torch.ones(2),
}


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def first_backwards(wrapper, hooks, states):
    """What the first backward says of each hook with each state."""
    found = {}
    for hook in hooks:
        for state in states:
            ddp = WRAPPERS[wrapper](nn.Linear(3, 2))
            function = HOOKS[hook]
            ddp.register_comm_hook(STATES[state](), plainly_named(function) if wrapper == "pytorch" else function)
            found[hook, state] = message_of(ddp(torch.ones(1, 3)).sum().backward)
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_powersgd_hook_with_wrong_state_raises_and_names_both(worlds, wrapper):
    case = {"hooks": ["powersgd", "batched", "fp16_of_powersgd"], "states": ["None", "group", "model", "scaled"]}
    (messages,) = worlds(1).run(first_backwards, wrapper=wrapper, **case)
    assert len(messages) == 12
    for message in messages.values():
        assert re.match(
            r"TypeError: The state of (batched_)?powerSGD_hook is (None|an object of type .+); expected a gradwire "
            r"PowerSGDState: model\.register_comm_hook\(PowerSGDState\(",
            message,
        )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_scaled_cast_hook_with_wrong_state_raises_and_names_both(worlds, wrapper):
    case = {"hooks": ["scaled"], "states": ["None", "group", "model", "powersgd"]}
    (messages,) = worlds(1).run(first_backwards, wrapper=wrapper, **case)
    for message in messages.values():
        assert re.match(r"TypeError: The state of scaled_cast_hook is .*; expected a gradwire ScaledCastState", message)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_process_group_hook_with_wrong_state_raises_and_names_it(worlds, wrapper):
    named = {"model": "type Linear", "string": "'gloo'", "scaled": "type ScaledCastState"}
    (messages,) = worlds(1).run(first_backwards, wrapper=wrapper, hooks=OF_GROUPS, states=list(named))
    for (_, state), message in messages.items():
        assert re.match(r"TypeError: The state of \w+_hook is .*; expected a torch\.distributed\.ProcessGroup", message)
        assert named[state] in message


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_process_group_hook_accepts_a_group_or_none(worlds, wrapper):
    (messages,) = worlds(1).run(first_backwards, wrapper=wrapper, hooks=OF_GROUPS, states=["None", "group"])
    assert set(messages.values()) == {"no error"}


@pytest.mark.parametrize("value", NOT_GROUPS)
@pytest.mark.parametrize("make", [lambda group: PowerSGDState(group, 4), ScaledCastState], ids=["powersgd", "scaled"])
def test_states_accept_only_a_process_group_or_none(make, value):
    with pytest.raises(TypeError, match=r"^process_group is .*; expected a torch\.distributed\.ProcessGroup.* or None"):
        make(NOT_GROUPS[value])
    state = make(None)
    with pytest.raises(TypeError, match=r"^process_group is"):
        state.process_group = NOT_GROUPS[value]
    assert state.process_group is None


def test_error_messages_quote_short_values_in_full():
    with pytest.raises(TypeError, match="process_group is 'nccl';"):
        PowerSGDState("nccl")
    with pytest.raises(TypeError, match="process_group is an object of type Linear;"):
        PowerSGDState(nn.Linear(2, 2))


# --- not a bucket


def hook_states(hook):
    if hook in ("powersgd", "batched", "fp16_of_powersgd"):
        return PowerSGDState(None)
    return ScaledCastState() if hook == "scaled" else None


def fsdp_backwards(strategy):
    found = []
    for name, hook in HOOKS.items():
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
        )
        model.register_comm_hook(hook_states(name), hook)
        found.append(message_of(model(torch.ones(2, 4)).sum().backward))
    return found


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_hooks_on_fsdp_raise_that_they_need_ddp(worlds, strategy):
    for message in itertools.chain.from_iterable(worlds(2).run(fsdp_backwards, strategy=strategy)):
        assert re.match(
            r"TypeError: \w+_hook was called with an object of type Tensor in place of a bucket.*for "
            r"DistributedDataParallel.*FullyShardedDataParallel",
            message,
        )


@pytest.mark.parametrize(
    "bucket", [None, (torch.ones(2), torch.ones(2)), torch.ones(2)], ids=["none", "pair", "tensor"]
)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_reject_arguments_that_are_not_buckets(hook, bucket):
    with pytest.raises(TypeError, match="in place of a bucket of gradients"):
        HOOKS[hook](hook_states(hook), bucket)


def by_keyword(hook, wrapper):
    ddp = WRAPPERS[wrapper](build("mlp"))
    first = {"allreduce": "process_group", "powersgd": "state"}[hook]
    state = hook_states(hook)
    ddp.register_comm_hook(state, lambda state, bucket: HOOKS[hook](bucket=bucket, **{first: state}))
    return message_of(lambda: ddp(*ddp.module.batch(torch.Generator())).backward())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
def test_hooks_can_be_called_by_keyword(worlds, hook, wrapper):
    assert worlds(1).run(by_keyword, hook=hook, wrapper=wrapper) == ["no error"]


# --- copies


def copies_of_a_state_with_a_group():
    state = PowerSGDState(dist.group.WORLD)
    return [copied.process_group for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)))]


def test_copy_of_a_state_has_no_process_group(worlds):
    # That of the model it is registered with; a group cannot be pickled.
    assert worlds(1).run(copies_of_a_state_with_a_group) == [[None, None]]
