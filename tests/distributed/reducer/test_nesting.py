"""Nested DDP wrappers: a warning where a gradient is averaged twice, an error where that bypasses a hook."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from tests.support.ranks import on_ranks
from tests.support.training import SMALL, WRAPPERS, build, error_of, register, wrapped

OURS, THEIRS = WRAPPERS["gradwire"], WRAPPERS["pytorch"]


def said(action, *arguments):
    """The warnings about averaging twice and the error of a call: (kind, text)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        error = error_of(action, *arguments)
    warned = [("warning", text) for each in caught if "averaged twice" in (text := str(each.message))]
    return warned + ([error] if error is not None else [])


@pytest.mark.parametrize("hook", [None, "allreduce"])
@pytest.mark.parametrize("inner", WRAPPERS)
@on_ranks(2)
def test_wrapped_wrapper_with_hook_raises_and_without_hook_warns(inner, hook):
    wrapper = wrapped(inner, hook=hook)
    (itself,), (held,) = said(OURS, wrapper), said(OURS, nn.Sequential(nn.Linear(3, 11), wrapper))
    for kind, text in (itself, held):
        assert kind == ("warning" if hook is None else "ValueError")
        assert "would be averaged twice" in text
        assert "layers.0.bias, " in text
        assert "and 5 more" in text
    assert "module is a DistributedDataParallel" in itself[1]
    assert "(1)" in held[1]


@pytest.mark.parametrize(("hook", "holds"), [(None, False), ("allreduce", False), ("allreduce", True)])
@on_ranks(2)
def test_pytorchs_wrapper_around_ours_raises_with_hook_else_warns_once(hook, holds):
    ours = wrapped(hook=hook)
    outer = THEIRS(nn.Sequential(ours) if holds else ours)
    first, second = (said(outer, torch.ones(2, 11)) for _ in range(2))
    if hook is None:
        assert [kind for kind, _ in first + second] == ["warning"]
        return
    assert len(first) == len(second) == 1
    for kind, text in first + second:
        assert kind == "RuntimeError"
        assert "torch.nn.parallel.distributed.DistributedDataParallel" in text
        assert "averaged twice" in text
        assert "accelerator.prepare the optimizer and the data loader" in text
    assert all(parameter.grad is None for parameter in outer.parameters())


class WithPart(nn.Module):
    """A layer and a wrapped one, which the wrapper around both must leave alone."""

    def __init__(self, wrapper):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.part = nn.Linear(5, 5) if wrapper is None else wrapper(nn.Linear(5, 5), bucket_cap_mb=SMALL)

    def forward(self, x):
        return self.part(self.first(x)).square().sum()


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
    """Warnings and error, as (kind, text), of wrapping a module that has a wrapper, and of one call."""
    inner_options, outer_options, _ = SHARES[share]
    module = WithPart(None)
    if inner_options.get("ties"):
        module.part.weight = module.first.weight
    module.part = wrap_part(WRAPPERS[inner], module.part, "bias", **inner_options)
    if hook is not None:
        register(module.part, hook)

    return said(lambda: wrap_part(WRAPPERS[outer], module, "first.bias", **outer_options)(torch.ones(2, 5)))


@pytest.mark.parametrize("hook", [None, "allreduce"])
@pytest.mark.parametrize(
    ("outer", "inner"), [("gradwire", "pytorch"), ("gradwire", "gradwire"), ("pytorch", "gradwire")]
)
@on_ranks(2)
def test_nested_wrappers_are_refused_exactly_if_both_average_a_parameter(outer, inner, hook):
    kind = "warning" if hook is None else "ValueError" if outer == "gradwire" else "RuntimeError"
    for share, (_, _, both) in SHARES.items():
        said = nest(outer, inner, hook, share)
        assert {each for each, _ in said} == ({kind} if both else set()), share
        if both and outer == "gradwire":
            assert f"averages {', '.join(sorted(both))} already" in said[0][1]


class Student(nn.Module):
    """Asks a wrapped teacher within its own forward."""

    def __init__(self, teacher):
        super().__init__()
        self.model = nn.Linear(11, 1)
        self.ask = lambda x: teacher(x)

    def forward(self, x):
        return (self.model(x) - self.ask(x)).square().sum()


@pytest.mark.parametrize("outer", WRAPPERS)
@on_ranks(2)
def test_forward_within_forward_of_another_wrapper_trains(outer):
    teacher = OURS(build("mlp"))
    student = WRAPPERS[outer](Student(teacher))
    student(torch.ones(2, 11)).backward()
    have_gradients = [p.grad is not None for p in itertools.chain(teacher.parameters(), student.parameters())]
    assert all(have_gradients)
