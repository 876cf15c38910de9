"""The tools start in a checkout as the documentation says."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


START_EACH = """
import os, runpy, sys
for tool in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [tool, "--help"]
        runpy.run_module(f"tools.{tool}", run_name="__main__", alter_sys=True)
    if os.wait()[1] != 0:
        sys.exit(f"{tool} did not start")
"""


def test_tools_start_in_a_checkout():
    tools = ["gpu_records", "mutants", "pages", "regressions", "validate"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", "import torch, gradwire.cli" + START_EACH, *tools]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for tool in tools:
        assert f"python -m tools.{tool}" in done.stdout
