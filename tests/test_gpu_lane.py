"""The GPU lane without a GPU: its rehearsal, its records, what it does about failures, and how little it imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradwire.bench import gpu_lane, gpu_worker
from gradwire.bench.gpu_hook_cases import HOOKS

TESTS = Path(__file__).parent
# A machine with torch, triton and gradwire, and nothing else that the project uses.
BARE = """
import importlib.util, sys
MISSING = {"hypothesis", "matplotlib", "numpy", "rich", "sklearn", "typer"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in MISSING else find_spec(name, *rest)
"""


def run_bare(program, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", BARE + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=200)


def test_lane_imports_nothing_but_torch_and_triton():
    done = run_bare(
        "from gradwire.bench import gpu_lane\nassert 'pytest' not in sys.modules\nprint(len(gpu_lane.RANKS))"
    )
    assert done.stdout.strip() == "2", done.stderr


def test_gpu_tests_are_collected_on_a_bare_machine():
    options = ["-m", "gpu", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--collect-only", "tests"]
    done = run_bare("import pytest\nsys.exit(pytest.main(sys.argv[1:]))", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collecting tests/gpu alone" in done.stdout
    assert "two dtypes on the wire" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_lane_without_a_gpu_says_how_to_rehearse(capsys, tmp_path):
    assert gpu_lane.main(["smoke", "--output", str(tmp_path / "records.jsonl")]) == 2
    assert "--rehearse" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stages_hold_every_hook_and_begin_with_two_dtypes_on_the_wire():
    for stage in gpu_lane.RANKS:
        names = list(gpu_lane.cases_of(stage))
        assert names[0] == "two dtypes on the wire"
        for hook in HOOKS:
            assert f"{hook}: equal bits on both DDPs" in names
            assert f"{hook}: no host synchronisation" in names


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rehearsal_of_both_stages_passes_and_resumes(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADWIRE_KERNELS", raising=False)
    output = tmp_path / "records.jsonl"
    only = [
        "two dtypes on the wire",
        "low-rank passes, float16, rank 4,",
        "scaled fp16: equal bits",
        "kernels for",
    ]
    arguments = ["smoke", "ranks", "--rehearse", "--output", str(output), *(f"--only={part}" for part in only)]
    assert gpu_lane.main(arguments) == 0
    printed = capsys.readouterr().out
    done = records(output)
    assert [(r["stage"], r["ranks"], r["status"]) for r in done] == (
        [("smoke", 1, "passed")] * 4
        + [("smoke", 1, "skipped")]
        + [("ranks", 2, "passed")] * 2
        + [("ranks", 2, "skipped")]
    )
    for record in done:
        assert record["rehearsal"] is True
        assert record["gpu"] is None
        assert {"torch", "triton", "gradwire", "commit", "date", "source", "seconds", "text"} <= record.keys()
    lines = [line for line in printed.splitlines() if " passed in " in line or " skipped in " in line]
    assert len(lines) == len(done)
    assert all(line.startswith("rehearsal ") for line in lines)
    assert printed.count("REHEARSAL ON THE CPU, NOT ON A GPU") == 4

    started = []
    monkeypatch.setattr(gpu_worker.Crew, "_start", lambda crew, limit: started.append(crew))
    monkeypatch.setattr(gpu_worker.Crew, "_collect", lambda crew, limit: [("passed", "")] * crew._size)
    with output.open("a") as file:
        file.write('{"case": "killed while it was wri')
    assert gpu_lane.main(arguments) == 0
    assert capsys.readouterr().out.count("passed before: ") == 6
    assert len(output.read_text().splitlines()) == len(done) + 1 + 2  # the skipped ones are tried again
    monkeypatch.setattr(gpu_lane, "_source", lambda: "other code")
    assert gpu_lane.main(arguments) == 0
    assert "passed before" not in capsys.readouterr().out


def test_failed_case_is_recorded_and_gives_the_exit_status(capsys, tmp_path, monkeypatch):
    outcomes = iter([gpu_worker.Outcome("failed", 1.0, "what every rank said"), gpu_worker.Outcome("passed", 1.0, "")])
    monkeypatch.setattr(gpu_worker.Crew, "run", lambda crew, case, limit: next(outcomes))
    output = tmp_path / "records.jsonl"
    arguments = ["ranks", "--rehearse", "--output", str(output), "--only=fp16: equal bits"]
    assert gpu_lane.main(arguments) == 1
    assert "what every rank said" in capsys.readouterr().out
    assert [(r["case"], r["status"], r["text"]) for r in records(output)] == [
        ("fp16: equal bits on both DDPs", "failed", "what every rank said"),
        ("scaled fp16: equal bits on both DDPs", "passed", ""),
    ]
    outcomes = iter([gpu_worker.Outcome("passed", 1.0, "")])
    assert gpu_lane.main(arguments) == 0  # the failed one alone


def test_stuck_rank_shows_its_stack_and_the_next_case_has_new_processes(monkeypatch):
    monkeypatch.setattr(gpu_worker, "GRACE", 0.5)
    monkeypatch.syspath_prepend(str(TESTS))  # processes that are spawned get this path
    import gpu_lane_cases

    with gpu_worker.Crew(2, rehearsal=True) as crew:
        outcome = crew.run(gpu_lane_cases.one_rank_raises)
        assert outcome.status == "failed"
        assert "rank 0 failed gave no answer in time" in outcome.text
        assert "in one_rank_raises" in outcome.text.partition("output of rank 0")[2]  # the stack
        assert "ArithmeticError: rank 1 cannot" in outcome.text
        for rank in range(2):
            assert f"rank {rank} was here" in outcome.text
        assert crew.run(gpu_lane_cases.all_pass).status == "passed"
        assert crew.run(gpu_lane_cases.is_skipped)[::2] == ("skipped", "for a reason")
