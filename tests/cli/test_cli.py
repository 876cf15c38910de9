"""The command line: help, version, refused options, and missing extras."""

import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import gradwire
from gradwire.cli import __main__, bench, bench_runs
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


def test_version_is_one_line_without_the_extras_too(monkeypatch, capsys):
    done = in_process("--version")
    assert done.exit_code == 0, done.output
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["gradwire", "--version"])
    __main__.main()
    assert capsys.readouterr().out == done.output == f"gradwire {gradwire.__version__} (torch {torch.__version__})\n"


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


@pytest.mark.parametrize(
    ("command", "names", "extra"),
    [("demo", "matplotlib, typer", "bench"), ("bench", "matplotlib, typer", "bench"), ("advise", "typer", "cli")],
)
def test_missing_extras_are_named_in_one_line(monkeypatch, command, names, extra):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["gradwire", command])
    with pytest.raises(SystemExit) as error:
        __main__.main()
    message = str(error.value)
    assert f"missing {names}. " in message
    assert f'pip install ".[{extra}]"' in message
    assert "\n" not in message


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_plain_install_lists_the_commands(monkeypatch, capsys, arguments):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    __main__.main()
    printed = capsys.readouterr().out
    assert gradwire.__version__ in printed
    assert all(f"gradwire {command} " in printed for command in ("run", "doctor", "advise", "demo", "bench"))
    assert 'run and doctor need extras: missing typer. In a checkout of gradwire, run: pip install ".[cli]"' in printed


def test_unknown_command_is_no_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["gradwire", "advice"])
    with pytest.raises(SystemExit, match="there is no command 'advice'; expected one of run, doctor, advise"):
        __main__.main()


WITH_THE_EXTRA_CLI_ALONE = """
import sys
from gradwire.cli import EXTRAS
sys.modules.update(dict.fromkeys({*EXTRAS["bench"]} - {*EXTRAS["cli"]}))
from gradwire.cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ([], 0, "8 ranks on 8 nodes, 1 Gb/s per node given"),
        (["--plot", "plot.png"], 2, "--plot: needs matplotlib. Run: pip install matplotlib"),
    ],
)
def test_advise_needs_no_package_of_the_benchmarks(tmp_path, options, status, text):
    command = [sys.executable, "-c", WITH_THE_EXTRA_CLI_ALONE, "advise", "tiny-layers", "--hooks", "fp16", *options]
    command += ["--bandwidth", "1gbit", "--world-size", "8"]
    environment = os.environ | PLAIN
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
