"""The GPU lane without a GPU: its rehearsal, records, failures and imports."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gradwire
from gradwire.bench.gpu import first, lane, worker
from gradwire.bench.gpu.hook_checks import CAPTURED, HOOKS
from gradwire.bench.host_double import c_compilers
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner import hook_registry
from tests.bench import gpu_lane_cases
from tests.support.rehearsal import enter

TESTS = Path(__file__).parents[1]
REQUIREMENT = re.compile(r"[\w.-]+")


def requirements(*names):
    """Installed distributions of these names and of all their requirements."""
    found, wanted = {}, list(names)
    while wanted:
        name = wanted.pop()
        with suppress(PackageNotFoundError):  # for another platform
            if name not in found:
                found[name] = distribution(name)
                required = [line for line in found[name].requires or [] if "extra ==" not in line]
                wanted += [REQUIREMENT.match(line).group() for line in required]
    return found.values()


@pytest.fixture
def run_bare(tmp_path):
    """Runs ``python arguments`` where nothing is installed but gradwire and some packages."""

    def run(packages, *arguments):
        folder = tmp_path / "bare"
        folder.mkdir()
        places = {
            top: Path(installed.locate_file(top))
            for installed in requirements(*packages)
            for top in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}
        }
        for top, place in (places | {"gradwire": Path(gradwire.__path__[0]), "tests": TESTS}).items():
            (folder / top).symlink_to(place)
        command = [sys.executable, "-S", "-W", "ignore", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_lane_starts_with_nothing_but_torch_and_triton(run_bare):
    printed = run_bare(("torch", "triton"), "-m", "gradwire.bench.gpu", "--help")
    assert "first, smoke, ranks, sanitize, bench" in printed


def test_gpu_tests_are_collected_with_nothing_but_torch_triton_and_pytest(run_bare):
    options = ("-m", "gpu", "-p", "no:cacheprovider", "--collect-only", "tests")
    printed = run_bare(("torch", "triton", "pytest"), "-m", "pytest", *options)
    assert "collecting tests/gpu alone" in printed
    assert "powersgd: equal bits on both DDPs" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_lane_without_gpu_names_the_rehearsal(capsys, tmp_path):
    assert lane.main(["smoke", "--output", str(tmp_path / "records.jsonl")]) == 2
    assert "make gpu-rehearsal" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_first_stage_refuses_a_choice_of_cases(capsys):
    with pytest.raises(SystemExit):
        lane.main(["smoke", "first", "--only=int4"], enter)
    assert "--only selects no cases of the stage first" in capsys.readouterr().err


def test_stages_cover_every_hook_and_wire_format():
    for stage in ("smoke", "ranks"):
        names = list(lane.CASES[stage])
        cases = {f"{hook}: {what}" for hook in HOOKS for what in ("equal bits on both DDPs", "no host synchronization")}
        assert cases <= set(names)
    assert set(CAPTURED) <= set(HOOKS)
    states = [make()[0] for make in HOOKS.values()]
    assert {state.options.wire for state in states if isinstance(state, QuantizationState)} == set(WIRE_FORMATS)
    averaging = [entry.make(None, 2) for name, entry in hook_registry.HOOKS.items() if name not in ("none", "noop")]
    assert {hook for _, hook in averaging} <= {make()[1] for make in HOOKS.values()}


@pytest.fixture
def spawned_ranks_import_tests(tmp_path, monkeypatch):
    """Spawned processes get this process's ``sys.path``, which need not contain the checkout."""
    package = tmp_path / "path" / "tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__ = [{str(TESTS)!r}]")
    monkeypatch.syspath_prepend(package.parent)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_ranks_import_tests")
def test_rehearsal_of_both_stages_passes_and_resumes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "_source", lambda _: "this code")
    output = tmp_path / "records.jsonl"
    only = [
        "no hook: PyTorch's gradients",
        "low-rank passes, float16, rank 4,",
        "scaled-fp16: equal bits",
        "quantize float32 to int4, errors in float32",
        "powersgd-r4-bf16: gives the mean",
        "powersgd: replays from",
    ]
    arguments = ["smoke", "ranks", "--output", str(output), *(f"--only={part}" for part in only)]
    assert lane.main(arguments, enter) == 0
    printed = capsys.readouterr().out
    done = records(output)
    assert Counter((r["stage"], r["ranks"], r["status"]) for r in done) == {
        ("smoke", 1, "passed"): 7,
        ("smoke", 1, "skipped"): 1,
        ("ranks", 2, "passed"): 3,
        ("ranks", 2, "skipped"): 1,
    }
    for record in done:
        assert record["rehearsal"] is True
        assert record["gpu"] is None
        assert {"torch", "triton", "gradwire", "commit", "date", "source", "seconds", "text"} <= record.keys()
    lines = [line for line in printed.splitlines() if " passed in " in line or " skipped in " in line]
    assert len(lines) == len(done)
    assert all(line.startswith("rehearsal ") for line in lines)
    assert printed.count("REHEARSAL ON THE CPU, NOT ON A GPU") == 4

    started = []
    monkeypatch.setattr(worker.Crew, "_start", lambda crew, limit: started.append(crew))
    monkeypatch.setattr(worker.Crew, "_collect", lambda crew, limit: [worker.Outcome("passed")] * crew._size)
    with output.open("a") as file:
        file.write('{"case": "killed while it was wri')
    assert lane.main(arguments, enter) == 0
    assert capsys.readouterr().out.count("passed before: ") == 10
    assert len(output.read_text().splitlines()) == len(done) + 1 + 2  # the skipped ones are tried again
    monkeypatch.setattr(lane, "_source", lambda _: "other code")
    assert lane.main(arguments, enter) == 0
    assert "passed before" not in capsys.readouterr().out


def test_stage_stops_in_time_and_the_next_run_goes_on(capsys, tmp_path, monkeypatch):
    clock, ran = [0.0], []

    def run(crew, case, limit):
        ran.append(limit)
        clock[0] += 300
        return worker.Outcome("passed", "", [{"implementation": "copy_", "gb_per_s": 2.0}], 300.0)

    monkeypatch.setattr(lane, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(worker.Crew, "run", run)
    monkeypatch.setattr(lane, "_source", lambda _: "this code")
    monkeypatch.setitem(lane.CASES, "bench", dict.fromkeys(("copy", "second", "third"), print))
    arguments = ["bench", "--output", str(tmp_path / "records.jsonl")]
    assert lane.main(arguments, enter) == 1
    printed = capsys.readouterr().out
    assert ran == [worker.CASE_LIMIT, lane.STAGE_LIMIT - 300], "no case goes on beyond the stage's limit"
    assert "8.5 minutes are over, 1 cases remain" in printed
    assert "rehearsal bench: third" in printed
    assert all(line.startswith("rehearsal bench") for line in printed.splitlines())
    assert lane.main(arguments, enter) == 0
    assert len(ran) == 3
    assert "copy: 2.0 GB/s" in capsys.readouterr().out, "measured by the first run"


def outcomes_of(monkeypatch, *outcomes):
    """Let cases end like this, one after another; returns the list of those still to come."""
    coming = list(outcomes)
    monkeypatch.setattr(worker.Crew, "run", lambda crew, case, limit: coming.pop(0))
    return coming


PASSED = worker.Outcome("passed")


def failure(line):
    """A failure of two ranks, the first of them at this line."""
    traceback = f'Traceback (most recent call last):\n  File "kernels.py", line {line}, in flatten\n    x\nKeyError: 1'
    output = '--- output of rank 0:\n  File "other.py", line 1, in f'
    return worker.Outcome("failed", f"The case failed after 1.0 s.\n--- rank 0 failed {traceback}\n{output}")


def test_traceback_is_that_of_the_first_rank_that_has_one():
    assert lane.traceback_of(failure(7).text) == ('  File "kernels.py", line 7, in flatten',)
    silent = "The case failed after 1.0 s.\n--- rank 0 gave no answer in time\n"
    assert lane.traceback_of(silent) == ()
    outputs = '--- output of rank 0:\nwaiting\n--- output of rank 1:\n  File "other.py", line 1, in f\n'
    assert lane.traceback_of(silent + outputs) == ('  File "other.py", line 1, in f',)


def test_first_stage_ends_with_a_verdict(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "_source", lambda _: "this code")
    cases = len(first.FIRST) + len(first.FIRST_RANKS)
    assert cases == 25
    outcomes_of(monkeypatch, *[PASSED] * (len(first.PREFLIGHT) + cases))
    assert lane.main(["first", "--output", str(tmp_path / "passing.jsonl")], enter) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "PASS 25/25"
    assert "Preflight: ready; driver, C compiler, Python.h, kernel launch, NCCL all-reduce" in printed
    outcomes_of(monkeypatch, *[PASSED] * (len(first.PREFLIGHT) + 4), failure(7), *[PASSED] * (cases - 5))
    assert lane.main(["first", "--output", str(tmp_path / "failing.jsonl")], enter) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL 24/25"


def test_machine_that_is_not_ready_runs_no_case(capsys, tmp_path, monkeypatch):
    coming = outcomes_of(monkeypatch, PASSED, failure(1), *[PASSED] * 40)
    assert lane.main(["first", "--output", str(tmp_path / "records.jsonl")], enter) == 1
    *_, sentence, verdict = capsys.readouterr().out.splitlines()
    assert sentence == "Preflight: not ready, because of C compiler; the reasons are above."
    assert verdict == "FAIL 0/25"
    assert len(coming) == 42 - len(first.PREFLIGHT)


def test_stage_stops_after_three_failures_with_one_traceback(capsys, tmp_path, monkeypatch):
    coming = outcomes_of(monkeypatch, failure(1), failure(2), PASSED, failure(1), failure(1), *[PASSED] * 40)
    only = "--only=equal bits on both DDPs"
    assert lane.main(["ranks", only, "--output", str(tmp_path / "records.jsonl")], enter) == 1
    assert "3 failures are the same" in capsys.readouterr().out
    assert len(coming) == 40


@pytest.mark.usefixtures("spawned_ranks_import_tests")
def test_preflight_passes_here(tmp_path):
    assert lane.run_stage("preflight", rehearse=enter, output=tmp_path / "records.jsonl") == []


def test_preflight_names_what_is_missing(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(AssertionError, match=r"no no-such-compiler on the path\. Install gcc, or set CC"):
        first.c_compiler(cpu)
    assert c_compilers() == [], "Triton uses no other compiler"
    monkeypatch.setattr(first.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(AssertionError, match="Install the headers of this Python"):
        first.python_headers(cpu)


def test_failed_case_is_recorded_and_sets_exit_status(capsys, tmp_path, monkeypatch):
    outcomes = iter([worker.Outcome("failed", "what every rank said"), worker.Outcome("passed")])
    monkeypatch.setattr(worker.Crew, "run", lambda crew, case, limit: next(outcomes))
    output = tmp_path / "records.jsonl"
    only = ["--only=scaled-fp16: equal bits", "--only=scaled-bf16: equal bits"]
    arguments = ["ranks", "--output", str(output), *only]
    assert lane.main(arguments, enter) == 1
    assert "what every rank said" in capsys.readouterr().out
    assert [(r["case"], r["status"], r["text"]) for r in records(output)] == [
        ("scaled-fp16: equal bits on both DDPs", "failed", "what every rank said"),
        ("scaled-bf16: equal bits on both DDPs", "passed", ""),
    ]
    outcomes = iter([worker.Outcome("passed")])
    assert lane.main(arguments, enter) == 0  # the failed one alone


@pytest.mark.usefixtures("spawned_ranks_import_tests")
def test_stuck_rank_shows_its_stack_and_the_next_case_has_new_processes(monkeypatch):
    monkeypatch.setattr(worker, "GRACE", 0.5)
    with worker.Crew(2, enter) as crew:
        outcome = crew.run(gpu_lane_cases.one_rank_raises)
        assert outcome.status == "failed"
        assert "rank 0 failed gave no answer in time" in outcome.text
        assert "in one_rank_raises" in outcome.text.partition("output of rank 0")[2]  # the stack
        assert "ArithmeticError: rank 1 cannot" in outcome.text
        for rank in range(2):
            assert f"rank {rank} was here" in outcome.text
        assert crew.run(gpu_lane_cases.all_pass).status == "passed"
        assert crew.run(gpu_lane_cases.is_skipped)[:2] == ("skipped", "for a reason")
