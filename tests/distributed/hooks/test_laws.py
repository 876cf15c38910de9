"""The laws of docs/guarantees.md, for every hook; and laws 2 and 3 without compression."""

from functools import partial
from types import NoneType

import pytest
import torch
from hypothesis import strategies as st

from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner import hook_registry
from gradwire.testing import _check, check_laws
from tests.support.bits import assert_same_bits
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import HOOKS, SMALL, WRAPPERS, build, gradients, own_batches, train, wrapped

SKIPPED = {"fp16_of_powersgd": ["plain start", "nothing lost"]}  # the wrapper rounds first
FEW, MANY = 2, 50  # examples


class ScaledState(ScaledCastState):
    """Its checkpoints leave out what differs between ranks: the counts of elements."""

    def state_dict(self):
        saved = super().state_dict()
        saved["counters"][:2] = 0
        return saved


STATES = {
    "scaled_fp16": partial(ScaledState, dtype=torch.float16),
    "scaled_bf16": partial(ScaledState, dtype=torch.bfloat16),
}


def state_of(hook):
    return HOOKS[hook](None)[0]


def function_of(hook):
    return HOOKS[hook](None)[1]


class Hook:
    """A hook of `HOOKS`; ranks look it up by its name, because wrapped hooks are closures."""

    def __init__(self, name):
        self.__name__ = name

    def __reduce__(self):
        return function_of, (self.__name__,)


few_and_many = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


@few_and_many
def test_laws_hold_without_hook(examples):
    check_laws(NoneType, None, max_examples=examples)


# In the ordinary lane, hooks that share their code with another one are left out.
SLOW = ("bf16", "bf16_of_allreduce", "scaled_bf16", "powersgd_alternating", "fp16_of_powersgd")


@few_and_many
@pytest.mark.parametrize("hook", [pytest.param(hook, marks=[pytest.mark.slow] * (hook in SLOW)) for hook in HOOKS])
def test_laws_hold_for_hook(hook, examples):
    make_state = STATES.get(hook, partial(state_of, hook))
    check_laws(make_state, Hook(hook), skip=SKIPPED.get(hook, ()), max_examples=examples)


def registered(hook):
    return hook_registry.HOOKS[hook].make(None, 2)


def registered_state(hook):
    return registered(hook)[0]


@pytest.mark.parametrize("hook", [hook for hook in hook_registry.HOOKS if hook not in ("none", "noop")])
def test_sums_fit_on_many_ranks_with_every_hook_of_the_registry(hook):
    check = _check._Check(partial(registered_state, hook), registered(hook)[1], (), world_size=1, time_limit=240.0)
    check.search(check.sums, st.just(_check.MANY), 1)


QUANTIZED = {wire: {} for wire in WIRE_FORMATS if wire not in ("fp8", "bf16", "fp16", "fp32")} | {
    "int4": {"use_error_feedback": False},
    # New buckets round their errors to bf16.
    "int8": {"use_error_feedback": True, "error_dtype": torch.bfloat16, "start_iter": 2},
}
IN_BF16 = ["nothing lost"]  # test_quantization_laws.py has the bound


def check_quantized(wire, options, **arguments):
    state = partial(QuantizationState, None, wire, **({"block_size": 32, "start_iter": 0} | options))
    check_laws(state, quantization_hook, skip=IN_BF16 if "error_dtype" in options else (), **arguments)


@pytest.mark.parametrize("wire", QUANTIZED)
def test_laws_hold_for_quantization(wire):
    check_quantized(wire, QUANTIZED[wire], max_examples=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_error_feedback": True}, {"use_error_feedback": False}], ids=str)
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_laws_hold_for_every_wire_format(wire, options):
    check_quantized(wire, options, world_sizes=(2, 3, 4))


UNCHANGED = [
    *(("allreduce", model) for model in ("mlp", "conv", "lstm", "mixed", "odd")),
    *((hook, "half") for hook in ("fp16", "fp16_of_allreduce")),
    *((hook, "brain") for hook in ("bf16", "bf16_of_allreduce")),
]
views = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def assert_law3(wrapper, model, hook, view, **options):
    """The hook gives the bits of the plain all-reduce."""
    options |= {"gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    assert_same_bits(*(train(wrapper, model, hook=each, **options) for each in (hook, None)))


@views
@wrappers
@pytest.mark.parametrize(("hook", "model"), UNCHANGED)
@on_ranks(2, 3)
def test_law3_hook_that_keeps_the_dtype_equals_the_plain_all_reduce(model, hook, wrapper, view):
    assert_law3(wrapper, model, hook, view)


@views
@wrappers
@on_ranks(2)  # there the mean rounds the same, whether gradients are multiplied by 1 / n or views divided by n
def test_law3_allreduce_hook_equals_plain_all_reduce_when_accumulating(wrapper, view):
    assert_law3(wrapper, "conv", "allreduce", view, accumulate=2, set_to_none=False)


@on_ranks(2, 3)
def test_law3_allreduce_hook_on_complex_gradients_equals_plain_all_reduce():
    # PyTorch's buckets of complex gradients are wrong inside hooks, so the plain all-reduce is the oracle.
    hooked = train("gradwire", "complex", bucket_cap_mb=SMALL, hook="allreduce")
    assert_same_bits(hooked, train("gradwire", "complex", bucket_cap_mb=100))


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@views
@wrappers
@pytest.mark.parametrize("model", ["mlp", "conv", "mixed", "odd"])
@on_ranks(2, 3)
def test_law3_noop_hook_leaves_local_gradients_unchanged(model, wrapper, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": SMALL, "forward_sync_buffers": False}
    with_noop = train(wrapper, model, hook="noop", set_to_none=set_to_none, **options)
    assert_same_bits(with_noop, train(None, model, set_to_none=set_to_none))


@views
@on_ranks(2, 3)
def test_law3_no_sync_leaves_local_gradients_unchanged(view):
    ddp, local, generator = wrapped(hook="fp16", gradient_as_bucket_view=view), build("mlp"), own_batches()
    with ddp.no_sync():
        for _ in range(3):
            batch = local.batch(generator)
            ddp(*batch).backward()
            local(*batch).backward()
    assert_same_bits(gradients(ddp), gradients(local))
    first, second, *_ = from_all_ranks(gradients(local)["layers.0.weight"])
    assert not torch.equal(first, second)
