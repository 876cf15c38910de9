"""The commands in the docstrings of the trainers' examples: the second one resumes what the first one saved."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_LIMIT = 600  # seconds; ends what hangs, also on a busy machine
PACKAGES = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "ray": "ray.train",
    "transformers": "transformers",
}


def commands_of(example):
    """The commands in an example's docstring, without those for GPUs."""
    lines = ast.get_docstring(ast.parse(example.read_text())).splitlines()
    return [line.split("#")[0] for line in lines if f"{example.name} " in line and not line.endswith("GPUs")]


def output_of(command, folder):
    """Run a command in the repository, with its files in ``folder``."""
    words = shlex.split(command)
    variables = dict(words.pop(0).split("=") for word in list(words) if "=" in word)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words.pop(0)]
    place = next(index for index, word in enumerate(words) if word.startswith("examples/")) + 1
    words[place] = str(folder / words[place])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, *launcher, *words], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=HANG_LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("trainer", PACKAGES)
def test_second_command_resumes_where_the_first_ended(trainer, tmp_path):
    pytest.importorskip(PACKAGES[trainer], reason=f"needs the extra '{trainer}': make test-integrations")
    commands = commands_of(ROOT / "examples" / f"train_{trainer}.py")
    first, second = (output_of(command, tmp_path) for command in (commands * 2)[:2])
    steps = [[int(step) for step in re.findall(r"\bstep (\d+)", output)] for output in (first, second)]
    assert max(steps[0]) <= min(steps[1])
    assert max(steps[1]) == 2 * max(steps[0])
    losses = [float(loss) for loss in re.findall(r"\bloss\W+([\d.]+)", first + second)]
    assert losses[-1] < losses[0]
