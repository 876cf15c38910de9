"""The implementations and models that the benches time, and the check that an implementation must pass first."""

import pytest
import torch

from gradwire.bench import implementations
from gradwire.bench.gradient_checks import complaint_about_feedback, complaint_about_mean
from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH, Implementation, make_batch
from gradwire.bench.models import MODELS
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.hook_registry import HOOKS

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def small(monkeypatch):
    """A model of two layers, 160 x 320 and back: small, and yet rank 32 is worth compressing."""
    for name, value in {"LAYERS": 2, "NARROW": 160, "WIDE": 320}.items():
        monkeypatch.setattr(implementations, name, value)


def warm(implementation):
    for step in range(implementations.WARM_UP):
        implementation.step(make_batch(step, 0, CPU))
    return implementation


def build(hook, name):
    return warm(Implementation(hook, name, CPU, one_bucket=name == PYTORCH and HOOKS[hook].pytorch.one_bucket))


def check(implementation):
    implementation.check(make_batch(implementations.WARM_UP, 0, CPU))


@pytest.mark.parametrize("name", [GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_implementation_passes_its_check(small, hook, name):
    check(build(hook, name))


@pytest.mark.parametrize("hook", ["none", "noop", "fp16", "powersgd-r4"])
@pytest.mark.parametrize("name", [GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH])
def test_implementation_with_wrong_gradient_fails_its_check(small, hook, name):
    implementation = build(hook, name)
    gradients = implementation._gradients

    def spoiled():
        values = gradients()
        if implementation._buckets is not None:  # in the step, not in the local backward
            values[0][3, 5] += 0.01
        return values

    implementation._gradients = spoiled
    with pytest.raises(RuntimeError, match=rf"^{hook}, .*; nothing is timed\.$"):
        check(implementation)


@pytest.mark.parametrize(("ulps", "is_right"), [(1, True), (4, False)])
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_mean_is_accepted_within_roundings_of_the_wire_dtype(wire, ulps, is_right):
    """On one rank, three roundings of half a unit, one of them spare: 1.5 units."""
    gradient = torch.tensor([1.0, -1.0, 1024.0])
    complaint = complaint_about_mean([gradient], [gradient * (1 + ulps * torch.finfo(wire).eps)], wire)
    assert (complaint is None) is is_right


@pytest.mark.parametrize(("steps", "is_right"), [(2, True), (3, False)])
@pytest.mark.parametrize("wire", ["int8", "int6"])
def test_mean_without_error_feedback_is_accepted_within_two_steps_of_the_scale(wire, steps, is_right):
    gradient, wire = torch.tensor([1.0, -1.0, 64.0]), WIRE_FORMATS[wire]
    off = gradient + torch.tensor([steps * 64 / wire.levels, 0, 0])
    assert (complaint_about_mean([gradient], [off], wire) is None) is is_right


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_mean_is_refused(value):
    gradient = torch.ones(3)
    assert complaint_about_mean([gradient], [torch.tensor([1.0, value, 1.0])], torch.float16) is not None


def low_rank_step():
    """A correct step: half of M is applied, half goes to the error; (gradient, old error, result, new error)."""
    gradient, old = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    half = torch.cat([(gradient + old)[:, :4], torch.zeros(6, 4)], dim=1)
    return gradient, old, half, gradient + old - half


def complain(gradient, old, result, new):
    return complaint_about_feedback([gradient], [old], [result], [new])


def test_feedback_step_must_lose_nothing_and_approximate_the_mean():
    gradient, old, result, new = low_rank_step()
    assert complain(gradient, old, result, new) is None
    assert "approximation" in complain(gradient, old, torch.zeros_like(result), gradient + old)
    new[2, 5] = 0
    assert "lost" in complain(gradient, old, result, new)
    for index in range(4):
        step = low_rank_step()
        step[index][0, 0] = float("nan")
        assert complain(*step) is not None


def test_models_have_their_numbers_of_parameters():
    sizes = {"tiny-layers": (200, 0.0), "transformer": (200, 3.2), "mlp": (10, 50.0)}
    for name, size in sizes.items():
        with torch.device("meta"):
            tensors = list(MODELS[name].build().parameters())
        assert (len(tensors), round(sum(tensor.numel() for tensor in tensors) / 1e6, 1)) == size
