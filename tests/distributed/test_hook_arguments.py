"""What hooks and states say to arguments that they cannot use."""

import copy
import logging
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from training import WRAPPERS, build, plainly_named

from gradwire.hooks import debugging_hooks, default_hooks, powerSGD_hook, scaled_cast_hooks
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState

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


def first_backward(wrapper, hook, state):
    ddp = WRAPPERS[wrapper](build("mlp"))
    ddp.register_comm_hook(STATES[state](), plainly_named(HOOKS[hook]) if wrapper == "pytorch" else HOOKS[hook])
    return message_of(lambda: ddp(*ddp.module.batch(torch.Generator())).backward())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("state", ["None", "group", "model", "scaled"])
@pytest.mark.parametrize("hook", ["powersgd", "batched", "fp16_of_powersgd"])
def test_powersgd_with_another_state_raises_and_names_both(worlds, hook, state, wrapper):
    for message in worlds(1).run(first_backward, wrapper=wrapper, hook=hook, state=state):
        assert re.match(
            r"TypeError: The state of (batched_)?powerSGD_hook is (None|an object of type .+); expected a gradwire "
            r"PowerSGDState: model\.register_comm_hook\(PowerSGDState\(",
            message,
        )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("state", ["None", "group", "model", "powersgd"])
def test_scaled_cast_with_another_state_raises_and_names_both(worlds, state, wrapper):
    for message in worlds(1).run(first_backward, wrapper=wrapper, hook="scaled", state=state):
        assert re.match(r"TypeError: The state of scaled_cast_hook is .*; expected a gradwire ScaledCastState", message)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("state", "named"), [("model", "type Linear"), ("string", "'gloo'"), ("scaled", "ScaledCast")])
@pytest.mark.parametrize("hook", OF_GROUPS)
def test_hook_of_a_process_group_with_another_state_raises_and_names_it(worlds, hook, state, named, wrapper):
    for message in worlds(1).run(first_backward, wrapper=wrapper, hook=hook, state=state):
        assert re.match(rf"TypeError: The state of \w+_hook is .*{named}.*; expected a torch.*ProcessGroup", message)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("state", ["None", "group"])
@pytest.mark.parametrize("hook", OF_GROUPS)
def test_hook_of_a_process_group_takes_a_group_or_none(worlds, hook, state, wrapper):
    assert worlds(1).run(first_backward, wrapper=wrapper, hook=hook, state=state) == ["no error"]


@pytest.mark.parametrize("value", NOT_GROUPS)
@pytest.mark.parametrize("make", [lambda group: PowerSGDState(group, 4), ScaledCastState], ids=["powersgd", "scaled"])
def test_states_take_a_process_group_or_none(make, value):
    with pytest.raises(TypeError, match=r"^process_group is .*; expected a torch\.distributed\.ProcessGroup.* or None"):
        make(NOT_GROUPS[value])
    state = make(None)
    with pytest.raises(TypeError, match=r"^process_group is"):
        state.process_group = NOT_GROUPS[value]
    assert state.process_group is None


def test_short_values_are_named_in_full():
    with pytest.raises(TypeError, match="process_group is 'nccl';"):
        PowerSGDState("nccl")
    with pytest.raises(TypeError, match="process_group is an object of type Linear;"):
        PowerSGDState(nn.Linear(2, 2))


# --- not a bucket


def hook_states(hook):
    if hook in ("powersgd", "batched", "fp16_of_powersgd"):
        return PowerSGDState(None)
    return ScaledCastState() if hook == "scaled" else None


def fsdp_backward(hook, strategy):
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
    )
    model.register_comm_hook(hook_states(hook), HOOKS[hook])
    return message_of(lambda: model(torch.ones(2, 4)).sum().backward())


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_fsdp_say_that_they_need_ddp(worlds, hook, strategy):
    for message in worlds(2).run(fsdp_backward, hook=hook, strategy=strategy):
        assert re.match(
            r"TypeError: \w+_hook was called with an object of type Tensor in place of a bucket.*for "
            r"DistributedDataParallel.*FullyShardedDataParallel",
            message,
        )


@pytest.mark.parametrize(
    "bucket", [None, (torch.ones(2), torch.ones(2)), torch.ones(2)], ids=["none", "pair", "tensor"]
)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_take_only_buckets(hook, bucket):
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


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))], ids=["copy", "file"]
)
def test_copying_a_state_without_a_process_group_says_nothing(caplog, copied):
    with caplog.at_level(logging.WARNING):
        copied(PowerSGDState(None))
    assert not caplog.records


def copy_with_a_group():
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Keep()
    logging.getLogger("gradwire").addHandler(handler)
    state = copy.deepcopy(PowerSGDState(dist.group.WORLD))
    logging.getLogger("gradwire").removeHandler(handler)
    return state.process_group, records


def test_copying_a_state_with_a_process_group_warns_that_it_stays_behind(worlds):
    for group, records in worlds(1).run(copy_with_a_group):
        assert group is None
        assert re.match("The process group of a PowerSGDState is not pickled; set state.process_group", *records)
