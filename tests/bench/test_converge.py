"""`gradwire bench converge`: its medians, its tables and plot, its tasks, and a run of the command."""

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.bench import namespaces
from gradwire.bench.converge import Trial, compressed_step_ms, to_target
from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.record import Metric, Record, load, records_of
from gradwire.bench.tasks import TASKS, Digits
from gradwire.cli.app import app


def training(hook, implementation, seconds, is_reached=True, seed=0):
    """Evaluated after 5 and 10 steps, of which the first five are slower than the others."""
    curves = {
        Metric.STEPS: [5, 10],
        Metric.TARGET_S: [seconds * 0.75, seconds],
        Metric.SENT: [5e5 * seconds, 1e6 * seconds],
        Metric.ACCURACY: [90.0, 98.0 if is_reached else 97.0],
    }
    metrics = {metric: {"p50": curve[-1] if is_reached else None, "series": curve} for metric, curve in curves.items()}
    return records_of("converge", {"hook": hook, "seed": seed}, implementation, 2, metrics)


def trainings(*arguments, seconds):
    return [r for seed, duration in enumerate(seconds) for r in training(*arguments, duration, seed=seed)]


NONE = trainings("none", PYTORCH, seconds=(10.0, 30.0, 12.0))
FP16 = [r for seed in range(3) for r in training("fp16", PYTORCH, 6.0, is_reached=seed != 1, seed=seed)]
POWERSGD = trainings("powersgd-r4", GRADWIRE, seconds=(1.0, 3.0, 2.0))


def test_target_that_one_seed_missed_counts_as_missed():
    assert to_target(NONE, Metric.STEPS) == [10, 10, 10]
    assert to_target(NONE, Metric.TARGET_S) == [10.0, 30.0, 12.0]
    assert to_target(FP16, Metric.TARGET_S) is None


def test_step_time_is_from_first_evaluation_on():
    assert compressed_step_ms(POWERSGD) == 100.0
    assert compressed_step_ms(FP16) is None
    at_first_evaluation = [Record(**vars(r) | {"series": r.series[:1]}) for r in POWERSGD]
    assert compressed_step_ms(at_first_evaluation) is None


def test_sent_bytes_include_only_steps_and_both_barriers(world_of_one, monkeypatch):
    """Bytes that the interface sends between steps are not counted."""
    sent = [0]

    class Quick(Digits):
        def loss(self, model, batch):
            sent.append(1000)
            return super().loss(model, batch)

        def score_of(self, model):
            return 0.0

    monkeypatch.setattr(dist, "barrier", lambda: sent.append(10))
    monkeypatch.setattr(namespaces, "sent_bytes", lambda: sum(sent))
    task = Quick()
    trained = Trial(task, "sgd", "none", GRADWIRE, seed=0, counts_bytes=True)
    for step, batch in zip(range(4), task.batches(0, 0, 1), strict=False):
        trained.step(batch)
        sent.append(1_000_000)
        if step in (1, 3):
            trained.is_over()
    found = {record.metric: record.series for record in trained.records()}
    assert (found[Metric.STEPS], found[Metric.SENT]) == ([2, 4], [2040, 4080])


@pytest.mark.slow
def test_command_over_loopback_trains_to_target(tmp_path):
    path = tmp_path / "converge.jsonl"
    hooks = ("none", "powersgd-r4")
    options = ["--task", "digits", "--loopback", "--seeds", "1", "--hooks", ",".join(hooks), "--output", str(path)]
    done = CliRunner().invoke(app, ["bench", "converge", *options])
    assert done.exit_code == 0, done.output
    records = load(path)
    pairs = [(hook, by) for hook in hooks for by in (PYTORCH, GRADWIRE)]
    assert [(r["hook"], r.implementation) for r in records if r.metric == Metric.STEPS] == pairs
    of = {(r["hook"], r.implementation, r.metric): r for r in records}
    theirs, ours = (of["none", by, Metric.ACCURACY] for by in (PYTORCH, GRADWIRE))
    assert ours.p50 == ours.series[-1] >= TASKS["digits"].target
    assert max(ours.series[:-1]) < TASKS["digits"].target, "a training stops at the target"
    assert (
        len(ours.series)
        == len(of["none", GRADWIRE, Metric.TARGET_S].series)
        == len(of["none", GRADWIRE, Metric.STEPS].series)
    )
    # Without a hook the gradients are equal to the bit, and so are the scores.
    assert ours.series == theirs.series
    assert not any(metric == Metric.SENT for _, _, metric in of)
    assert {(r["task"], r["rate"]) for r in records} == {("digits", "loopback")}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, each, marks=[pytest.mark.slow] * (number > 0))
        for name in TASKS
        for number, each in enumerate(TASKS[name].optimizers)
    ],
)
def test_task_is_learned(name, optimizer):
    """A few steps halve the distance of its score to the target."""
    torch.manual_seed(0)
    task = TASKS[name]()
    model = task.make_model()
    optimizers = task.make_optimizers(model, optimizer)
    updated = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    assert {id(p) for p in updated} == {id(p) for p in model.parameters()}
    assert len(updated) == len(set(map(id, updated)))
    scores = [score(task, model)]
    for _, batch in zip(range(20), task.batches(0, 0, 1), strict=False):
        model.zero_grad()
        task.loss(model, batch).backward()
        for each in optimizers:
            each.step()
    scores.append(score(task, model))
    assert not task.is_reached(scores[0])
    assert abs(scores[1] - task.target) < 0.5 * abs(scores[0] - task.target)


def score(task, model):
    with torch.no_grad():
        model.eval()
        found = task.score_of(model)
        model.train()
    return found
