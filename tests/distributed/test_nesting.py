"""Nested DDP wrappers: a warning where a gradient is averaged twice, an error where that bypasses a hook."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.bits import assert_same_bits
from tests.support.training import SMALL, WRAPPERS, build, gradients, register

OURS, THEIRS = WRAPPERS["gradwire"], WRAPPERS["pytorch"]


def message_of(action, *arguments):
    try:
        action(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def wrap_again(inner, hook):
    """What our constructor says to a wrapper, and to a module that holds one."""
    wrapped = WRAPPERS[inner](build("mlp"))
    if hook is not None:
        register(wrapped, hook)
    holder = nn.Sequential(nn.Linear(3, 11), wrapped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        errors = message_of(OURS, wrapped), message_of(OURS, holder)
    return errors, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("inner", WRAPPERS)
def test_wrapping_a_wrapper_with_a_hook_raises_at_construction(worlds, inner):
    for (itself, held), _ in worlds(2).run(wrap_again, inner=inner, hook="allreduce"):
        for kind, text in (itself, held):
            assert kind == "ValueError"
            assert "would be averaged twice" in text
            assert "layers.0.bias, " in text
            assert "and 5 more" in text
        assert "module is a DistributedDataParallel" in itself[1]
        assert "(1)" in held[1]


@pytest.mark.parametrize("inner", WRAPPERS)
def test_wrapping_a_wrapper_without_a_hook_warns_at_construction(worlds, inner):
    for errors, warned in worlds(2).run(wrap_again, inner=inner, hook=None):
        assert errors == (None, None)
        assert ["would be averaged twice" in text for text in warned].count(True) == 2


def call_through_pytorchs(holds, hook):
    """What the first two forwards of PyTorch's wrapper around ours said, and the gradients that they left."""
    ours = OURS(build("mlp"))
    if hook is not None:
        register(ours, hook)
    outer = THEIRS(nn.Sequential(ours) if holds else ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        errors = [message_of(outer, torch.ones(2, 11)) for _ in range(2)]
    return errors, [str(warning.message) for warning in caught], [p.grad for p in outer.parameters()]


@pytest.mark.parametrize("holds", [False, True], ids=["itself", "held"])
def test_pytorch_wrapper_around_ours_with_a_hook_raises_at_every_forward(worlds, holds):
    for errors, _, left in worlds(2).run(call_through_pytorchs, holds=holds, hook="allreduce"):
        for kind, text in errors:
            assert kind == "RuntimeError"
            assert "torch.nn.parallel.distributed.DistributedDataParallel" in text
            assert "averaged twice" in text
            assert "accelerator.prepare the optimizer and the data loader" in text
        assert left == [None] * len(left)


def test_pytorch_wrapper_around_ours_without_a_hook_warns_once(worlds):
    for errors, warned, _ in worlds(2).run(call_through_pytorchs, holds=False, hook=None):
        assert errors == [None, None]
        assert ["averaged twice" in text for text in warned].count(True) == 1


class WithPart(nn.Module):
    """A layer and a wrapped one, which the wrapper around both must leave alone."""

    def __init__(self, wrapper):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.part = nn.Linear(5, 5) if wrapper is None else wrapper(nn.Linear(5, 5), bucket_cap_mb=SMALL)

    def forward(self, x):
        return self.part(self.first(x)).square().sum()


def each_its_own(outer, inner):
    """Gradients of a model whose part has a wrapper of its own, and of the model in a single one."""
    module = WithPart(WRAPPERS[inner])
    names = [f"part.{name}" for name, _ in module.part.named_parameters()]
    THEIRS._set_params_and_buffers_to_ignore_for_model(module, names)
    nested, single = WRAPPERS[outer](module), THEIRS(WithPart(None))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        batch = torch.randn(4, 5, generator=generator)
        for ddp in (nested, single):
            ddp.zero_grad()
            ddp(batch).backward()
        seen.append([list(gradients(ddp).values()) for ddp in (nested, single)])
    return seen


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product(WRAPPERS, WRAPPERS)])
def test_nested_wrappers_of_different_parameters_train(worlds, outer, inner):
    for steps in worlds(2).run(each_its_own, outer=outer, inner=inner):
        for nested, single in steps:
            assert_same_bits(nested, single)


WEIGHT, BIAS = "part.module.weight", "part.module.bias"  # of the inner wrapper's layer, in the outer one's module
# How the inner and the outer wrapper treat the layer's parameters, and those that both average.
SHARES = {
    "outer ignores nothing": ({}, {}, [WEIGHT, BIAS]),
    "outer ignores all": ({}, {"ignores": [WEIGHT, BIAS]}, []),
    "outer ignores one": ({}, {"ignores": [BIAS]}, [WEIGHT]),
    "each ignores the other's": ({"ignores": ["weight"]}, {"ignores": [BIAS]}, []),
    "inner delays": ({"delays": ["weight"]}, {"ignores": [BIAS]}, [WEIGHT]),
    "inner delays, outer ignores": ({"delays": ["weight"]}, {"ignores": [WEIGHT, BIAS]}, []),
    "outer delays": ({}, {"ignores": [BIAS], "delays": [WEIGHT]}, [WEIGHT]),
    "outer delays, inner ignores": ({"ignores": ["weight"]}, {"ignores": [BIAS], "delays": [WEIGHT]}, []),
    "both delay": ({"delays": ["weight"]}, {"ignores": [BIAS], "delays": [WEIGHT]}, [WEIGHT]),
    "frozen": ({"freezes": ["weight"]}, {"ignores": [BIAS]}, []),
    "frozen, the other not": ({"freezes": ["weight"]}, {}, [BIAS]),
    "tied, outer ignores the first name": ({"ties": True}, {"ignores": ["first.weight", BIAS]}, [WEIGHT]),
    "tied, outer ignores the second name": ({"ties": True}, {"ignores": [WEIGHT, BIAS]}, ["first.weight"]),
    "tied, outer ignores both names": ({"ties": True}, {"ignores": [WEIGHT, BIAS, "first.weight"]}, []),
    "tied and delayed": ({"ties": True, "delays": ["weight"]}, {"ignores": [WEIGHT, BIAS]}, ["first.weight"]),
    "tied and frozen": ({"ties": True, "freezes": ["weight"]}, {"ignores": [WEIGHT, BIAS]}, []),
}


def wrap_part(wrapper, module, hook_at, ignores=(), delays=(), freezes=(), ties=False):
    """A wrapper that ignores and delays parameters of these names; ``hook_at`` begins the sum of the delayed ones."""
    named = dict(module.named_parameters())
    for name in freezes:
        named[name].requires_grad_(False)
    THEIRS._set_params_and_buffers_to_ignore_for_model(module, list(ignores))
    delayed = [(name, named[name]) for name in delays]
    options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": named[hook_at]} if delays else {}
    return wrapper(module, **options)


def nest(outer, inner, hook, share):
    """What is said when a wrapper in a module is wrapped with that module, and called once: (kind, text)."""
    of_inner, of_outer, _ = SHARES[share]
    module = WithPart(None)
    if of_inner.get("ties"):
        module.part.weight = module.first.weight
    module.part = wrap_part(WRAPPERS[inner], module.part, "bias", **of_inner)
    if hook is not None:
        register(module.part, hook)

    def wrap_and_call():
        wrap_part(WRAPPERS[outer], module, "first.bias", **of_outer)(torch.ones(2, 5))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        error = message_of(wrap_and_call)
    warned = [("warning", text) for each in caught if "averaged twice" in (text := str(each.message))]
    return warned + ([error] if error is not None else [])


def nest_in_all_ways(**arguments):
    return {share: nest(share=share, **arguments) for share in SHARES}


@pytest.mark.parametrize("hook", [None, "allreduce"])
@pytest.mark.parametrize(
    ("outer", "inner"), [("gradwire", "pytorch"), ("gradwire", "gradwire"), ("pytorch", "gradwire")]
)
def test_nested_wrappers_are_refused_exactly_if_both_average_a_parameter(worlds, outer, inner, hook):
    kind = "warning" if hook is None else "ValueError" if outer == "gradwire" else "RuntimeError"
    for said in worlds(2).run(nest_in_all_ways, outer=outer, inner=inner, hook=hook):
        for share, (_, _, both) in SHARES.items():
            assert {each for each, _ in said[share]} == ({kind} if both else set()), share
            if both and outer == "gradwire":
                assert f"averages {', '.join(sorted(both))} already" in said[share][0][1]


class Student(nn.Module):
    """Asks a wrapped teacher within its own forward."""

    def __init__(self, teacher):
        super().__init__()
        self.model = nn.Linear(11, 1)
        self.ask = lambda x: teacher(x)

    def forward(self, x):
        return (self.model(x) - self.ask(x)).square().sum()


def ask_a_teacher(outer):
    teacher = OURS(build("mlp"))
    student = WRAPPERS[outer](Student(teacher))
    student(torch.ones(2, 11)).backward()
    return [p.grad is not None for p in itertools.chain(teacher.parameters(), student.parameters())]


@pytest.mark.parametrize("outer", WRAPPERS)
def test_forward_within_forward_of_another_wrapper_trains(worlds, outer):
    for have_gradients in worlds(2).run(ask_a_teacher, outer=outer):
        assert all(have_gradients)
