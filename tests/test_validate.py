"""`python -m tools.validate advise`: its tables, from made-up records, and a run on loopback."""

from pathlib import Path

import pytest

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
