"""`gradwire bench telemetry`: a run of the command, and the overheads of its table."""

from gradwire.bench.record import Measured, Metric, records_of
from gradwire.bench.telemetry import COMPARED, MEASURED, PLAIN, tables


def test_overhead_is_spread_over_the_steps_between_measurements(facts):
    times = {PLAIN: 100.0, MEASURED: 110.0, COMPARED: 300.0}
    records = [
        record
        for kind, time in times.items()
        for record in records_of("telemetry", {"hook": "int4"}, kind, 2, {Metric.STEP_MS: time})
    ]
    settings = {"model": "a model", "steps": 3}
    (table,) = tables(Measured(settings, records).with_provenance(facts))
    assert table.headers[3] == "overhead of every=50"
    assert table.headers[5] == "overhead of exact_every=1000"
    assert table.rows[0][1:] == ["100", "110", "0.20%", "300", "0.20%"]
