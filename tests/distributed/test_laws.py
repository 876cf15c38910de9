"""The laws of docs/laws.md, for every hook; and laws 2 and 3 without compression."""

from functools import partial
from types import NoneType

import pytest
import torch
import torch.distributed as dist

from gradwire.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradwire.hooks.scaled_cast_hooks import ScaledCastState
from gradwire.kernels import WIRE_FORMATS
from gradwire.testing import check_laws
from tests.support.bits import assert_same_bits, same_bits
from tests.support.training import HOOKS, SMALL, WRAPPERS, build, gradients, train

SKIPPED = {"fp16_of_powersgd": ["plain start", "nothing lost"]}  # the wrapper rounds first
FEW, MANY = 4, 50  # examples


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


@few_and_many
@pytest.mark.parametrize("hook", HOOKS)
def test_laws_hold_for_hook(hook, examples):
    make_state = STATES.get(hook, partial(state_of, hook))
    check_laws(make_state, Hook(hook), skip=SKIPPED.get(hook, ()), max_examples=examples)


QUANTIZED = {
    "sign": {},
    "int4": {"use_error_feedback": False},
    "int2": {"stochastic_rounding": True},
    "int8": {"error_dtype": torch.bfloat16, "start_iter": 2},  # new buckets round their errors to bf16
}
IN_BF16 = ["nothing lost"]  # test_quantization_laws.py has the bound


def check_quantized(wire, options, **arguments):
    state = partial(QuantizationState, None, wire, **({"block_size": 32, "start_iter": 0} | options))
    check_laws(state, quantization_hook, skip=IN_BF16 if "error_dtype" in options else (), **arguments)


@pytest.mark.parametrize("wire", QUANTIZED)
def test_laws_hold_for_quantization(wire):
    check_quantized(wire, QUANTIZED[wire], max_examples=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_error_feedback": False, "stochastic_rounding": True}], ids=str)
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_laws_hold_for_every_wire_format(wire, options):
    check_quantized(wire, options, world_sizes=(2, 3, 4))


def hooked_and_plain(wrapper, hook, model, **options):
    return train(wrapper, model, hook=hook, **options), train(wrapper, model, **options)


UNCHANGED = [
    *(("allreduce", model) for model in ("mlp", "conv", "lstm", "mixed", "odd")),
    *((hook, "half") for hook in ("fp16", "fp16_of_allreduce")),
    *((hook, "brain") for hook in ("bf16", "bf16_of_allreduce")),
]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("hook", "model"), UNCHANGED)
def test_law3_hook_that_keeps_the_dtype_equals_the_plain_all_reduce(world, model, hook, wrapper, view):
    options = {"wrapper": wrapper, "model": model, "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for hooked, plain in world.run(hooked_and_plain, hook=hook, **options):
        assert_same_bits(hooked, plain)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_law3_allreduce_hook_equals_the_plain_all_reduce_of_accumulated_gradients(worlds, wrapper, view):
    # On two ranks: there the mean rounds the same, whether gradients are multiplied by 1 / n or views divided by n.
    options = {"wrapper": wrapper, "model": "conv", "gradient_as_bucket_view": view, "bucket_cap_mb": SMALL}
    for hooked, plain in worlds(2).run(hooked_and_plain, hook="allreduce", accumulate=2, set_to_none=False, **options):
        assert_same_bits(hooked, plain)


def complex_with_and_without(hook):
    return train("gradwire", "complex", bucket_cap_mb=SMALL, hook=hook), train("gradwire", "complex", bucket_cap_mb=100)


# PyTorch's buckets of complex gradients are wrong inside hooks, so the plain all-reduce is the oracle.
def test_law3_allreduce_hook_on_complex_gradients_equals_plain_all_reduce(world):
    for hooked, plain in world.run(complex_with_and_without, hook="allreduce"):
        assert_same_bits(hooked, plain)


def noop_and_local(model, **options):
    """Every rank on its own, from equal parameters."""
    options |= {"forward_sync_buffers": False}
    kept = {name: options[name] for name in ("set_to_none", "seed") if name in options}
    return [train(wrapper, model, hook="noop", **options) for wrapper in WRAPPERS], train(None, model, **kept)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("model", ["mlp", "conv", "mixed", "odd"])
def test_law3_noop_hook_leaves_local_gradients_unchanged(world, model, view, set_to_none):
    options = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "bucket_cap_mb": SMALL}
    for with_noop, local in world.run(noop_and_local, model=model, **options):
        for record in with_noop:
            assert_same_bits(record, local)


def no_sync_gradients(hook, view):
    ddp = WRAPPERS["gradwire"](build("mlp"), gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
    local = build("mlp")
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [local.batch(generator) for _ in range(3)]
    with ddp.no_sync():
        for batch in batches:
            ddp(*batch).backward()
            local(*batch).backward()
    return gradients(ddp), gradients(local)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_law3_no_sync_leaves_local_gradients_unchanged(world, view):
    results = world.run(no_sync_gradients, hook="fp16", view=view)
    for ours, local in results:
        assert_same_bits(ours, local)
    assert not same_bits(results[0][0]["layers.0.weight"], results[1][0]["layers.0.weight"])
