"""The demo with the smallest settings, and its table and plot of made-up results."""

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench import demo as demo_bench
from gradwire.bench import namespaces, plots
from gradwire.bench.record import Metric, load
from gradwire.bench.tasks import Digits
from gradwire.cli import app
from tests.support.stopped import HANG_LIMIT, STOPS, stopped

DEMO = [sys.executable, "-m", "gradwire.cli", "demo", "--loopback"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    command = [*DEMO, "--epochs", "2", "--hooks", "none,fp16,powersgd-r4-bf16", "--seed", "3", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1,2"}  # OpenMP takes one number per level of nesting
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.fixture(scope="module")
def records(demo):
    return load(demo[0] / "results.jsonl")


@pytest.fixture(scope="module")
def settings(records):
    return records[0].provenance["settings"]


def runs_of(records, metric):
    """The records of a metric, in the order of the hooks."""
    return [record for record in records if record.metric == metric]


@pytest.mark.slow
def test_demo_sends_whole_gradients_and_then_factors(records, settings):
    """Factors of matrices with more than twice as many elements: o x (i 9) for a convolution of i to o channels.

    Every factor starts at a multiple of 16 elements of its message.
    """
    powersgd = runs_of(records, Metric.SENT_PER_STEP)[2]
    matrices = [(64, 32 * 9), (128, 64 * 9), (512, 512), (10, 512)]
    rest = settings["parameters"] - sum(n * m for n, m in matrices)
    factors = sum(math.ceil(4 * side / 16) * 16 for shape in matrices for side in shape)  # of rank 4
    compressed = 4 * rest + 2 * factors  # the rest in fp32, factors in bf16
    sizes = [after - before for before, after in itertools.pairwise([0, *powersgd.series])]
    assert sizes == [4 * settings["parameters"]] * 10 + [compressed] * (len(sizes) - 10)
    assert compressed < 0.03 * 4 * settings["parameters"]


@pytest.mark.slow
def test_demo_trains_alike_with_all_hooks(records):
    none, fp16, powersgd = losses = runs_of(records, Metric.TRAINING_LOSS)
    assert [run["hook"] for run in losses] == ["none", "fp16", "powersgd-r4-bf16"]
    for run, sent in zip(losses, runs_of(records, Metric.SENT_PER_STEP), strict=True):
        assert len(run.series) == len(sent.series)
        assert run.p50 == statistics.fmean(run.series[len(run.series) // 2 :]), "the mean of the last of two epochs"
        assert all(map(math.isfinite, run.series))
        assert run.p50 < 0.5 * run.series[0]
    assert all(50 < run.p50 <= 100 for run in runs_of(records, Metric.ACCURACY))
    assert all(0 < run.p20 <= run.p50 <= run.p80 for run in runs_of(records, Metric.STEP_MS))
    assert fp16.series[0] == none.series[0]  # no gradient was sent yet: same weights, same data
    assert fp16.series != none.series
    assert abs(fp16.p50 - none.p50) < 0.1
    assert powersgd.series[:11] == none.series[:11]  # the first ten gradients are sent whole
    assert powersgd.series[11] != none.series[11]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_every_batch_and_an_epoch_has_no_image_twice(ranks):
    images, epochs, size = 1000, 3, 64 // ranks * ranks
    task = Digits()
    task.train_images = task.train_labels = torch.arange(images)

    def batches_of(rank, seed=5):
        batches = itertools.islice(task.batches(seed, rank, ranks), epochs * (images // size))
        return torch.stack([labels for _, labels in batches])

    shares = [batches_of(rank) for rank in range(ranks)]
    whole = torch.cat(shares, 1)
    assert whole.shape == (epochs * (images // size), size)
    assert all(share.shape[1] == size // ranks for share in shares)
    for epoch in whole.chunk(epochs):
        assert len(epoch.unique()) == epoch.numel()
    first, second, _ = (epoch.flatten().tolist() for epoch in whole.chunk(epochs))
    assert first != second
    assert not torch.equal(batches_of(0, seed=6), shares[0])


@pytest.mark.slow
def test_demo_prints_progress_and_a_table_and_leaves_a_plot(demo):
    output, stdout = demo
    assert sorted(path.name for path in output.iterdir()) == ["loss_vs_bytes.png", "results.jsonl"]
    assert_is_png(output / "loss_vs_bytes.png")
    lines, text = stdout.splitlines(), " ".join(stdout.split())
    for hook in ("no hook", "fp16", "powersgd-r4-bf16"):  # in the progress, and in the table
        assert sum(line.strip().startswith(hook) for line in lines) == 2, stdout
    assert "0.50x" in text
    assert "over loopback (--loopback), where sending less saves no time" in text
    assert "As root on Linux, gradwire demo trains over a 100 Mb/s link" in text


def test_training_with_the_least_time_takes_the_next_step(world_of_one):
    assert demo_bench.next_turn([[3.0], [1.0, 1.0], [4.0]], 3, CPU) == 1
    assert demo_bench.next_turn([[3.0], [1.0, 1.0, 0.5], [4.0]], 3, CPU) == 0, "the second is done"
    assert demo_bench.next_turn([[], []], 3, CPU) == 0


def test_demo_without_root_explains_loopback_and_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces, "obstacle", lambda: "only root can make network namespaces")
    monkeypatch.setattr(app, "measured", lambda *_: [])
    monkeypatch.setattr(app, "report", lambda *_: None)
    monkeypatch.setattr(plots, "draw_demo", lambda *_: None)
    done = CliRunner().invoke(app.app, ["demo", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "over loopback (only root can make network namespaces)" in text
    assert "hooks that send less train faster" in text


def assert_is_png(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in data[-12:]
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (1200, 750)
    assert len(data) > 20_000


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("stop", STOPS)
def test_stopped_demo_leaves_no_process_and_no_file(tmp_path, stop):
    command = [*DEMO, "--epochs", "1000", "--hooks", "fp16", "--output", str(tmp_path / "out")]
    stopped(command, stop, tmp_path)
    assert list((tmp_path / "out").iterdir()) == []
    if stop != signal.SIGKILL:
        assert list(tmp_path.glob("gradwire-*")) == []
