"""`gradwire bench compare`: what counts as slower, and a path that was slowed down on purpose."""

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from gradwire.bench import kernel_cases, kernel_cost
from gradwire.bench.commands import app
from gradwire.bench.compare import LEAST_BAND, UNREPEATED_BAND, ResultsError, compare, load_ratios
from gradwire.bench.shapes import SHAPES

KEPT = Path(__file__).parents[1] / "bench" / "results"
RESULTS = sorted(path for path in KEPT.glob("*.json") if path.stem != "demo")


def verdicts(before, after):
    runs = [[{"step": ratio} for ratio in ratios] for ratios in (before, after)]
    return [(change.verdict, round(change.band, 3)) for change in compare(*runs)]


def test_repeated_runs_tell_what_is_noise():
    assert verdicts([1.0, 1.02], [1.04, 1.05]) == [("", LEAST_BAND)]
    assert verdicts([1.0, 1.02], [1.08, 1.09]) == [("slower", LEAST_BAND)]
    assert verdicts([1.08, 1.09], [1.0, 1.02]) == [("faster", LEAST_BAND)]
    assert verdicts([1.0, 1.3], [1.6, 1.6]) == [("", 0.3)]
    assert verdicts([1.0, 1.3], [1.7, 1.7]) == [("slower", 0.3)]
    assert verdicts([1.0, 1.04], [1.2, 1.05]) == [("", 0.143)], "one of the later runs was as fast"
    assert verdicts([1.0], [1.1, 1.1]) == [("", UNREPEATED_BAND)]
    assert verdicts([1.0], [1.2, 1.2]) == [("slower", UNREPEATED_BAND)]


def test_unchanged_code_is_not_slower():
    random = Random(0)
    runs = [{f"row {i}": random.lognormvariate(0, 0.05) for i in range(160)} for _ in range(6)]
    assert [change.what for change in compare(runs[:3], runs[3:]) if change.verdict == "slower"] == []
    slowed = [{what: ratio * (1.5 if what == "row 7" else 1) for what, ratio in run.items()} for run in runs[3:]]
    assert [change.what for change in compare(runs[:3], slowed) if change.verdict == "slower"] == ["row 7"]


def test_the_slowest_comes_first_and_only_what_all_runs_have():
    changes = compare([{"a": 1.0, "b": 1.0, "c": 1.0}], [{"a": 1.5, "b": 3.0}, {"a": 1.5, "b": 3.0, "c": 9.0}])
    assert [(change.what, change.factor) for change in changes] == [("b", 3.0), ("a", 1.5)]


def test_what_is_missing_afterwards_is_no_success(tmp_path):
    row = {"model": "mlp", "ranks": 1, "provider": "gradwire", "vs_pytorch": 1.0}
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, models in zip(paths, (("mlp", "densenet"), ("mlp",)), strict=True):
        rows = [row | {"model": model} for model in models]
        path.write_text(json.dumps({"measurements": {"backwards": rows}}))
    arguments = ["bench", "compare", "--before", str(paths[0]), "--after", str(paths[1])]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "Missing after: reducer, densenet, ranks: 1: gradwire" in done.output
    assert CliRunner().invoke(app, [*arguments[:4], "--after", str(paths[0])]).exit_code == 0


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_kept_result_can_be_compared(path):
    ratios = load_ratios(path)
    assert len(ratios) >= 4
    assert all(0.01 < ratio < 100 for ratio in ratios.values())


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.json"
    for text in ("[]", "{}", "no json", '{"measurements": {"costs": [{}]}}'):
        other.write_text(text)
        with pytest.raises(ResultsError, match=r"other\.json is not a file that"):
            load_ratios(other)
    done = CliRunner().invoke(app, ["bench", "compare", "--before", str(other), "--after", str(other)])
    assert done.exit_code == 1
    other.write_text(json.dumps({"measurements": {}}))
    done = CliRunner().invoke(app, ["bench", "compare", "--before", str(other), "--after", str(other)])
    assert done.exit_code == 1 and "no measurement in common" in done.output


def test_a_slowed_kernel_is_caught(tmp_path, monkeypatch):
    """All that is timed runs for real, on a clock of its own: a call takes 1 ms, give or take, and what was planted."""
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    monkeypatch.setenv("CXX", "no compiler")  # compiling what gradwire is compared with would take most of the time
    random, planted = Random(0), []

    def clocked(work, device):
        planted.clear()
        work()
        return random.uniform(0.9e-3, 1.1e-3) + sum(planted)

    monkeypatch.setattr(kernel_cost, "timed", clocked)

    def measured(name):
        path = tmp_path / name
        options = ["--models", "gpt2-124m", "--sizes", "1", "--rounds", "9", "--output", str(path)]
        assert CliRunner().invoke(app, ["bench", "kernels", *options]).exit_code == 0
        return str(path)

    before = [measured("a.json"), measured("b.json")]
    flatten = kernel_cases.flatten

    def slowed(*arguments, **options):
        planted.append(0.5e-3)
        return flatten(*arguments, **options)

    monkeypatch.setattr(kernel_cases, "flatten", slowed)
    after = [measured("c.json"), measured("d.json")]
    runs = [word for pair in (("--before", before), ("--after", after)) for path in pair[1] for word in (pair[0], path)]
    done = CliRunner().invoke(app, ["bench", "compare", *runs])
    assert done.exit_code == 1
    changes = compare([load_ratios(Path(p)) for p in before], [load_ratios(Path(p)) for p in after])
    slower = [change.what for change in changes if change.verdict == "slower"]
    flattened = [change.what for change in changes if change.what.startswith("flatten")]
    assert flattened and set(slower) == set(flattened)
