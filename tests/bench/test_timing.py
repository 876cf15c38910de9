"""Percentiles, background load, provenance, records in files, and workers that end together."""

import itertools
import json
import re
import subprocess

import pytest
import torch

from gradwire.bench import record, timing
from gradwire.bench.launch import HERE, LaunchError, launch
from gradwire.bench.record import Measured, Record, load, provenance, save
from gradwire.bench.timing import BackgroundLoad, in_turn


def test_implementations_take_turns_in_every_order():
    orders = [in_turn("abcd", turn) for turn in range(60)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert {pair for order in orders for pair in itertools.pairwise(order)} == set(itertools.permutations("abcd", 2))
    assert orders[7] == in_turn("abcd", 7), "as on the other ranks"


def test_background_load_excludes_this_process_and_its_children(monkeypatch, tmp_path):
    stat = tmp_path / "stat"  # columns: user, nice, system, idle, iowait, irq, softirq, steal, and both of guests
    stat.write_text("cpu  1000 200 300 40000 500 600 700 80 9000 90\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(timing, "Path", lambda *_: stat)
    monkeypatch.setattr(timing.os, "sysconf", {"SC_CLK_TCK": 100}.get)
    monkeypatch.setattr(timing.os, "times", lambda: (1.5, 0.25, 4.0, 0.5, 99.0))
    _, total, own = BackgroundLoad._read()
    assert (total, own) == (15.8, 6.25)


def test_provenance_names_machine_versions_and_date(monkeypatch, tmp_path):
    facts = provenance(torch.device("cpu"), "gloo", 3)
    assert facts["threads_per_process"] == 3
    assert facts["backend"] == "gloo"
    assert facts["gpu"] is None
    assert facts["load_average_before"] >= 0
    assert all(facts[key] for key in ("date", "gradwire", "torch", "python", "system", "cpu", "cpu_count"))
    json.dumps(facts)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    assert provenance(torch.device("cpu"), "gloo", 3)["commit"] is None, "outside a checkout"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, from which `record` thinks it was loaded."""
    for name in (
        "bench/record.py",
        "bench/results/old.jsonl",
        "hooks/noop.py",
        "docs/page.md",
        "README.md",
        "setup.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "bench" / "record.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "mark"),
    [
        (None, ""),
        ("bench/record.py", "-dirty"),
        ("bench/new_case.py", "-dirty"),
        ("hooks/noop.py", "-dirty"),
        ("hooks/new.py", "-dirty"),
        ("setup.py", "-dirty"),
        ("bench/results/old.jsonl", ""),
        ("bench/results/new.jsonl", ""),
        ("docs/page.md", ""),
        ("README.md", ""),
        ("notes.txt", ""),
        ("deleted", "-dirty"),
    ],
)
def test_commit_of_a_result_tells_edits_and_new_files_of_code(checkout, edited, mark):
    if edited == "deleted":
        (checkout / "hooks" / "noop.py").unlink()
    elif edited:
        (checkout / edited).write_text("edited")
    commit = provenance(torch.device("cpu"), "gloo", 1)["commit"]
    assert re.fullmatch(rf"[0-9a-f]{{40}}{mark}", commit)


def made_up(**numbers):
    numbers = {"metric": "time (ms)", "p50": 1.5} | numbers
    return Record(bench="hooks", case={"hook": "fp16"}, implementation="gradwire", ranks=2, **numbers)


def test_records_survive_a_round_trip_through_a_file(tmp_path):
    path = tmp_path / "records.jsonl"
    records = [made_up(), made_up(p20=1.0, p80=2.0), made_up(p50=None, series=[3.0, 2.0])]
    records = Measured({"steps": 3}, records).with_provenance({"cpu": "x"})
    save(records, path)
    assert load(path) == records
    assert (records[1]["hook"], records[1]["ranks"], records[1]["p20"]) == ("fp16", 2, 1.0)
    assert records[0].provenance == {"cpu": "x", "settings": {"steps": 3}}
    assert len(path.read_text().splitlines()) == 1 + len(records), "a line of provenance, a line for each record"
    with pytest.raises(TypeError):
        save([made_up(p50=object())], path)
    assert load(path) == records
    assert list(tmp_path.iterdir()) == [path]


def run_python(code):
    """``code`` in each of two ranks; `timeit` because its arguments are statements."""
    launch("timeit", ["-n1", "-r1", f"import os, sys, time\n{code}"], [HERE] * 2)


def test_failed_rank_ends_the_others(tmp_path):
    """Rank 0 waits forever for standard input, which `exit_with_launcher` watches."""
    path = tmp_path / "ended"
    code = (
        f"if os.environ['RANK'] == '1': sys.exit('rank 1 has failed')\nos.read(0, 1); open({str(path)!r}, 'w').close()"
    )
    with pytest.raises(LaunchError, match="exit code 1") as error:
        run_python(code)
    assert "rank 1 has failed" in error.value.log
    assert path.exists()
