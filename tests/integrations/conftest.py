"""The world of two fresh processes that every trainer is tested in. Tests of absent packages are skipped."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.support.harness import World

TRAINERS = ("accelerate", "deepspeed", "lightning", "ray", "transformers")


def pytest_report_header():
    found = []
    for name in TRAINERS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return f"trainers: {', '.join(found)}"


@pytest.fixture
def run_on_two_ranks(tmp_path_factory):
    """Call a case on two ranks, in a launcher's environment without a process group; returns their values."""
    world = World(2, tmp_path_factory.mktemp("world"))

    def run(case, **arguments):
        outcomes = world.run_fresh(case, **arguments)
        for outcome in outcomes:
            assert outcome.how == "returned", outcome.output
        return [outcome.value for outcome in outcomes]

    return run
