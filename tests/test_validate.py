"""`python -m tools.validate advise`: its tables, from made-up records, and a run on loopback."""

from pathlib import Path

import pytest

from gradwire.bench.network import LOOPBACK
from gradwire.bench.record import Measured, Metric, records_of
from tools import advice_error


@pytest.fixture(autouse=True)
def ranks_import_tools(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


def test_advise_tables_show_errors_and_advice(facts):
    none, int4 = ({"model": "linear", "rate": "1gbit", "hook": hook} for hook in ("none", "int4"))
    rows = [
        (none, advice_error.MEASURED, {Metric.STEP_MS: 400.0}),
        (none, advice_error.PREDICTED, {Metric.STEP_MS: 300.0}),
        (int4, advice_error.MEASURED, {Metric.STEP_MS: 100.0}),
        (int4, advice_error.PREDICTED, {Metric.STEP_MS: 110.0}),
        (int4, "advice", {advice_error.SPEED_UP: 4.0, advice_error.ADVICE_S: 12.3}),
    ]
    records = [record for case, name, metrics in rows for record in records_of("advise", case, name, 2, metrics)]
    errors, advice = advice_error.tables(Measured({"rounds": 2, "hosts": 2}, records).with_provenance(facts))
    assert errors.rows == [["no hook", "400", "-25"], ["int4", "100", "+10"]]
    assert advice.rows == [["linear", "1 Gb/s", "int4", "4.00x", "4.00x", "1/2", "18", "12.3"]]


@pytest.mark.slow
def test_advise_predicts_and_measures_every_hook_on_loopback():
    outcome = advice_error.measure(["tiny-layers"], [LOOPBACK], ["none", "int4"], rounds=1, delay_ms=0.0)
    steps = [record for record in outcome.records if record.metric == Metric.STEP_MS]
    assert {(record["hook"], record.implementation) for record in steps} == {
        (hook, implementation)
        for hook in ("none", "int4")
        for implementation in (advice_error.MEASURED, advice_error.PREDICTED)
    }
    assert all(record.p50 > 0 for record in steps)
