"""Hooks and states reject wrong arguments, naming the argument, its value and the expectation."""

import itertools
import logging
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from gradwire.hooks import (
    HookState,
    Memory,
    debugging_hooks,
    default_hooks,
    hook_for,
    powerSGD_hook,
    quantization_hooks,
    scaled_cast_hooks,
)
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import WRAPPERS, error_of, logged, message_of, train_steps, wrapped

# Hooks by the class of their state, and a right one.
HOOKS = {
    "PowerSGDState": [
        powerSGD_hook.powerSGD_hook,
        powerSGD_hook.batched_powerSGD_hook,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ],
    "ScaledCastState": [scaled_cast_hooks.scaled_cast_hook],
    "QuantizationState": [quantization_hooks.quantization_hook],
    "ProcessGroup": [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ],
}
RIGHT = {
    "PowerSGDState": lambda: PowerSGDState(None),
    "ScaledCastState": ScaledCastState,
    "QuantizationState": QuantizationState,
    "ProcessGroup": lambda: None,
}
# States that are wrong for some hooks, and their text in an error: short values in full.
WRONG = {
    "None": (lambda: None, "None"),
    "group": (lambda: dist.group.WORLD, "an object of type ProcessGroup"),
    "model": (lambda: nn.Linear(2, 2), "an object of type Linear"),
    "string": (lambda: "gloo", "'gloo'"),
    "powersgd": (lambda: PowerSGDState(None), "an object of type PowerSGDState"),
    "scaled": (ScaledCastState, "an object of type ScaledCastState"),
}
NOT_GROUPS = {
    "model": (nn.Linear(2, 2), "an object of type Linear"),
    "string": ("nccl", "'nccl'"),
    "true": (True, "True"),
    "list": ([0, 1], "an object of type list"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("expected", "state"),
    [
        *(("PowerSGDState", state) for state in ("None", "group", "model", "scaled")),
        *((expected, "powersgd") for expected in ("ScaledCastState", "QuantizationState")),
        ("QuantizationState", "string"),
        *(("ProcessGroup", state) for state in ("model", "string", "scaled")),
    ],
)
def test_hook_with_wrong_state_raises_and_names_both(world_of_one, expected, state, wrapper):
    owner = "torch.distributed.ProcessGroup" if expected == "ProcessGroup" else f"gradwire {expected}"
    make, shown = WRONG[state]
    for hook in HOOKS[expected]:
        ddp = wrapped(wrapper, nn.Linear(3, 2), hook=(make(), hook))
        kind, message = error_of(ddp(torch.ones(1, 3)).sum().backward)
        assert kind == "TypeError"
        assert re.match(rf"The state of \w+_hook is {shown}; expected a {re.escape(owner)}", message), message
        assert expected == "ProcessGroup" or f"register_comm_hook({expected}(" in message
        assert ("gradwire.attach(model, 'gloo')" in message) == (state == "string")


@pytest.mark.parametrize("value", NOT_GROUPS)
@pytest.mark.parametrize("make", [lambda group: PowerSGDState(group, 4), ScaledCastState], ids=["powersgd", "scaled"])
def test_states_accept_only_a_process_group_or_none(make, value):
    group, shown = NOT_GROUPS[value]
    message = rf"^process_group is {re.escape(shown)}; expected a torch\.distributed\.ProcessGroup.* or None"
    with pytest.raises(TypeError, match=message):
        make(group)
    state = make(None)
    with pytest.raises(TypeError, match=message):
        state.process_group = group
    assert state.process_group is None


@pytest.mark.parametrize(
    ("make", "value", "remedy"),
    [
        (QuantizationState, "int4", "Pass wire='int4'. To name a hook, call gradwire.attach(model, 'int4')."),
        (PowerSGDState, 4, "Pass matrix_approximation_rank=4."),
        (PowerSGDState, "powersgd-r4", "process group. To name a hook, call gradwire.attach(model, 'powersgd-r4')."),
        (ScaledCastState, "bf16", "process group. To name a hook, call gradwire.attach(model, 'bf16')."),
        (default_hooks.CastState, "fp16", "process group. To name a hook, call gradwire.attach(model, 'fp16')."),
    ],
)
def test_option_or_name_in_place_of_the_process_group_raises_with_its_place(make, value, remedy):
    with pytest.raises(TypeError) as raised:
        make(value)
    assert str(raised.value).startswith(f"process_group is {value!r}; expected a torch.distributed.ProcessGroup")
    assert str(raised.value).endswith(remedy)


# --- not a bucket


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@on_ranks(2)
def test_hooks_on_fsdp_raise_that_they_need_ddp(strategy):
    found = []
    hooks = [(RIGHT[expected](), hook) for expected, each in HOOKS.items() for hook in each]
    for state, hook in [*hooks, (None, debugging_hooks.noop_hook)]:
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
        )
        model.register_comm_hook(state, hook)
        found.append(error_of(model(torch.ones(2, 4)).sum().backward))
    for kind, message in itertools.chain.from_iterable(from_all_ranks(found)):
        assert kind == "TypeError"
        assert re.match(
            r"\w+_hook was called with an object of type Tensor in place of a bucket.*for "
            r"DistributedDataParallel.*FullyShardedDataParallel",
            message,
        )


# --- own hooks


def test_memory_that_is_declared_wrong_raises():
    with pytest.raises(ValueError, match=r"merge is 'average'; expected one of 'sum'"):
        Memory(merge="average")
    for merge in ("sum", "mean"):  # ranks need the shape to add their tensors up
        with pytest.raises(ValueError, match=rf"shape is None with merge='{merge}'; expected a shape"):
            Memory(merge=merge, shape=None)
    with pytest.raises(TypeError, match=r"The memory 'errors' is 'sum'; expected a Memory\."):
        HookState("hook", memory={"errors": "sum"})


def test_hook_for_without_the_class_of_its_state_raises():
    with pytest.raises(TypeError, match=r"hook_for was given <function .*; expected the class of the state"):
        hook_for(lambda state, bucket: None)


class OwnState(HookState):
    """The state of a hook of a user's."""

    def __init__(self, options=None):
        super().__init__("own_hook", None, options)


@hook_for(OwnState)
def forgetful_hook(state, bucket):
    async def algorithm(step):
        (total,) = step.gradients[:1]
        await step.transport.all_reduce(total)
        step.transport.all_reduce(total)
        step.transport.all_to_all(*torch.zeros(2, 1, step.transport.world_size, 8, dtype=torch.uint8))

    return state.run(bucket, algorithm)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(1)
def test_collective_that_is_not_awaited_raises_and_names_the_remedy(wrapper):
    ddp = wrapped(wrapper, hook=(OwnState(), forgetful_hook))
    message = message_of(train_steps, ddp)
    assert "own_hook, bucket 0: 2 collectives of the transport were created but not awaited" in message
    assert "await step.transport.all_reduce(tensor)" in message


def mistaken(tensor):
    raise KeyError(tensor.shape)


@on_ranks(1)
def test_error_of_an_algorithm_ends_with_the_frames_of_its_author():
    async def algorithm(step):
        mistaken(step.gradients[0])

    ddp = wrapped("gradwire", hook=(OwnState(), hook_for(OwnState)(lambda state, b: state.run(b, algorithm))))
    with pytest.raises(KeyError) as raised:
        train_steps(ddp)
    (note,) = raised.value.__notes__
    assert re.findall(r", in (\w+)\n", note) == ["algorithm", "mistaken"]


@on_ranks(1)
def test_error_of_an_algorithm_on_pytorchs_ddp_is_logged_with_its_traceback():
    async def algorithm(step):
        mistaken(step.gradients[0])

    ddp = wrapped("pytorch", hook=(OwnState(), hook_for(OwnState)(lambda state, b: state.run(b, algorithm))))
    with logged() as records:
        assert "Unable to cast" in message_of(train_steps, ddp)
    (error,) = [record for record in records if record.levelno == logging.ERROR]
    text = logging.Formatter().format(error)
    assert re.match(r"own_hook failed in bucket 0:\nTraceback.*, in mistaken\n.*KeyError", text, re.DOTALL)
