"""`gradwire bench anywhere` on 2 hosts of 2 ranks: every loop is measured, and wrong gradients are refused."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import anywhere, loops
from gradwire.bench.anywhere import CASES, TRAINED, SmallBytes
from gradwire.bench.namespaces import LOOPBACK
from gradwire.bench.record import Measured
from tests.support.ranks import on_ranks
from tests.support.training import error_of

SETTINGS = {"rates": [LOOPBACK.name], "steps": 1, "training_steps": 2, "hosts": 2, "parameters": 0}


def measured(**settings):
    """The records of this rank for a small model."""
    small = mock.patch.multiple(SmallBytes, layers=1, width=16, validation_sequences=8)
    with small, mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank() % 2)):
        return anywhere.main(SETTINGS | settings, torch.device("cpu"))


@pytest.mark.slow
@on_ranks(4)
def test_every_loop_and_method_has_a_time_and_a_loss():
    times, losses = measured(), measured(is_training=True)
    for records, loops_of in ((times, CASES), (losses, TRAINED)):
        found = [(record["loop"], record["method"]) for record in records]
        assert found == [(loop, method) for loop in loops_of for method in CASES[loop]]
    loss_of = {(record["loop"], record["method"]): record.p50 for record in losses}
    for loop in TRAINED:
        assert loss_of[loop, "plain"] == pytest.approx(loss_of[loop, "int8"], abs=0.01)
    step_times, loss = anywhere.tables(Measured(SETTINGS, [*times, *losses]).with_provenance({}))
    assert [row[1] for row in step_times.rows] == ["4"] * len(CASES) and len(loss.rows) == len(TRAINED)
    assert step_times.rows[3][-1] == "-" and "x)" in step_times.rows[0][-1]


@pytest.mark.parametrize(
    ("problem", "complaint"), [("mean", "deviate from their mean"), ("rank", "differ between ranks")]
)
@on_ranks(2)
def test_wrong_gradients_and_different_parameters_are_refused(problem, complaint):
    exact = loops.average_all

    def average(gradients, wire, memory):
        exact(gradients, wire, memory)
        factor = 2 if problem == "mean" else 1 + 1e-6 * dist.get_rank()
        for gradient in gradients.values():
            gradient.mul_(factor)

    with mock.patch.object(loops, "average_all", average):  # of Muon
        kind, message = error_of(measured)
    assert kind == "RuntimeError" and message.startswith("Muon") and complaint in message
