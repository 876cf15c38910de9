"""`gradwire bench advise`: its tables, from made-up records; and a run of the bench on loopback."""

import pytest

from gradwire.bench import advise
from gradwire.bench.record import STEP_MS, Measured, Record

SETTINGS = {"rounds": 2, "hosts": 2}


def step(rate, hook, implementation, milliseconds):
    case = {"model": "linear", "rate": rate, "hook": hook}
    return Record(bench="advise", case=case, implementation=implementation, ranks=2, metric=STEP_MS, p50=milliseconds)


def advised(rate, hook, speed_up):
    case = {"model": "linear", "rate": rate, "hook": hook}
    record = {"bench": "advise", "case": case, "implementation": "advice", "ranks": 2}
    return [
        Record(**record, metric=advise.SPEED_UP, p50=speed_up),
        Record(**record, metric=advise.ADVICE_S, p50=12.3),
    ]


def test_tables_show_errors_and_advice(facts, printed):
    records = [
        step("1gbit", "none", advise.MEASURED, 400.0),
        step("1gbit", "none", advise.PREDICTED, 300.0),
        step("1gbit", "int4", advise.MEASURED, 100.0),
        step("1gbit", "int4", advise.PREDICTED, 110.0),
        *advised("1gbit", "int4", 4.0),
    ]
    errors, advice = advise.tables(Measured(SETTINGS, records).with_provenance(facts))
    assert errors.rows == [["no hook", "400", "-25"], ["int4", "100", "+10"]]
    assert advice.rows == [["linear", "1 Gb/s", "int4", "4.00x", "4.00x", "1/2", "18", "12.3"]]
    assert "1/2" in printed(errors, advice)


@pytest.mark.slow
def test_bench_predicts_and_measures_every_hook_on_loopback():
    outcome = advise.measure(["tiny-layers"], [advise.LOOPBACK], ["none", "int4"], rounds=1)
    steps = [record for record in outcome.records if record.metric == STEP_MS]
    assert {(record["hook"], record.implementation) for record in steps} == {
        (hook, implementation) for hook in ("none", "int4") for implementation in (advise.MEASURED, advise.PREDICTED)
    }
    assert all(record.p50 > 0 for record in steps)
