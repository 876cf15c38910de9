"""The report of ``gradwire run``: the answer on speed with its interval, the steps that would decide it, the error."""

import math
import random
import re

import pytest
from torch.nn.parallel import DistributedDataParallel

from gradwire.cli import run_comparison, run_compression, run_report
from tests.support.training import build, train_steps


def stretches_of(gains):
    """Plain and compressed stretches in the order of a run; each pair has another pace, and the logarithm of its ratio
    is its gain.
    """
    pairs = [((False, 0.3 + 0.1 * i), (True, (0.3 + 0.1 * i) * math.exp(-gain))) for i, gain in enumerate(gains)]
    return [each for i, pair in enumerate(pairs) for each in (pair if i % 2 == 0 else pair[::-1])]


def test_speed_up_is_the_mean_of_the_pairs_with_students_interval():
    found = run_comparison.speed_up(stretches_of([0.1, 0.3, 0.2, 0.25, 0.15]))
    assert math.log(found.ratio) == pytest.approx(0.2)
    # The standard deviation is sqrt(0.025 / 4), and the 97.5 % quantile 2.776 with 4 degrees of freedom.
    half = 2.776 * math.sqrt(0.025 / 4) / math.sqrt(5)
    assert math.log(found.low) == pytest.approx(0.2 - half, rel=0.01)
    assert math.log(found.high) == pytest.approx(0.2 + half, rel=0.01)
    assert found.plain == pytest.approx((0.3 * 0.4 * 0.5 * 0.6 * 0.7) ** (1 / 5))
    assert found.own == pytest.approx(found.plain / found.ratio)
    assert found.pairs == 5
    assert run_comparison.speed_up(stretches_of([0.1, 0.3, 0.2, 0.25])) is None, "four pairs are too few"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([0.1, 0.3, 0.2, 0.25, 0.15], r"int4 is faster here \(1.22 times\): \S+ ms a step instead of \S+ ms \(.*\)$"),
        ([-0.1, -0.3, -0.2, -0.25, -0.15], r"int4 is slower here \(0.819 times\): run without it; .*\)$"),
        # The standard deviation is sqrt(0.178 / 4), so 20 (2.8 * 0.211 / 0.07)^2 = 1,424 steps.
        (
            [0.3, -0.1, 0.2, -0.2, 0.15],
            r"no difference shown between int4 and no hook \(1.07 times\): .* \(95 % interval of the speed-up "
            r"0.82[56] to 1.39, 5 pairs of 10 steps\); about 1,500 steps would decide it: --measure 1500$",
        ),
        (
            [0.25, -0.25, 0.5, -0.5, 0.0],
            r"no difference shown .*\); not even 1,000,000 steps would decide it$",
        ),
        ([0.1, 0.2, 0.3, 0.4], "not measured: the comparison takes 123 steps$"),
    ],
    ids=["faster", "slower", "undecided", "equal", "too short"],
)
def test_answer_is_the_one_that_the_interval_allows(gains, expected):
    comparison = run_comparison.Comparison("int4", first=22, n_steps=100)
    comparison.stretches = stretches_of(gains)
    assert re.match(expected, comparison.answer())


def test_suggested_steps_decide_four_of_five_runs():
    draw, mean, spread = random.Random(0), 0.1, 0.2

    def gains(number):
        return [draw.gauss(mean, spread) for _ in range(number)]

    # Five pairs whose mean and standard deviation are those of the distribution.
    found = run_comparison.speed_up(stretches_of([mean + spread * each for each in (-1.2, -0.4, -0.4, 0.8, 1.2)]))
    later = [
        run_comparison.speed_up(stretches_of(gains(found.deciding_steps // (2 * run_comparison.STRETCH))))
        for _ in range(500)
    ]
    assert 0.72 < sum(each.low > 1 for each in later) / len(later) < 0.88
    assert sum(each.high < 1 for each in later) < 5


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_run_that_ends_before_its_first_compressed_step_says_so(world_of_one, n_steps):
    with run_compression.compressed("int4", start=2) as made:
        train_steps(DistributedDataParallel(build("mlp")), n_steps)
    made[0].release()
    text = run_report.report(made)
    assert f"1 rank, {n_steps} step" in text
    assert ("nothing was compressed: that begins after 2 steps" in text) == (n_steps <= 2)
    assert ("sent in a step" in text) == (n_steps > 2)


def test_times_and_bytes_are_medians_of_the_measured_steps(world_of_one):
    with run_compression.compressed("int4") as made:
        train_steps(DistributedDataParallel(build("mlp")), 3)
    made[0].release()
    names = {"encode_ms": 1, "wire_ms": 2, "decode_ms": 3, "gradient_bytes": 8000, "sent_bytes": 1000}
    made[0].metrics = {name: [value, value, 100 * value] for name, value in names.items()}
    made[0].step_seconds = [0.004, 0.4, 0.004]
    text = run_report.report(made)
    assert "time of a step       4 ms\n" in text
    assert "of the exchange      encode 1 ms, wire 2 ms, decode 3 ms;" in text
    assert "sent in a step       1 kB instead of 8 kB: 8 times fewer bytes\n" in text


def test_error_at_first_and_at_the_end_are_the_first_and_the_last_measured(world_of_one):
    with run_compression.compressed("int4") as made:
        train_steps(DistributedDataParallel(build("mlp")), 13)
    made[0].release()
    made[0].metrics["residual_ratio"] = [0.5, 0.3, 0.2, 0.1]
    text = run_report.report(made)
    assert "error / gradient     0.5 at first, 0.1 at the end" in text
    assert "1 rank, 13 steps" in text
    assert "accuracy             compare the loss with that of a run without a hook; int4 ended at " in text
    for delay, advice in ((0.84, "at most 1"), (1.2, "above 1: use a higher rank or more bits")):
        made[0].metrics["delayed_ratio"] = [0.1, delay]
        text = run_report.report(made)
        assert f"error / gradient     {delay} in the last comparison" in text
        assert advice in text
        assert "at first" not in text
