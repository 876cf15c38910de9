"""gradwire's DistributedDataParallel passes PyTorch's own tests, wherever PyTorch's class passes them on the CPU."""

import pytest
import ranks
import record
from expected_failures import EXPECTED_FAILURES

# Compilation, large models, many models.
SLOW = {"test_ddp_apply_optim_in_backward", "test_ddp_compile_static_graph", "test_ddp_uneven_inputs"}

needs_record = pytest.mark.skipif(
    not record.path().exists(),
    reason=f"{record.path().name}, for the PyTorch that is installed, is not there; --record makes it",
)


def what_pytorch_passes():
    return [
        (world_size, row["test"])
        for world_size in record.WORLD_SIZES
        for row in record.read()
        if row[record.column("stock", world_size)] == ranks.PASSED
    ]


def case(world_size, name):
    slow = world_size > 2 or name in SLOW
    return pytest.param(world_size, name, marks=[pytest.mark.slow] if slow else [], id=f"{world_size}-ranks-{name}")


@pytest.fixture(scope="module")
def on_2_ranks():
    with ranks.Suite("gradwire", 2) as suite:
        yield suite


@pytest.fixture(scope="module")
def on_4_ranks():
    with ranks.Suite("gradwire", 4) as suite:
        yield suite


@pytest.mark.parametrize(("world_size", "name"), [case(*run) for run in what_pytorch_passes()])
def test_gradwire_passes_every_test_that_pytorch_passes(request, world_size, name):
    outcome = request.getfixturevalue(f"on_{world_size}_ranks").run(name)
    if name in EXPECTED_FAILURES:
        assert outcome.result != ranks.PASSED, f"passes, so take it out of expected_failures.py: {name}"
        pytest.xfail(EXPECTED_FAILURES[name])
    assert outcome.result == ranks.PASSED, f"{outcome.result}: {outcome.reason}\n{outcome.details}"


@needs_record
def test_record_has_every_test(on_2_ranks):
    assert [row["test"] for row in record.read()] == on_2_ranks.names


@needs_record
def test_expected_failures_are_tests_that_pytorch_passes():
    assert EXPECTED_FAILURES.keys() <= {name for _, name in what_pytorch_passes()}


def test_hanging_rank_is_killed_and_reported(on_2_ranks):
    outcome = on_2_ranks.run("test_ddp_uneven_inputs", limit=0.01)
    assert outcome.result == ranks.TIMED_OUT
    assert "Rank 0 gave no answer" in outcome.details
