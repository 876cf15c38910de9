"""`python -m tools.validate rounding`: the simulated all-reduces, their checks, the table, and a run of the command."""

import pytest
import torch

from gradwire.bench.record import Measured
from gradwire.kernels import WIRE_FORMATS
from tools import rounding
from tools.rounding import RING, TWO_SHOT, TWO_SHOTS, all_reduces, check, ring_mean, tables


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(rounding, "NUMEL", 1 << 12)
    monkeypatch.setattr(rounding, "SEEDS", 2)
    monkeypatch.setattr(rounding, "STEPS", 2)
    monkeypatch.setattr(rounding, "WORLD_SIZES", (2, 4))


def test_ring_rounds_every_partial_sum_in_ring_order():
    # In fp16, 2048 + 1 rounds to 2048. Chunk 0 is added in the order 1, 2, 0, chunk 1 in the order 2, 0, 1, and so on.
    ranks = [torch.full((3,), 3.0 * value) for value in (2048, 1, 1)]
    assert ring_mean(ranks, WIRE_FORMATS["fp16"]).tolist() == [2050, 2048, 2048]
    assert ring_mean(ranks, WIRE_FORMATS["fp32"]).tolist() == [2050] * 3


@pytest.mark.parametrize("exchange", all_reduces(), ids=lambda e: f"{e.wire.name}-{e.implementation[:4].strip()}")
def test_equal_gradients_on_the_grid_pass_and_wrong_sums_fail_the_check(exchange):
    check(exchange, 4)
    wrong = exchange._replace(start=lambda *_: sum)
    with pytest.raises(RuntimeError, match="The mean of 4 equal gradients is wrong"):
        check(wrong, 4)


def error_of(name, implementation, world_size, steps=1):
    (exchange,) = (e for e in all_reduces() if (e.wire.name, e.implementation) == (name, implementation))
    return rounding.relative_error(exchange, world_size, steps, seed=0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_ring_error_grows_with_world_size_unlike_two_shot(name):
    assert error_of(name, RING, 32) > 2 * error_of(name, RING, 2)
    assert error_of(name, TWO_SHOT, 32) < 1.2 * error_of(name, TWO_SHOT, 2)


def test_error_falls_with_every_bit():
    errors = [error_of(name, TWO_SHOT, 4) for name in ("int2", "int4", "int8", "bf16", "fp16")]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", TWO_SHOTS)
def test_error_feedback_makes_up_for_single_steps(name):
    assert error_of(name, TWO_SHOT, 4, steps=16) < 0.7 * error_of(name, TWO_SHOT, 4, steps=1)


def test_table_has_a_row_per_all_reduce(facts):
    records = Measured(*rounding.measure()).with_provenance(facts)
    (table,) = tables(records)
    columns = ["bits per element", "2 ranks", "4 ranks", "8 ranks, 2 steps"]
    assert table.headers == ["wire", "all-reduce", *columns]
    assert [tuple(row[:2]) for row in table.rows] == [(e.wire.name, e.implementation) for e in all_reduces()]
    assert [row[2] for row in table.rows if row[0] in ("int4", "fp32")] == ["32", "4.25"]
