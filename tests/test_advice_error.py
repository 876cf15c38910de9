"""`python -m tools.validate advise`: its tables, from made-up records; and a run of the bench on loopback."""

import pytest

from gradwire.bench.network import LOOPBACK
from gradwire.bench.record import STEP_MS, Measured, records_of
from tools import advice_error as advise


def test_tables_show_errors_and_advice(facts):
    none, int4 = ({"model": "linear", "rate": "1gbit", "hook": hook} for hook in ("none", "int4"))
    rows = [
        (none, advise.MEASURED, {STEP_MS: 400.0}),
        (none, advise.PREDICTED, {STEP_MS: 300.0}),
        (int4, advise.MEASURED, {STEP_MS: 100.0}),
        (int4, advise.PREDICTED, {STEP_MS: 110.0}),
        (int4, "advice", {advise.SPEED_UP: 4.0, advise.ADVICE_S: 12.3}),
    ]
    records = [record for case, name, metrics in rows for record in records_of("advise", case, name, 2, metrics)]
    errors, advice = advise.tables(Measured({"rounds": 2, "hosts": 2}, records).with_provenance(facts))
    assert errors.rows == [["no hook", "400", "-25"], ["int4", "100", "+10"]]
    assert advice.rows == [["linear", "1 Gb/s", "int4", "4.00x", "4.00x", "1/2", "18", "12.3"]]


@pytest.mark.slow
def test_bench_predicts_and_measures_every_hook_on_loopback():
    outcome = advise.measure(["tiny-layers"], [LOOPBACK], ["none", "int4"], rounds=1)
    steps = [record for record in outcome.records if record.metric == STEP_MS]
    assert {(record["hook"], record.implementation) for record in steps} == {
        (hook, implementation) for hook in ("none", "int4") for implementation in (advise.MEASURED, advise.PREDICTED)
    }
    assert all(record.p50 > 0 for record in steps)
