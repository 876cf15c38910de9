"""`tools.regressions`: the criterion for slower, and a kernel that is slowed down on purpose."""

import itertools
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.record import Metric, RecordError, records_of, save
from tools import regressions
from tools.regressions import MIN_BAND, UNREPEATED_BAND, compare, load_ratios, ratios


def verdicts(before, after):
    runs = [[{"step": ratio} for ratio in ratios] for ratios in (before, after)]
    return [(change.verdict, round(change.band, 3)) for change in compare(*runs)]


def test_verdict_depends_on_noise_of_repeated_runs():
    assert verdicts([1.0, 1.02], [1.04, 1.05]) == [("", MIN_BAND)]
    assert verdicts([1.0, 1.02], [1.08, 1.09]) == [("slower", MIN_BAND)]
    assert verdicts([1.08, 1.09], [1.0, 1.02]) == [("faster", MIN_BAND)]
    assert verdicts([1.0, 1.3], [1.6, 1.6]) == [("", 0.3)]
    assert verdicts([1.0, 1.3], [1.7, 1.7]) == [("slower", 0.3)]
    assert verdicts([1.0, 1.04], [1.2, 1.05]) == [("", 0.143)], "one of the later runs was as fast"
    assert verdicts([1.0], [1.1, 1.1]) == [("", UNREPEATED_BAND)]
    assert verdicts([1.0], [1.2, 1.2]) == [("slower", UNREPEATED_BAND)]


def record(case, implementation, p50, metric=Metric.STEP_MS, bench="hooks", ranks=1):
    return records_of(bench, case, implementation, ranks, {metric: p50})[0]


def test_ratios_are_to_pytorch_of_same_case_ranks_and_metric():
    fp16, r4 = {"hook": "fp16"}, {"hook": "powersgd-r4", "one_bucket": True}
    records = [
        *(record(fp16, PYTORCH, 10.0 * ranks, ranks=ranks) for ranks in (1, 2)),
        *(record(fp16, GRADWIRE, 5.0, ranks=ranks) for ranks in (1, 2)),
        record(fp16, GRADWIRE_ON_PYTORCH, 20.0),
        record(r4, PYTORCH, 100.0),
        record(r4 | {"one_bucket": False}, GRADWIRE, 25.0),
        record(fp16, GRADWIRE, 1.0, metric=Metric.BACKWARD_MS),
    ]
    assert dict(ratios(records)) == {
        "hooks, hook fp16, ranks 1: gradwire to PyTorch": 0.5,
        "hooks, hook fp16, ranks 2: gradwire to PyTorch": 0.25,
        "hooks, hook fp16, ranks 1: gradwire on PyTorch's DDP to PyTorch": 2.0,
        "hooks, hook powersgd-r4, ranks 1: gradwire to PyTorch": 0.25,
    }


def test_time_to_target_ratio_uses_seed_medians_and_needs_a_reached_target():
    seconds = {(PYTORCH, "none"): (4.0, 9.0, 5.0), (GRADWIRE, "none"): (1.0, 2.0, 20.0)}
    seconds |= {(PYTORCH, "fp16"): (4.0, 4.0, 4.0), (GRADWIRE, "fp16"): (1.0, None, 1.0)}
    records = [
        record(
            {"task": "text", "hook": hook, "seed": seed}, by, value, metric=Metric.TARGET_S, bench="converge", ranks=2
        )
        for (by, hook), values in seconds.items()
        for seed, value in enumerate(values)
    ]
    assert dict(ratios(records)) == {"converge, task text, hook none, ranks 2: gradwire to PyTorch": 0.4}
    with_muon = [replace(each, case=each.case | {"optimizer": "muon"}, p50=1.0) for each in records]
    name = "converge, task text, hook none, optimizer muon, ranks 2: gradwire to PyTorch"
    found = dict(ratios([*records, *with_muon]))
    assert (len(found), found[name]) == (3, 1.0)


def test_missing_result_fails_comparison(tmp_path):
    paths = [tmp_path / "before.jsonl", tmp_path / "after.jsonl"]
    for path, models in zip(paths, (("mlp", "densenet"), ("mlp",)), strict=True):
        cases = itertools.product(models, (PYTORCH, GRADWIRE))
        save([record({"model": m, "hook": "none"}, by, 1.0, Metric.BACKWARD_MS, "reducer") for m, by in cases], path)
    arguments = ["--before", str(paths[0]), "--after", str(paths[1])]
    done = CliRunner().invoke(regressions.app, arguments)
    assert done.exit_code == 1
    assert "Missing after: reducer, model densenet, hook none, ranks 1: gradwire to PyTorch" in done.output
    assert CliRunner().invoke(regressions.app, [*arguments[:2], "--after", str(paths[0])]).exit_code == 0


def test_files_of_other_kinds_are_refused(tmp_path):
    other = tmp_path / "other.jsonl"
    for text in ("", "[]", "{}", "no json", '{"provenance": {}}\n{"bench": "hooks"}'):
        other.write_text(text)
        with pytest.raises(RecordError, match=r"other\.jsonl is not a file that"):
            load_ratios(other)
    done = CliRunner().invoke(regressions.app, ["--before", str(other), "--after", str(other)])
    assert done.exit_code == 1
    save([record({}, "copy_", 1.0, metric="nothing to compare")], other)
    done = CliRunner().invoke(regressions.app, ["--before", str(other), "--after", str(other)])
    assert done.exit_code == 1 and "no measurement in common" in done.output
