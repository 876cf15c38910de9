"""The command line: help, version, refused options, and missing packages."""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import gradwire
from gradwire.cli import bench, bench_runs, run
from gradwire.cli.app import app
from gradwire.planner.hook_registry import HOOKS

PLAIN = {"NO_COLOR": "1", "COLUMNS": "200"}


def in_process(*arguments: str):
    return CliRunner(env=PLAIN).invoke(app, list(arguments))


def test_help_lists_commands():
    done = in_process("--help")
    assert done.exit_code == 0, done.output
    listed = re.findall(r"^│ (\w+) ", done.stdout.partition("Commands")[2], re.MULTILINE)
    assert listed == ["doctor", "run", "advise", "demo", "bench"]


def test_version_is_one_line():
    done = in_process("--version")
    assert done.exit_code == 0, done.output
    assert done.output == f"gradwire {gradwire.__version__} (torch {torch.__version__})\n"


def test_unknown_hook_is_refused_with_names_of_all(tmp_path):
    output = tmp_path / "demo"
    done = in_process("demo", "--hooks", "none,fp17", "--output", str(output))
    assert done.exit_code == 2
    assert "'fp17'" in done.output
    assert isinstance(done.exception, SystemExit)
    for name in HOOKS.keys() - {"noop"}:
        assert re.search(rf"\b{name}\b", done.output), name
    assert not output.exists()


REFUSED = [
    # invalid values
    ("demo", "--hooks", ""),
    ("demo", "--hooks", "none,noop"),
    ("bench", "kernels", "--models", "vgg"),
    ("bench", "kernels", "--sizes", "1.5"),
    ("bench", "reducer", "--models", "resnet"),
    ("bench", "reducer", "--ranks", "two"),
    ("bench", "network", "--rates", "1gb"),
    ("bench", "converge", "--hooks", "noop"),
    ("bench", "converge", "--rate", "1gbit,2gbit"),
    ("bench", "converge", "--task", "chess"),
    ("bench", "converge", "--task", "text,digits"),
    # places that cannot be written, before anything is measured
    ("demo", "--output", "file/demo"),
    *(
        ("bench", command, "--output", "none/results.jsonl")
        for command in ("kernels", "reducer", "hooks", "network", "converge")
    ),
    # options without effect
    ("bench", "kernels", "--quick", "--models", "resnet50"),
    ("bench", "reducer", "--quick", "--ranks", "2"),
    ("bench", "hooks", "--quick", "--steps", "3"),
    ("bench", "network", "--quick", "--hooks", "fp16"),
    ("bench", "network", "--loopback", "--rates", "1gbit"),
    ("bench", "converge", "--quick", "--task", "text"),
    ("bench", "converge", "--loopback", "--rate", "1gbit"),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_options_that_cannot_be_used_are_refused_by_name(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = in_process(*arguments)
    assert done.exit_code == 2
    assert all(word in done.output for word in arguments if word.startswith("--"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_quick_stands_for_the_options_in_the_help(monkeypatch):
    asked = []
    monkeypatch.setattr(bench.reducer, "measure", lambda *arguments: asked.append(arguments) or [])
    monkeypatch.setattr(bench_runs, "measured", lambda _, measure, *__: measure())
    monkeypatch.setattr(bench_runs, "report", lambda *_: None)
    shown = in_process("bench", "reducer", "--help").output
    assert "--quick stands for --models transformer --ranks 1 --steps 20." in shown
    assert in_process("bench", "reducer", "--quick").exit_code == 0
    assert asked == [(("transformer",), [1], 20)]


@pytest.mark.parametrize("command", [["demo"], ["bench", "kernels", "--quick"]])
def test_missing_packages_of_the_benchmarks_are_named_in_one_line(monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = in_process(*command)
    assert done.exit_code == 1
    remedy = 'missing matplotlib. In a checkout of gradwire, run: pip install ".[bench]"'
    assert done.output == f"gradwire {' '.join(command[:2])}: {remedy}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--hook", "int4", "--", "train.py", "--", "x"]])
def test_run_gets_its_arguments_as_they_are(monkeypatch, arguments):
    launched = mock.Mock()
    monkeypatch.setattr(run, "launch", launched)
    assert in_process("run", *arguments).exit_code == 0
    launched.assert_called_once_with(arguments)


WITHOUT_THE_PACKAGES_OF_BENCHMARKS = """
import sys
from gradwire.cli.options import BENCH_PACKAGES
sys.modules.update(dict.fromkeys(BENCH_PACKAGES))
from gradwire.cli.app import app
app()
"""


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ([], 0, "8 ranks on 8 nodes, 1 Gb/s per node given"),
        (["--plot", "plot.png"], 2, "--plot: needs matplotlib. Run: pip install matplotlib"),
    ],
)
def test_advise_needs_no_package_of_the_benchmarks(tmp_path, options, status, text):
    command = [
        sys.executable,
        "-c",
        WITHOUT_THE_PACKAGES_OF_BENCHMARKS,
        "advise",
        "tiny-layers",
        "--hooks",
        "fp16",
        *options,
    ]
    command += ["--bandwidth", "1gbit", "--world-size", "8"]
    environment = os.environ | PLAIN
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
