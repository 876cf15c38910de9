"""``gradwire run`` as a command: scripts run as without it, are told what happened, and bad options are refused."""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest

from gradwire.cli import run

HANG_LIMIT = 600  # seconds

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print(f"{__name__} {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""


def call(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (("-m", "gradwire.cli", "run", "--standalone", "--nproc-per-node", "2"), 2),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "gradwire.run"),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gradwire-run", "torchrun"],
)
def test_script_runs_as_main_with_its_arguments_and_a_report(tmp_path, command, processes):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    status, output, errors = call(*command, "--hook", "int4", str(path), "0.1", "--hook")
    assert status == 0, errors
    assert output.count("__main__ ['0.1', '--hook']") == processes
    assert errors.count("gradwire run: ") == 1, "one rank reports"
    assert f"int4 on Linear, 4,160 parameters, {processes} rank{'s' * (processes > 1)}, 25 steps\n" in errors
    assert "speed                not measured: the comparison takes 223 steps" in errors
    assert re.search(r"sent in a step +\S+ kB instead of 16.6 kB: \S+ times fewer bytes", errors)
    assert re.search(r"error / gradient +\S+ at first", errors)


def test_advise_says_that_a_script_is_too_short(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(0)")
    with pytest.raises(SystemExit) as end:
        run.main(["--advise", str(path)])
    assert end.value.code == 1
    assert "the script ended before the 14 steps" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 3])
def test_script_without_ddp_is_told_so_and_keeps_its_exit_status(tmp_path, status):
    path = tmp_path / "train.py"
    path.write_text("import helper\nraise SystemExit(helper.STATUS)")
    (tmp_path / "helper.py").write_text(f"STATUS = {status}")
    code, _, errors = call("-m", "gradwire.run", "--hook", "int4", str(path))
    assert code == status
    assert ("trained no model of torch.nn.parallel.DistributedDataParallel" in errors) == (status == 0)


FORKING = """
import os
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
elif {exits}:
    raise SystemExit(5)
"""


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize("options", [("--hook", "int4"), ("--collectives", "int8"), ("--advise",)], ids="-".join)
def test_child_that_a_script_forks_ends_without_a_report(tmp_path, options, exits):
    path = tmp_path / "train.py"
    path.write_text(FORKING.format(exits=exits))
    code, output, errors = call("-m", "gradwire.run", *options, str(path))
    assert (code, output) == (int("--advise" in options), "5\n" if exits else "0\n")
    assert errors.count("gradwire run: ") == 1


def test_module_and_error_of_a_script_are_as_without_it(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text(
        "import sys\nprint(__name__, sys.argv[1:])\nraise ValueError('of the script')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output, errors = call("-m", "gradwire.run", "--hook", "int4", "-m", "training", "-x")
    assert (code, output) == (1, "__main__ ['-x']\n")
    assert errors.endswith("ValueError: of the script\n")


INTERRUPTED = SCRIPT.replace("dist.destroy_process_group()", "{end}")


@pytest.mark.parametrize(
    ("end", "status", "last_frame", "error"),
    [
        (
            "raise ValueError('of the script')",
            1,
            "    raise ValueError('of the script')\n",
            "ValueError: of the script\n",
        ),
        (
            "import signal; signal.raise_signal(2)",
            130,
            "    import signal; signal.raise_signal(2)\n",
            "KeyboardInterrupt\n",
        ),
    ],
    ids=["error", "Ctrl-C"],
)
def test_script_that_fails_ends_in_its_own_frames_and_the_report(tmp_path, end, status, last_frame, error):
    path = tmp_path / "train.py"
    path.write_text(INTERRUPTED.replace("{end}", end))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "gradwire.run")
    code, _, errors = call(*launcher, "--hook", "int4", str(path), "0.1")
    assert code == 1
    errors = errors.replace("[rank0]: ", "")  # of torch's excepthook
    shown, _, rest = errors.partition("Traceback (most recent call last):\n")[2].partition("gradwire run: ")
    assert [line for line in shown.splitlines() if line.startswith("  File ")] == [shown.splitlines()[0]], "one frame"
    assert shown.startswith(f'  File "{path}"') and last_frame in shown and shown.endswith(error)
    assert rest.startswith("int4 on Linear, 4,160 parameters, 1 rank, 25 steps\n")
    assert f"exitcode: {status}" in rest or f"exitcode  : {status}" in rest


def test_launcher_names_the_rank_that_failed_without_frames_of_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    code, _, errors = call("-m", "gradwire.cli", "run", "--standalone", "--hook", "int4", str(path))
    assert code == 1
    assert errors.endswith("gradwire run: rank 0 ended first, with SIGKILL\n") and "Traceback" not in errors


def test_environment_variable_names_the_hook(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.setenv("GRADWIRE_HOOK", "powersgd-r16-int8")
    with mock.patch.object(run, "compressed") as compressed:
        run.main([str(path)])
        run.main(["--hook", "int8", "--no-measure", str(path)])
    assert [call.args for call in compressed.call_args_list] == [("powersgd-r16-int8", 2, 200), ("int8", 2, 0)]
    assert capsys.readouterr().err.startswith("gradwire run: GRADWIRE_HOOK=powersgd-r16-int8\n")
    monkeypatch.setenv("GRADWIRE_HOOK", "int5")
    with pytest.raises(SystemExit, match="2"):
        run.main([str(path)])
    assert "GRADWIRE_HOOK is 'int5'. There is no hook 'int5'. Did you mean 'int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "name a hook, as in --hook int4 or GRADWIRE_HOOK=int4; or choose --advise"),
        (["train.py", "--hook", "int4"], "--hook stands after the script's name, so it is an option of the script."),
        (["train.py", "--hook=int4"], "script's name: python -m gradwire.run --hook int4 train.py"),
        (["-m", "training", "x", "--advise"], "--advise stands after the script's name"),
        (["--hook", "int4", "--advise", "train.py"], "--advise: not allowed with argument --hook"),
        (["--hook", "int5", "train.py"], "There is no hook 'int5'. Did you mean 'int"),
        (["--hook", "int4", "--measure", "20", "train.py"], "'20' is not a whole number of steps, at least 100"),
        (["--hook", "powersgd-r4", "--start", "1", "train.py"], "at least 2"),
        (["--collectives", "int4", "train.py"], "invalid choice: 'int4'"),
        (["--hook", "int4", "--collectives", "int8", "train.py"], "not allowed with argument --hook"),
        (["--hook", "int4", "--call", "train.py:3", "train.py"], "choose a format, as in --collectives int8"),
        (["--hook", "int4"], "required: SCRIPT"),
        (["--hook", "int4", "absent.py"], "there is no script absent.py"),
    ],
)
def test_bad_options_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hook", "int4"],
        ["--hook", "auto", "--no-measure", "--start", "7"],
        ["--hook", "int8", "--measure", "400"],
        ["--collectives", "int8", "--call", "train.py:3", "--call", "model.py:9"],
        ["--advise"],
    ],
)
def test_launcher_passes_all_own_options_on(monkeypatch, arguments):
    started = []
    monkeypatch.setattr(run.torchrun, "run", started.append)
    run.launch([*arguments, "--nproc-per-node", "2", "train.py", "--lr", "1"])
    (torchrun_options,) = started
    parser = run._own_options()
    own, script = parser.parse_known_args(torchrun_options.training_script_args)
    assert vars(own) == vars(parser.parse_args(arguments))
    assert script == ["train.py", "--lr", "1"] and torchrun_options.nproc_per_node == "2"


def test_options_after_the_script_are_refused_by_the_launcher(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.launch(["--nproc-per-node", "2", "train.py", "--hook", "int4"])
    assert "stand before the script's name: gradwire run --hook int4 train.py" in capsys.readouterr().err


def test_help_shows_own_options_first():
    text = run.options().format_help()
    names = ["--hook NAME", "--advise", "--start STEP", "--measure STEPS", "--no-measure", "options of torchrun:"]
    places = [text.index(f"\n{'' if name.startswith('options') else '  '}{name}") for name in names]
    assert places == sorted(places) and text.index("--nproc-per-node", places[-1]) > places[-1]
