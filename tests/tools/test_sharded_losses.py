"""`python -m tools.validate sharded`: error memories, a short training, and the table."""

from dataclasses import replace

import pytest
import torch

from gradwire.bench.converge import PLAIN_STEPS
from gradwire.bench.record import Metric
from tools import sharded_losses
from tools.sharded_losses import METHODS, PLAIN, Method, trained

METHOD = {(method.name, method.memory.partition(",")[0]): method for method in METHODS}


def test_methods_of_error_memories():
    x, sent, old = torch.randn(3, 1000)
    assert torch.equal(METHOD["int4", "fp32"].keep(x - sent, old), x - sent)
    assert torch.equal(METHOD["int4", "none"].keep(x - sent, torch.zeros(1000)), torch.zeros(1000))
    torch.testing.assert_close(METHOD["int4", "bf16"].keep(x - sent, old), x - sent, rtol=2**-7, atol=0)
    averaged = METHOD["int4", "averaged"].keep(x - sent, old)
    torch.testing.assert_close(averaged, 0.8 * old + 0.2 * (x - sent), rtol=0, atol=0.02)


def test_a_memory_in_bf16_is_right_on_average():
    error = torch.full((100_000,), 1 + 2**-10)
    kept = METHOD["int4", "bf16"].keep(error, torch.zeros(()))
    assert set(kept.tolist()) == {1.0, 1 + 2**-7}
    assert kept.mean().item() == pytest.approx(error[0].item(), rel=1e-4)


def test_all_methods_train_alike_until_they_compress_and_no_compression_sends_all(monkeypatch):
    monkeypatch.setattr(sharded_losses, "TASK", "digits")
    plain, int4 = (
        trained(method, 0, PLAIN_STEPS)[Metric.VALIDATION_LOSS] for method in (METHODS[0], METHOD["int4", "none"])
    )
    assert plain == int4
    later = [trained(method, 0, PLAIN_STEPS + 3)[Metric.VALIDATION_LOSS] for method in METHODS[:4]]
    assert len(set(later)) == 4
    exact = Method("exact", 32, lambda x: x.clone(), "fp32", lambda error, _: error)
    assert trained(exact, 0, PLAIN_STEPS + 3)[Metric.VALIDATION_LOSS] == later[0]


def test_table_has_differences_to_no_compression(monkeypatch):
    losses = {PLAIN: 2.0, "int8": 2.001, "int6": 2.0, "int4": 2.25, "int4-128": 3.0}
    monkeypatch.setattr(
        sharded_losses,
        "trained",
        lambda method, seed: {
            Metric.TRAINING_LOSS: losses[method.name] + seed,
            Metric.VALIDATION_LOSS: losses[method.name],
        },
    )
    measured = sharded_losses.measure()
    records = [replace(record, provenance={"settings": measured.settings}) for record in measured.records]
    (table,) = sharded_losses.tables(records)
    assert [row[:3] for row in table.rows[:2]] == [["fp32", "none", "32"], ["int8", "none", "8.25"]]
    assert table.rows[0][3:] == ["2.500", "2.000"]
    assert table.rows[3] == ["int4", "fp32, 4 B", "4.25", *["+0.250 (+0.250 to +0.250)"] * 2]
    assert len(table.rows) == len(METHODS)
