"""`gradwire bench converge`: what it reports of the steps of two ranks."""

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import converge
from gradwire.bench.implementations import PYTORCH
from gradwire.bench.long_runs import LongTraining
from gradwire.bench.record import Metric
from gradwire.bench.tasks import Digits
from gradwire.bench.timing import time_in_turn
from tests.support.ranks import on_ranks

SECONDS = ([1.0, 3.0], [2.0, 1.0])  # of two steps on each of two ranks


@on_ranks(2)
def test_time_to_target_is_that_of_the_slowest_rank_in_each_step():
    task = Digits()
    trial = converge.Trial(task, "sgd", "none", PYTORCH, seed=0, counts_bytes=False)
    trial.seconds, trial.sent_bytes = list(SECONDS[dist.get_rank()]), [0, 0]
    trial.steps, trial.scores = [1, 2], [task.target - 1, task.target]
    records = trial.records()
    assert [record.series for record in records if record.metric == Metric.TARGET_S] == [[2.0, 5.0]]
    assert converge.to_target(records, Metric.TARGET_S) == [5.0]


@on_ranks(2)
def test_steps_that_take_turns_have_the_time_of_the_slowest_rank_in_each():
    class Made:
        def step(self, batch):
            return SECONDS[dist.get_rank()][batch]

    implementations = [Made(), Made()]
    time_in_turn(implementations, range(2), None, lambda step: step)
    assert [each.seconds for each in implementations] == [[2.0, 3.0]] * 2


@pytest.mark.parametrize(("n_steps", "window"), [(8, 1), (40, 4)])
@on_ranks(2)
def test_training_loss_of_a_checkpoint_is_the_mean_of_the_last_tenth_of_the_steps_up_to_it(n_steps, window):
    case = {"steps": n_steps, "optimizer": "sgd", "hook": "none", "seed": 0}
    training = LongTraining(Digits(), case, PYTORCH)
    training.losses = [float(step**2 + 2 * dist.get_rank()) for step in range(1, n_steps + 1)]
    training.validation_losses = [0.0] * 3
    (record,) = [each for each in training.records() if each.metric == Metric.TRAINING_LOSS]
    squares = 1 + torch.arange(1, n_steps + 1, dtype=torch.float64).square()  # the mean over the ranks
    expected = [squares[step - window : step].mean().item() for step in (n_steps // 4, n_steps // 2, n_steps)]
    assert record.series == pytest.approx(expected)
    assert record.p50 == pytest.approx(expected[-1])
