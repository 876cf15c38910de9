"""The contenders of the benches, small, and the checks that they must pass before they are timed."""

import pytest
import torch

from gradwire.bench import contenders
from gradwire.bench.contenders import (
    GRADWIRE,
    GRADWIRE_ON_PYTORCH,
    PYTORCH,
    Contender,
    complaint_about_low_rank,
    complaint_about_mean,
    make_batch,
)
from gradwire.bench.hook_cost import DEFAULT_HOOKS
from gradwire.bench.hooks import DEMO_HOOKS, HOOKS
from gradwire.bench.network import DEFAULT_HOOKS as NETWORK_HOOKS

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def small(monkeypatch):
    """A model of two layers, 160 x 320 and back: small, and yet rank 32 is worth compressing."""
    for name, value in {"LAYERS": 2, "NARROW": 160, "WIDE": 320}.items():
        monkeypatch.setattr(contenders, name, value)


def warm(contender):
    for step in range(contenders.WARM_UP):
        contender.step(make_batch(step, 0, CPU))
    return contender


def build(hook, provider):
    return warm(Contender(hook, provider, CPU, one_bucket=provider == PYTORCH and HOOKS[hook].peer.one_bucket))


def check(contender):
    contender.check(make_batch(contenders.WARM_UP, 0, CPU))


def test_every_hook_of_a_bench_has_a_peer():
    for hook in {*DEFAULT_HOOKS, *NETWORK_HOOKS}:
        assert HOOKS[hook].peer is not None, hook
    assert set(DEMO_HOOKS) <= set(HOOKS)


def test_the_model_is_what_its_description_says():
    shapes = [tuple(weight.shape) for weight in contenders.make_model().parameters()]
    assert shapes == [(2048, 512), (512, 2048)] * 6
    assert "12 linear layers 512 x 2048 / 2048 x 512 without bias, batch 8" in contenders.MODEL
    assert 4 * sum(n * m for n, m in shapes) < contenders.ONE_BUCKET_MB * 2**20


def test_gradients_are_of_ordinary_size():
    """A wire of 16 bits keeps them: fp16 has 11 bits down to 6e-5."""
    model = contenders.make_model()
    (model(make_batch(0, 0, CPU)).square().sum() / contenders.BATCH).backward()
    for weight in model.parameters():
        typical = weight.grad.square().mean().sqrt().item()
        assert 1e-3 < typical < 10


def test_batches_differ_between_steps_and_ranks_only():
    batches = [make_batch(*key, CPU) for key in ((0, 0), (1, 0), (0, 1))]
    assert torch.equal(batches[0], make_batch(0, 0, CPU))
    for batch in batches[1:]:
        assert not torch.equal(batch, batches[0])


@pytest.mark.parametrize("provider", [GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_contender_passes_its_check(small, hook, provider):
    check(build(hook, provider))


@pytest.mark.parametrize("hook", ["none", "noop", "fp16", "powersgd-r4"])
@pytest.mark.parametrize("provider", [GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH])
def test_a_contender_with_a_wrong_gradient_fails_its_check(small, hook, provider):
    contender = build(hook, provider)
    gradients = contender._gradients

    def spoiled():
        values = gradients()
        if contender._buckets is not None:  # the step's, not the local ones that they are compared with
            values[0][3, 5] += 0.01
        return values

    contender._gradients = spoiled
    with pytest.raises(RuntimeError, match=rf"^{hook}, .*; nothing is timed\.$"):
        check(contender)


def test_a_model_that_should_be_one_bucket_and_is_two_fails_its_check(small, monkeypatch):
    monkeypatch.setattr(contenders, "ONE_BUCKET_MB", 0.1)  # MiB; a layer has 0.2
    contender = warm(Contender("noop", PYTORCH, CPU, one_bucket=True))
    with pytest.raises(RuntimeError, match="the model is 2 buckets, not one"):
        check(contender)


@pytest.mark.parametrize(
    ("wire", "ulps", "is_right"),
    [
        (torch.float32, 1, True),
        (torch.float32, 4, False),
        (torch.float16, 1, True),
        (torch.float16, 4, False),
        (torch.bfloat16, 1, True),
        (torch.bfloat16, 4, False),
    ],
)
def test_a_mean_may_be_off_by_the_roundings_of_its_wire(wire, ulps, is_right):
    """On one rank three roundings of half a unit, with the one to spare: 1.5 units."""
    gradient = torch.tensor([1.0, -1.0, 1024.0])
    complaint = complaint_about_mean([gradient], [gradient * (1 + ulps * torch.finfo(wire).eps)], wire)
    assert (complaint is None) is is_right


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_mean_that_is_not_finite_is_wrong(value):
    gradient = torch.ones(3)
    assert complaint_about_mean([gradient], [torch.tensor([1.0, value, 1.0])], torch.float16) is not None


def low_rank_step():
    """One that is right: half of M is applied and half remembered; (gradient, old error, result, new error)."""
    gradient, old = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    half = torch.cat([(gradient + old)[:, :4], torch.zeros(6, 4)], dim=1)
    return gradient, old, half, gradient + old - half


def complain(gradient, old, result, new):
    return complaint_about_low_rank([gradient], [old], [result], [new])


def test_a_step_that_applies_or_remembers_everything_is_right():
    assert complain(*low_rank_step()) is None


def test_a_step_that_loses_an_element_is_wrong():
    gradient, old, result, new = low_rank_step()
    new[2, 5] = 0
    assert "lost" in complain(gradient, old, result, new)


def test_a_step_that_applies_nothing_is_wrong():
    gradient, old, result, _ = low_rank_step()
    assert "approximation" in complain(gradient, old, torch.zeros_like(result), gradient + old)


@pytest.mark.parametrize("index", range(4))
def test_a_step_with_nan_is_wrong(index):
    step = low_rank_step()
    step[index][0, 0] = float("nan")
    assert complain(*step) is not None
