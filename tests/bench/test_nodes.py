"""`gradwire bench nodes`: tables of made-up records, and the model of scale."""

import pytest

from gradwire.bench.scale import Machine, plain_seconds, quantized_bytes, stages


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
