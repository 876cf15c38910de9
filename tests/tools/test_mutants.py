"""The list of planted defects fits the code: every edit is possible, and every test exists."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants

ROOT = Path(__file__).parents[2]
LISTED = mutants.read()
HANG_LIMIT = 300  # seconds; ends what hangs, also on a busy machine


def test_edits_are_possible_and_their_tests_exist():
    functions = {}
    for mutant in LISTED:
        assert mutant.edited(ROOT) != (ROOT / mutant.file).read_text(), mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            if path not in functions:
                tree = ast.parse((ROOT / path).read_text())
                functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name.partition("[")[0].split("::")[-1] in functions[path], f"{mutant.name}: {test}"


def test_the_guarantees_page_tells_their_number():
    text = " ".join((ROOT / "docs" / "guarantees.md").read_text().split())
    (number,) = re.findall(r"The list has (\d+) defects", text)
    assert int(number) == len(LISTED)


def of(find, replace, **options):
    return mutants.Mutant("a defect", "comm/nodes.py", find, replace, ("tests/tools/test_mutants.py",), **options)


@pytest.mark.parametrize(
    ("find", "replace", "error", "text"),
    [
        ("no such text", "", ValueError, "a defect: comm/nodes.py has 0 places like 'no such text'; expected one"),
        ("\n", " ", ValueError, r"a defect: comm/nodes.py has \d+ places"),
        ("def local_size(", "def local_size((", SyntaxError, "nodes.py"),
    ],
    ids=["absent", "several", "syntax"],
)
def test_edit_that_is_impossible_is_refused(find, replace, error, text):
    with pytest.raises(error, match=text):
        of(find, replace).edited(ROOT)


ENDLESS = """
import os, pathlib, time

def test():
    with pathlib.Path("started").open("w") as fifo:
        fifo.write(str(os.getpid()))
    time.sleep(60)
"""
RUNNER = """
import pathlib, sys
from tools import mutants

copy = object.__new__(mutants.Copy)
copy.folder = copy._path = pathlib.Path(sys.argv[1])
mutants.end_on_signals()
copy.test(["test_endless.py"], interpreter=False)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_tests_that_run(tmp_path, number):
    os.mkfifo(tmp_path / "started")
    (tmp_path / "build").mkdir()
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    profile = "import hypothesis; hypothesis.settings.register_profile('no shrinking')"
    (tmp_path / "conftest.py").write_text(profile)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", RUNNER, tmp_path], env=environment) as runner:
        pid = int((tmp_path / "started").read_text())  # waits until the test runs
        assert Path(f"/proc/{pid}/cmdline").exists()
        runner.send_signal(number)
        assert runner.wait(HANG_LIMIT) == 128 + number
    assert not Path(f"/proc/{pid}").exists()


def test_no_command_of_the_makefile_hides_behind_a_shell_that_keeps_sigterm():
    """make starts a command itself, and passes SIGTERM on to it, unless it begins with an assignment."""
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"^(?:TOOL := |\t@?)\w+=.*", text, re.MULTILINE) == []
    assert len(re.findall(r"^(?:TOOL := |\t)env \w+=", text, re.MULTILINE)) > 5
