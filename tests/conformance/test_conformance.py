"""gradwire's DistributedDataParallel passes PyTorch's own tests, wherever PyTorch's class passes them on the CPU."""

from contextlib import ExitStack
from functools import cache
from zlib import crc32

import pytest
import ranks
import record

# Compilation, large models, many models.
SLOW = {"test_ddp_apply_optim_in_backward", "test_ddp_compile_static_graph", "test_ddp_uneven_inputs"}


def what_pytorch_passes():
    return [
        (world_size, row["test"])
        for world_size in record.WORLD_SIZES
        for row in record.read()
        if row[record.column("stock", world_size)] == ranks.PASSED
    ]


def case(world_size, name):
    is_sampled = crc32(name.encode()) % 4 == 0  # `make conformance` runs all
    slow = world_size > 2 or name in SLOW or not is_sampled
    return pytest.param(world_size, name, marks=[pytest.mark.slow] if slow else [], id=f"{world_size}-ranks-{name}")


@pytest.fixture(scope="module")
def suites():
    """The suite of a world size, started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda world_size: stack.enter_context(ranks.Suite("gradwire", world_size)))


@pytest.mark.parametrize(("world_size", "name"), [case(*run) for run in what_pytorch_passes()])
def test_gradwire_passes_every_test_that_pytorch_passes(suites, world_size, name):
    outcome = suites(world_size).run(name)
    assert outcome.result == ranks.PASSED, f"{outcome.result}: {outcome.reason}\n{outcome.details}"


@pytest.mark.skipif(
    not record.path().exists(),
    reason=f"{record.path().name}, for the PyTorch that is installed, is not there; --record makes it",
)
def test_record_has_every_test(suites):
    assert [row["test"] for row in record.read()] == suites(2).names


def test_hanging_rank_is_killed_and_reported(suites):
    outcome = suites(2).run("test_ddp_uneven_inputs", limit=0.01)
    assert outcome.result == ranks.TIMED_OUT
    assert "Rank 0 gave no answer" in outcome.details
