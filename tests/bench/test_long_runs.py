"""`gradwire bench converge --steps`: its table, trainings that the output file has, and a short run."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench import long_runs
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Metric, load, records_of, save
from gradwire.bench.tasks import CPU, Digits
from gradwire.cli.app import app

SETTINGS = {"task": "GPT", "parameters": 1_000, "plain_steps": 2}


def training(hook, losses, seed=0, implementation=GRADWIRE, **metrics):
    case = {"task": "small-text", "steps": 2000, "optimizer": "adamw", "hook": hook, "seed": seed}
    curves = {
        Metric.VALIDATION_LOSS: {"p50": losses[-1], "series": losses},
        Metric.TRAINING_LOSS: {"p50": losses[-1], "series": [loss - 0.5 for loss in losses]},
    }
    records = records_of("long_runs", case, implementation, 2, curves | metrics)
    return [replace(record, provenance={"settings": SETTINGS, "date": hook}) for record in records]


NONE = [r for seed in (0, 1) for r in training("none", [3.0, 2.5, 2.0 + seed], seed, PYTORCH)]
INT4 = [
    r
    for seed in (0, 1)
    for r in training(
        "int4",
        [3.1, 2.5, 2.01 + 1.01 * seed],
        seed,
        **{Metric.SENT_PER_STEP: 544, Metric.GAIN: 0.9 + 0.1 * seed, Metric.RESIDUAL_RATIO: 0.25},
    )
]


def test_losses_are_relative_to_no_hook_of_the_same_seed():
    (table,) = long_runs.tables([*INT4, *NONE])
    assert table.title == "GPT, 1,000 parameters, AdamW, 2,000 steps, 2 ranks"
    plain, int4 = (dict(zip(table.headers, row, strict=True)) for row in table.rows)
    assert (plain["hook"], plain["validation loss at 2,000"], plain["training loss"]) == ("no hook", "2.500", "2.000")
    assert int4["validation loss at 500"] == "+0.100 (+0.100 to +0.100)"
    assert int4["validation loss at 1,000"] == "+0.000 (+0.000 to +0.000)"
    assert int4["validation loss at 2,000"] == int4["training loss"] == "+0.015 (+0.010 to +0.020)"
    assert (int4["residual ratio"], int4["gain"], int4["sent"], int4["seeds"]) == ("0.25", "0.95", "13.6%", "2")
    assert plain["gain"] == plain["sent"] == ""


def test_loss_of_a_seed_that_no_hook_was_not_trained_with_is_left_out():
    other = training("sign", [9.0, 9.0, 9.0], seed=2)
    (table,) = long_runs.tables([*NONE, *other, *training("sign", [4.0, 3.0, 2.25])])
    assert table.rows[-1][:5] == ["sign", GRADWIRE, "+1.000", "+0.500", "+0.250"]
    (table,) = long_runs.tables(other)
    assert "validation loss at 500" not in table.headers


def test_trainings_that_are_done_are_not_repeated(monkeypatch):
    trained = []

    class Double:
        def __init__(self, task, case, implementation):
            trained.append((case["hook"], case["seed"], implementation))

        def run(self, progress):
            pass

        def records(self):
            return []

    monkeypatch.setattr(long_runs, "LongTraining", Double)
    monkeypatch.setattr(long_runs.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(long_runs.launch, "run", lambda name, settings, ranks: long_runs.main(settings, CPU))
    done = [*NONE, *training("int4", [3.0, 2.5, 2.0], seed=1)]
    long_runs.measure("small-text", ["adamw"], ["none", "int4"], 2000, 3, done)
    assert trained == [("none", 2, PYTORCH), ("int4", 0, GRADWIRE), ("int4", 2, GRADWIRE)]


@pytest.mark.parametrize("option", ["--rate=1gbit", "--hosts=3", "--delay=1", "--loopback"])
def test_options_of_a_link_are_refused(option):
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["bench", "converge", "--steps", "8", option])
    assert done.exit_code == 2
    assert f"without a link to limit; leave out {option.partition('=')[0]}" in done.output


@pytest.mark.parametrize("text", ["no records", "converge"])
def test_file_of_other_results_is_refused_before_anything_is_trained(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    if text == "converge":
        save([replace(r, bench="converge") for r in NONE], path)
    before = path.read_text()
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "400"})
    done = runner.invoke(app, ["bench", "converge", "--steps", "8", "--output", str(path)])
    assert done.exit_code == 2 and "results.jsonl" in done.output
    assert path.read_text() == before


def test_validation_loss_of_digits_is_the_cross_entropy_of_all_test_images():
    task = Digits()
    torch.manual_seed(0)
    model = task.make_model().eval()
    log_probabilities = model(task.test_images).log_softmax(1)
    expected = -log_probabilities[torch.arange(len(task.test_labels)), task.test_labels].mean()
    assert task.validation_loss(model) == pytest.approx(expected.item())


@pytest.mark.slow
def test_command_trains_for_its_steps_and_adds_to_the_file(tmp_path):
    path = tmp_path / "long.jsonl"
    options = ["--task", "digits", "--steps", "8", "--seeds", "1", "--output", str(path)]
    for hooks in ("none", "powersgd-r4", "none,int4,bf16"):
        done = CliRunner().invoke(app, ["bench", "converge", *options, "--hooks", hooks])
        assert done.exit_code == 0, done.output
    assert "8 steps, 2 ranks" in " ".join(done.output.split())
    records = load(path)
    of = {(r["hook"], r.implementation, r.metric): r for r in records}
    assert [(r["hook"], r.implementation) for r in records if r.metric == Metric.VALIDATION_LOSS] == [
        ("none", PYTORCH),
        ("powersgd-r4", PYTORCH),
        ("powersgd-r4", GRADWIRE),
        ("int4", GRADWIRE),
        ("bf16", PYTORCH),
        ("bf16", GRADWIRE),
    ]
    plain, int4 = (of[hook, by, Metric.VALIDATION_LOSS] for hook, by in (("none", PYTORCH), ("int4", GRADWIRE)))
    assert len(plain.series) == len(int4.series) == 3
    assert plain.series[0] == int4.series[0], "the first two steps are uncompressed"
    assert plain.series[-1] != int4.series[-1]
    assert of["none", PYTORCH, Metric.ACCURACY].p50 > 0
    assert of["int4", GRADWIRE, Metric.GAIN].p50 == pytest.approx(1, abs=0.05)
    assert 0 < of["int4", GRADWIRE, Metric.RESIDUAL_RATIO].p50 < 0.5
    gradient_bytes = 4 * records[0].provenance["settings"]["parameters"]
    assert of["int4", GRADWIRE, Metric.SENT_PER_STEP].p50 < 0.15 * gradient_bytes
    assert of["bf16", GRADWIRE, Metric.SENT_PER_STEP].p50 == gradient_bytes / 2
    assert ("powersgd-r4", PYTORCH, Metric.SENT_PER_STEP) not in of
