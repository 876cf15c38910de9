"""The tools start in a checkout as the documentation says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["compare", "compiled", "kernel_model", "pages", "validate"])
def test_tool_starts_in_a_checkout(tool):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", f"tools.{tool}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert f"python -m tools.{tool}" in done.stdout
