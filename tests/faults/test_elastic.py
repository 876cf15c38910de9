"""Elastic torchrun: workers that are killed at random resume from the last checkpoint, to the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ENVIRONMENT

pytestmark = pytest.mark.faults
PROGRAM = Path(__file__).parents[1] / "support" / "elastic_rank.py"
HANG_LIMIT = 600  # seconds
STEPS = 24


def losses(folder, hook, *, ranks, seed=0, kills=0):
    """The loss of every step, as last computed, and the attempts that computed any."""
    folder.mkdir(exist_ok=True)
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(kills),
    )
    command = [sys.executable, *torchrun, str(PROGRAM), str(folder), hook, str(seed), str(kills)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=HANG_LIMIT, check=False
    )
    facts = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    return done, {fact["step"]: fact["loss"] for fact in facts}, {fact["attempt"] for fact in facts}


# The memory of int4 and PowerSGD is merged by a load, which rounds.
PRECISION = {"fp16": 0.0, "int4": 0.02, "powersgd": 0.02}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hook", PRECISION)
def test_workers_killed_at_random_resume_to_the_losses_of_an_uninterrupted_run(tmp_path, hook, seed):
    _, expected, _ = losses(tmp_path / "whole", hook, ranks=2)
    done, seen, attempts = losses(tmp_path / "killed", hook, ranks=2, seed=seed, kills=3)
    assert done.returncode == 0, done.stderr
    assert max(attempts) == 3  # an attempt may end before its first line
    assert list(sorted(seen)) == list(sorted(expected)) == list(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert seen[step] == pytest.approx(loss, rel=PRECISION[hook], abs=0), step
    assert seen[STEPS] < 0.5 * seen[1]


@pytest.mark.parametrize("hook", PRECISION)
def test_fewer_workers_resume_to_the_losses_of_an_uninterrupted_run(tmp_path, hook):
    _, expected, _ = losses(tmp_path / "whole", hook, ranks=3)
    killed, _, _ = losses(tmp_path / "fewer", hook, ranks=3, seed=1, kills=0)
    assert killed.returncode == 0, killed.stderr
    (tmp_path / "fewer" / "checkpoints" / "step_24").rename(tmp_path / "lost")  # the newest is gone with its worker
    done, seen, _ = losses(tmp_path / "fewer", hook, ranks=2)
    assert done.returncode == 0, done.stderr
    for step, loss in expected.items():
        assert seen[step] == pytest.approx(loss, rel=max(PRECISION[hook], 2e-3), abs=0), step
