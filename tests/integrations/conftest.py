"""The world of two fresh processes that every trainer is tested in. Tests of absent packages are skipped."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "distributed")]

from harness import World  # noqa: E402


@pytest.fixture
def run_on_two_ranks(tmp_path_factory, monkeypatch):
    """Call a case on two ranks, in a launcher's environment without a process group; returns their values."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")

    world = World(2, tmp_path_factory.mktemp("world"))

    def run(case, **arguments):
        outcomes = world.run_fresh(case, **arguments)
        for outcome in outcomes:
            assert outcome.how == "returned", outcome.output
        return [outcome.value for outcome in outcomes]

    return run
