"""The programs in examples/, run with the commands in their docstrings."""

import ast
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "checkpointing")  # which others import
# The examples of trainers, which need a package of the extra `integrations`.
PACKAGES = {
    "train_accelerate": "accelerate",
    "train_fabric": "lightning",
    "train_lightning": "lightning",
    "train_ray": "ray.train",
    "train_transformers": "transformers",
}
HANG_LIMIT = 600  # seconds; ends what hangs, also on a busy machine


def commands_of(name):
    """The commands in an example's docstring, without those for GPUs."""
    lines = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).splitlines()
    return [line.strip() for line in lines if f"examples/{name}.py" in line and not line.endswith("GPUs")]


def output_of(command, folder):
    """Run a command as it stands, from a folder that has examples/ in it and gets the checkpoints."""
    link = folder / "examples"
    if not link.exists():
        link.symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of python and torchrun
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def outputs_of(name, folder):
    """Run all commands of an example, one after the other."""
    return [output_of(command, folder) for command in commands_of(name)]
