"""`gradwire bench nodes`: tables of made-up records, and the model of scale."""

import pytest

from gradwire.bench import scale
from gradwire.bench.nodes import FLAT, METHODS, NOOP, PLAIN, SEAMS, tables
from gradwire.bench.record import Measured, Metric, Record
from gradwire.bench.scale import Machine, plain_seconds, quantized_bytes, stages

SETTINGS = {"steps": 2, "training_steps": 4, "hosts": 2, "ranks_per_host": 2, "parameters": 8_000_000}
ALL = [(seam, method) for seam, methods in SEAMS.items() for method in methods]


def made_up(facts, rates=("100mbit", "1gbit")):
    records = []

    def add(seam, method, metric, value, **case):
        case |= {"seam": seam, "method": method}
        records.append(Record(bench="nodes", case=case, implementation="-", ranks=4, metric=metric, p50=value))

    for rate in rates:
        for seam, method in ALL:
            add(seam, method, Metric.STEP_MS, {PLAIN: 400.0, NOOP: 100.0}.get(method, 160.0), rate=rate)
            add(seam, method, Metric.SENT_PER_STEP, 1e6, rate=rate)
    for seam, method in [(FLAT, NOOP), *(case for case in ALL if case[1] != NOOP)]:
        add(seam, method, Metric.MEMORY, 300e6 if method == NOOP else 312e6)
        if method != NOOP:
            add(seam, method, Metric.VALIDATION_LOSS, 2.5)
    return Measured(SETTINGS, records).with_provenance(facts)


def test_tables_have_a_row_for_each_seam(facts):
    slow, fast, sent, memory, loss, calibration, *models = tables(made_up(facts))
    assert slow.title == "Step time (ms), 2 nodes of 2 ranks, link between nodes: 100 Mb/s"
    assert fast.title.endswith("1 Gb/s") and sent.title == "Sent per step by a node, at 1 Gb/s"
    for table in (slow, fast, sent, memory, loss):
        assert [row[0] for row in table.rows] == list(SEAMS) and list(table.headers[1:]) == list(METHODS)
    assert slow.rows[0] == ["ddp-flat", "400", *["160 (2.5x)"] * 4]
    assert slow.rows[1] == ["ddp-hierarchical", "-", *["160 (2.5x)"] * 3, "-"]
    assert memory.rows[2] == ["hsdp", *["12 MB"] * 5] and loss.rows[2] == ["hsdp", *["2.5000"] * 5]
    assert len(calibration.rows) == 2 * len(scale.METHODS) and len(models) == len(scale.MODELS)
    assert [bool(table.notes) for table in models] == [False] * (len(models) - 1) + [True]


def test_calibration_compares_counted_with_measured_bytes(facts):
    """8 M elements of 0.53 bytes: int4 sends 7/4 of them flat, and all of them once hierarchical, over 2 x 2 ranks."""
    calibration = tables(made_up(facts, ["100mbit"]))[4]
    by_name = {row[0]: row[1:] for row in calibration.rows}
    assert by_name["int4, flat, 100 Mb/s"] == ["7.44 MB", "1 MB", "7.44", "595", "60", "9.92"]
    assert by_name["int4, hierarchical, 100 Mb/s"][:3] == ["4.25 MB", "1 MB", "4.25"]


def test_counted_bytes_follow_the_formula():
    b = 34 / 64  # bytes of int4 per element: 64 codes of 4 bits and a scale of 16
    assert quantized_bytes(6400, "int4", False, 16, 8) == pytest.approx(6400 * b * (8 * 15 / 16 + 127 / 128))
    assert quantized_bytes(6400, "int4", True, 16, 8) == pytest.approx(6400 * b * 2 * 15 / 16)
    assert quantized_bytes(6400, "int4", True, 2, 2) / quantized_bytes(6400, "int4", False, 2, 2) == pytest.approx(
        4 / 7
    )


def test_model_loses_where_the_link_is_fast_and_wins_where_it_is_slow():
    def speed_up(gbit, is_hierarchical):
        machine = Machine()
        own = sum(stages(10**9, "int4", is_hierarchical, 16, 8, gbit, machine))
        return plain_seconds(10**9, 16, 8, gbit, machine) / own

    assert speed_up(25, True) > 2 > 1 > speed_up(25, False)
    assert speed_up(400, True) < 1


def test_link_stage_is_bytes_over_the_rate_of_all_interfaces():
    found = stages(10**9, "int8", True, 16, 8, 100, Machine())
    assert found.link == pytest.approx(quantized_bytes(10**9, "int8", True, 16, 8) / (8 * 12.5e9))
    assert found.wait == pytest.approx(10 * 2 * (10e-6 + 15e-6))
    assert found.local == pytest.approx(1e9 * 7 / 8 * (2 + 66 / 64) / 360e9)
