"""`gradwire bench converge`: its sums, its table and plot, and a race for real."""

import json

import pytest
import torch
import torch.distributed as dist
from matplotlib.image import imread
from typer.testing import CliRunner

from gradwire.bench import namespaces, pages, plots
from gradwire.bench.commands import app
from gradwire.bench.contenders import GRADWIRE, PYTORCH
from gradwire.bench.converge import DEFAULT_HOOKS, RACED, Racer, race_table, summarize
from gradwire.bench.tasks import TASKS, Digits, Text


def race(hook, provider, seconds, reached=1, seed=0):
    times = [seconds / 2, seconds, 2 * seconds]
    return {
        "seed": seed,
        "hook": hook,
        "provider": provider,
        "steps": [5, 10, 15],
        "seconds": times,
        "sent_bytes": [1e6 * time for time in times],
        "scores": [90.0, 98.0, 98.5],
        "reached": reached,
    }


RACES = [
    *(race("none", PYTORCH, seconds, seed=seed) for seed, seconds in enumerate((10.0, 30.0, 12.0))),
    *(race("fp16", PYTORCH, 6.0, reached, seed=seed) for seed, reached in enumerate((0, None, 1))),
    *(race("powersgd-r4", GRADWIRE, seconds, seed=seed) for seed, seconds in enumerate((1.0, 3.0, 2.0))),
]
MEASURED = {
    "task": "a task",
    "parameters": 1234,
    "score": "images that are right (%)",
    "target": 97.5,
    "rises": True,
    "rate": "100mbit",
    "hosts": 2,
    "plain_steps": 10,
    "races": RACES,
}


def test_medians_are_over_seeds_and_one_that_missed_the_target_has_none():
    none, fp16, powersgd = summarize(RACES)
    assert (none["steps"], none["seconds"], none["sent_bytes"], none["times_faster"]) == (10, 12.0, 12e6, 1.0)
    assert (powersgd["seconds"], powersgd["times_faster"], powersgd["reached"]) == (2.0, 6.0, "3 of 3")
    assert (fp16["reached"], fp16["seconds"], fp16["step_ms"]) == ("2 of 3", None, None)
    assert (powersgd["step_ms"], fp16["times_faster"]) == (200.0, None), "from the first look on"


def test_sent_bytes_of_a_race_are_the_sum_over_its_steps_and_both_barriers(world_of_one, monkeypatch):
    """Whatever the interface sends between steps is not counted."""
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
    racer = Racer.make(task, "none", GRADWIRE, seed=0, counts_bytes=True)
    for step, batch in zip(range(4), task.batches(0), strict=False):
        racer.step(batch)
        sent.append(1_000_000)
        if step in (1, 3):
            racer.look()
    found = racer.race(seed=0)
    assert (found.steps, found.sent_bytes) == ([2, 4], [2040, 4080])


def test_the_table_fits_80_columns_and_says_what_the_numbers_mean(facts, printed):
    text = printed(race_table(MEASURED, facts))
    assert max(map(len, text.splitlines())) <= 80
    for phrase in (
        "link: 100mbit",
        "right (%) >= 97.5",
        "6.00x",
        "2 of 3",
        "medians over the seeds",
        "first 10 steps whole",
    ):
        assert phrase in " ".join(text.split())


def test_the_page_and_the_plot_are_made_of_the_same(tmp_path, facts):
    results = {"measurements": MEASURED, "provenance": facts}
    assert "| powersgd-r4 | gradwire | 3 of 3 | 10 | 2.00 (1.00 to 3.00) | 200 | 2 MB | 6.00 |" in pages.converge_table(
        results
    )
    plots.draw_converge(results, tmp_path / "plot.png")
    height, width, _ = imread(tmp_path / "plot.png").shape
    assert height > 500 and width > 1000


def test_hooks_with_and_without_feedback_are_raced_on_both_sides():
    assert set(DEFAULT_HOOKS) <= set(RACED)
    for hook in DEFAULT_HOOKS:
        assert RACED[hook].peer is not None


def test_a_race_over_loopback_reaches_the_target(tmp_path):
    path = tmp_path / "converge.json"
    options = [
        "--task",
        "digits",
        "--loopback",
        "--seeds",
        "1",
        "--hooks",
        "none,powersgd-r4-no-feedback",
        "--output",
        str(path),
    ]
    done = CliRunner().invoke(app, ["bench", "converge", *options])
    assert done.exit_code == 0, done.output
    races = json.loads(path.read_text())["measurements"]["races"]
    assert [(one["hook"], one["provider"]) for one in races] == [
        (hook, provider) for hook in ("none", "powersgd-r4-no-feedback") for provider in (PYTORCH, GRADWIRE)
    ]
    theirs, ours = races[:2]
    assert ours["reached"] is not None and theirs["reached"] is not None
    assert ours["scores"][ours["reached"]] >= TASKS["digits"].target
    assert len(ours["steps"]) == len(ours["seconds"]) == ours["reached"] + 1, "a racer stops at the target"
    # Without a hook the gradients are the same to the bit, and so is everything that they make.
    assert ours["scores"] == theirs["scores"]
    assert ours["sent_bytes"] == []


@pytest.mark.parametrize(
    "option",
    [
        ["--hooks", "noop"],
        ["--rate", "fast"],
        ["--rate", "1gbit,2gbit"],
        ["--task", "chess"],
        ["--task", "text,digits"],
    ],
)
def test_unknown_hooks_rates_and_tasks_are_refused(option):
    done = CliRunner().invoke(app, ["bench", "converge", *option])
    assert done.exit_code == 2


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_learned(name, one_rank):
    """In a few steps its score is nearer to the target than at first."""
    torch.manual_seed(0)
    task = TASKS[name]()
    model = task.make_model()
    optimizer = task.make_optimizer(model)
    scores = [score(task, model)]
    for _, batch in zip(range(20), task.batches(0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    scores.append(score(task, model))
    assert not task.is_reached(scores[0])
    assert abs(scores[1] - task.target) < 0.5 * abs(scores[0] - task.target)


def score(task, model):
    with torch.no_grad():
        model.eval()
        found = task.score_of(model)
        model.train()
    return found


def test_the_text_is_cut_into_bytes_and_those_that_follow(one_rank):
    task = Text()
    inputs, labels = next(task.batches(0))
    assert inputs.shape == labels.shape == (task.batch, task.length)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert inputs.min() >= 0


def test_a_bytes_prediction_knows_only_what_comes_before_it(one_rank):
    task = Text()
    model = task.make_model().eval()
    inputs, _ = next(task.batches(0))
    changed = inputs.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_ranks_and_seeds_have_batches_of_their_own(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    task = Text()
    seen = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        seen += [next(task.batches(seed))[0] for seed in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
