"""`python -m tools.validate auto`: its table, from made-up records; and a run of the bench on loopback."""

import pytest

from gradwire.bench.network import LOOPBACK
from gradwire.bench.record import STEP_MS, Measured, records_of
from tools import auto_choice as auto


def test_tables_show_choice_and_speed_up_and_step_times(facts):
    slow, fast = ({"model": "linear", "rate": rate} for rate in ("1gbit", "unlimited"))
    rows = [
        (slow, auto.AUTO, {STEP_MS: 100.0}),
        (slow, auto.NO_HOOK, {STEP_MS: 400.0}),
        (slow, "int4", {STEP_MS: 98.0, auto.PARAMETERS: 3}),
        (slow, "plain", {auto.PARAMETERS: 9}),
        (fast, auto.AUTO, {STEP_MS: 51.0}),
        (fast, auto.NO_HOOK, {STEP_MS: 50.0}),
        (fast, "plain", {auto.PARAMETERS: 12}),
    ]
    records = [record for case, name, metrics in rows for record in records_of("auto", case, name, 2, metrics)]
    choices, times = auto.tables(Measured({"rounds": 4, "hosts": 2}, records).with_provenance(facts))
    assert choices.headers == ["model", "link", "choice", "speed-up"]
    assert choices.rows == [
        ["linear", "1 Gb/s", "plain 75%, int4 25%", "4.00x"],
        ["linear", "unlimited", "plain", "0.98x"],
    ]
    assert times.headers == ["model", "link", "auto_hook", "no hook", "int4"]
    assert times.rows == [["linear", "1 Gb/s", "100", "400", "98"], ["linear", "unlimited", "51", "50", ""]]


@pytest.mark.slow
def test_bench_times_choice_and_candidates_on_loopback():
    outcome = auto.measure(["tiny-layers"], [LOOPBACK], rounds=1)
    timed = {each.implementation for each in outcome.records if each.metric == STEP_MS}
    assert timed == {auto.AUTO, auto.NO_HOOK, *auto.CANDIDATES}
    assert sum(each.p50 for each in outcome.records if each.metric == auto.PARAMETERS) > 0
