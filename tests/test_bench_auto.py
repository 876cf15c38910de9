"""`gradwire bench auto`: its table, from made-up records; and a run of the bench on loopback."""

import pytest

from gradwire.bench import auto
from gradwire.bench.record import STEP_MS, Measured, Record


def record(implementation, metric, number, rate="1gbit"):
    case = {"model": "linear", "rate": rate}
    return Record(bench="auto", case=case, implementation=implementation, ranks=2, metric=metric, p50=number)


def test_tables_show_choice_and_speed_up_and_step_times(facts, printed):
    records = [
        record(auto.AUTO, STEP_MS, 100.0),
        record(auto.NO_HOOK, STEP_MS, 400.0),
        record("int4", STEP_MS, 98.0),
        record("int4", auto.PARAMETERS, 3),
        record("plain", auto.PARAMETERS, 9),
        record(auto.AUTO, STEP_MS, 51.0, rate="unlimited"),
        record(auto.NO_HOOK, STEP_MS, 50.0, rate="unlimited"),
        record("plain", auto.PARAMETERS, 12, rate="unlimited"),
    ]
    choices, times = auto.tables(Measured({"rounds": 4, "hosts": 2}, records).with_provenance(facts))
    assert choices.headers == ["model", "link", "choice", "speed-up"]
    assert choices.rows == [
        ["linear", "1 Gb/s", "plain 75%, int4 25%", "4.00x"],
        ["linear", "unlimited", "plain", "0.98x"],
    ]
    assert times.headers == ["model", "link", "auto_hook", "no hook", "int4"]
    assert times.rows == [["linear", "1 Gb/s", "100", "400", "98"], ["linear", "unlimited", "51", "50", ""]]
    assert "median of 20 steps" in printed(times)


@pytest.mark.slow
def test_bench_times_choice_and_candidates_on_loopback():
    outcome = auto.measure(["tiny-layers"], [auto.LOOPBACK], rounds=1)
    timed = {each.implementation for each in outcome.records if each.metric == STEP_MS}
    assert timed == {auto.AUTO, auto.NO_HOOK, *auto.CANDIDATES}
    assert sum(each.p50 for each in outcome.records if each.metric == auto.PARAMETERS) > 0
