"""`python -m tools.validate rounding`: the simulated all-reduces, their checks, the table, and a run of the command."""

import pytest
import torch

from gradwire.bench.tasks import Digits
from tools import recorded_gradients, rounding
from tools.rounding import RING, TWO_SHOT, all_reduces, check, ring_mean


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(rounding, "NUMEL", 1 << 12)
    monkeypatch.setattr(rounding, "SEEDS", 2)
    monkeypatch.setattr(rounding, "STEPS", 2)
    monkeypatch.setattr(rounding, "WORLD_SIZES", (2, 4))
    monkeypatch.setattr(recorded_gradients, "STEPS", (1, 3))
    monkeypatch.setattr(recorded_gradients, "TRAININGS", [("digits", "sgd"), ("text", "muon")])


def test_ring_rounds_every_partial_sum_in_ring_order():
    # In fp16, 2048 + 1 rounds to 2048. Chunk 0 is added in the order 1, 2, 0, chunk 1 in the order 2, 0, 1, and so on.
    ranks = [[torch.full((3,), 3.0 * value)] for value in (2048, 1, 1)]
    assert ring_mean(ranks, torch.float16).tolist() == [2050, 2048, 2048]
    assert ring_mean(ranks, torch.float32).tolist() == [2050] * 3


@pytest.mark.parametrize("exchange", all_reduces(), ids=lambda e: f"{e.format.name}-{e.implementation[:4].strip()}")
def test_equal_gradients_on_the_grid_pass_and_wrong_sums_fail_the_check(exchange):
    check(exchange, 4)
    wrong = exchange._replace(start=lambda: lambda ranks: sum(own for (own,) in ranks))
    with pytest.raises(RuntimeError, match="The mean of 4 equal gradients is wrong"):
        check(wrong, 4)


def error_of(name, implementation, world_size, steps=1):
    (exchange,) = (e for e in all_reduces() if (e.format.name, e.implementation) == (name, implementation))
    return rounding.relative_error(exchange, world_size, steps, seed=0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_ring_error_grows_with_world_size_unlike_two_shot(name):
    assert error_of(name, RING, 32) > 2 * error_of(name, RING, 2)
    assert error_of(name, TWO_SHOT, 32) < 1.2 * error_of(name, TWO_SHOT, 2)


def test_recorded_gradients_are_those_of_each_rank_at_the_weights_of_the_step():
    (_, first), (_, later) = recorded_gradients.recorded("digits", "sgd")
    assert len(first) == recorded_gradients.RANKS
    torch.manual_seed(0)
    task = Digits()
    model = task.make_model()
    for rank, gradients in enumerate(reversed(first)):
        model.zero_grad()
        task.loss(model, next(task.batches(0, rank, recorded_gradients.RANKS))).backward()
        matrices = [parameter.grad for parameter in model.parameters() if parameter.ndim > 1]
        torch.testing.assert_close(gradients, matrices)
    assert not torch.equal(first[-1][0], later[-1][0])


def test_vnmse_and_gain_of_one_step():
    (simulated,) = (e for e in all_reduces() if (e.format.name, e.implementation) == ("int4", TWO_SHOT))
    gradients = [[torch.randn(40, 50)], [torch.randn(40, 50)]]
    mean = (gradients[0][0] + gradients[1][0]).double().flatten() / 2
    shifted = simulated._replace(start=lambda: lambda ranks: 1.1 * mean)
    assert rounding.vnmse_and_gain(shifted, gradients) == pytest.approx({"vNMSE": 0.01, "gain": 1.1})
    found = rounding.vnmse_and_gain(simulated, gradients)
    assert 1e-3 < found["vNMSE"] < 0.1
    assert 0.97 < found["gain"] < 1.03
