"""The demo for real, with the smallest settings, and its report from made-up results."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import gradwire
from gradwire.bench import report
from gradwire.bench.hooks import HOOKS
from gradwire.bench.results import Results, Run, Settings, load_results, replacing, save_results

# Seconds; it ends what hangs, and nothing else takes that long, on a busy machine either.
HANG_LIMIT = 600
DEMO = [sys.executable, "-m", "gradwire.bench", "demo"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    command = [*DEMO, "--epochs", "2", "--hooks", "none,fp16,powersgd-r4-bf16", "--seed", "3", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


def test_demo_sends_half_the_bytes_in_fp16(demo):
    results = json.loads((demo[0] / "results.json").read_text())
    none, fp16, _ = results["runs"]
    assert none["bytes_per_step"] == 4 * results["parameters"]
    assert 2 * fp16["bytes_per_step"] == none["bytes_per_step"]
    for run in (none, fp16):
        steps = 2 * (results["train_images"] // results["batch_size"])
        assert run["sent_bytes"] == [run["bytes_per_step"] * (step + 1) for step in range(steps)]


def test_demo_sends_whole_gradients_and_then_factors(demo):
    """Of the matrices that twice their factors are smaller than: o x (i 9) for a convolution of i to o channels.

    Every factor starts at a multiple of 16 elements of its message.
    """
    results = json.loads((demo[0] / "results.json").read_text())
    powersgd = results["runs"][2]
    matrices = [(64, 32 * 9), (128, 64 * 9), (512, 512), (10, 512)]
    rest = results["parameters"] - sum(n * m for n, m in matrices)
    factors = sum(math.ceil(4 * side / 16) * 16 for shape in matrices for side in shape)  # of rank 4
    compressed = 4 * rest + 2 * factors  # the rest in fp32, factors in bf16
    sizes = [after - before for before, after in itertools.pairwise([0, *powersgd["sent_bytes"]])]
    assert sizes == [4 * results["parameters"]] * 10 + [compressed] * (len(sizes) - 10)
    assert compressed < 0.03 * 4 * results["parameters"]


def test_demo_trains_alike_with_both_hooks(demo):
    none, fp16, powersgd = load_results(demo[0] / "results.json").runs
    assert (none.hook, fp16.hook, powersgd.hook) == ("none", "fp16", "powersgd-r4-bf16")
    for run in (none, fp16, powersgd):
        assert len(run.losses) == len(run.sent_bytes)
        assert all(map(math.isfinite, run.losses))
        assert run.final_loss < 0.5 * run.losses[0]
        assert 0.5 < run.test_accuracy <= 1
        assert 0 < run.step_ms["p20"] <= run.step_ms["p50"] <= run.step_ms["p80"]
    assert fp16.losses[0] == none.losses[0]  # no gradient was sent yet: same weights, same data
    assert fp16.losses != none.losses
    assert abs(fp16.final_loss - none.final_loss) < 0.1
    assert powersgd.losses[:11] == none.losses[:11]  # the first ten gradients are sent whole
    assert powersgd.losses[11] != none.losses[11]


def test_demo_says_where_its_numbers_come_from(demo):
    results = load_results(demo[0] / "results.json")
    facts = results.provenance
    assert facts["gradwire"] == gradwire.__version__
    assert {"date", "commit", "torch", "python", "cpu", "gpu", "backend"} <= facts.keys()
    assert facts["threads_per_process"] == int(os.environ.get("OMP_NUM_THREADS", 1))
    assert results.settings.command.startswith("gradwire demo --epochs 2 --hooks none,fp16,powersgd-r4-bf16 --seed 3")


def test_demo_leaves_a_plot_and_no_other_files(demo):
    output, stdout = demo
    assert sorted(path.name for path in output.iterdir()) == ["loss_vs_bytes.png", "results.json"]
    assert_is_png(output / "loss_vs_bytes.png")
    assert str(output / "loss_vs_bytes.png") in stdout


def test_demo_prints_progress_and_a_table(demo):
    lines = demo[1].splitlines()
    for hook in ("none", "fp16", "powersgd-r4-bf16"):
        assert sum(line.strip().startswith(hook) for line in lines) == 2, demo[1]
    assert "0.50x" in demo[1]
    assert "does not show what a network would" in demo[1]


def assert_is_png(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in data[-12:]
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (1200, 750)
    assert len(data) > 20_000


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_stopping_the_demo_leaves_no_process_and_no_file(tmp_path, stop):
    mark = f"GRADWIRE_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    environment = os.environ | {name: value, "TMPDIR": str(tmp_path)}
    command = [*DEMO, "--epochs", "1000", "--hooks", "fp16", "--output", str(tmp_path / "out")]
    demo = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background has it ignored
    )
    try:
        wait_until(lambda: len(marked(mark)) >= 4)  # launcher, torchrun, two ranks
        demo.send_signal(stop)
        assert demo.wait(HANG_LIMIT) == (-signal.SIGKILL if stop == signal.SIGKILL else 128 + stop)
        wait_until(lambda: not marked(mark))
    finally:
        demo.kill()
        output, _ = demo.communicate(timeout=HANG_LIMIT)
    assert b"Traceback" not in output
    assert list((tmp_path / "out").iterdir()) == []
    if stop != signal.SIGKILL:
        assert list(tmp_path.glob("gradwire-*")) == []


def wait_until(condition) -> None:
    deadline = time.monotonic() + HANG_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def marked(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in variables:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def made_up(facts):
    """Results of a demo that was not run."""

    def results_of(*hooks: str, backend: str = "gloo") -> Results:
        runs = [
            Run(
                hook=hook,
                description="",
                final_loss=0.125,
                test_accuracy=0.75,
                bytes_per_step=4e6 / 2**index,
                step_ms={"p20": 9.0, "p50": 10.0 + index, "p80": 12.0},
                losses=[1.0, 0.5, 0.25, 0.125],
                sent_bytes=[int(4e6 / 2**index * (step + 1)) for step in range(4)],
            )
            for index, hook in enumerate(hooks)
        ]
        return Results(
            provenance=facts | {"backend": backend},
            settings=Settings(hooks=hooks, processes=2, epochs=1, seed=0, command="gradwire demo"),
            train_images=3,
            test_images=4,
            parameters=1_000_000,
            batch_size=2,
            plain_steps=10,
            runs=runs,
        )

    return results_of


@pytest.fixture
def table_of(printed, made_up):
    """The table of a demo that was not run."""
    return lambda *hooks, **settings: printed(report.results_table(made_up(*hooks, **settings)))


def row_of(text: str, hook: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [hook])


def test_table_compares_with_the_run_without_a_hook(table_of):
    text = table_of("fp16", "none")
    expected = ["fp16", "0.1250", "75.0", "%", "4", "MB", "2.00x", "10.0", "(9-12)", "0.91x"]
    assert row_of(text, "fp16") == expected
    assert row_of(text, "none")[-1] == "1.00x"


def test_table_without_a_baseline_has_no_ratios(table_of):
    row = row_of(table_of("fp16"), "fp16")
    assert row.count("-") == 2


def test_table_of_every_hook_fits_into_80_columns(table_of):
    text = table_of(*HOOKS)
    for hook in HOOKS:
        assert row_of(text, hook)[-1].endswith("x")


def test_footnote_tells_of_the_first_steps_of_powersgd_only(table_of):
    assert "PowerSGD sends the first 10 whole" in table_of("none", "powersgd-r4")
    assert "PowerSGD" not in table_of("none", "fp16")


def test_footnote_names_the_link(table_of):
    assert "the link is memory:" in table_of("none")
    assert "NVLink" in table_of("none", backend="nccl")


def test_plot_of_one_short_training(tmp_path, made_up):
    report.save_plot(made_up("fp16"), tmp_path / "plot.png")
    assert_is_png(tmp_path / "plot.png")


def test_results_survive_saving_and_loading(tmp_path, made_up):
    results = made_up("none", "fp16")
    save_results(results, tmp_path / "results.json")
    assert load_results(tmp_path / "results.json") == results
    assert load_results(tmp_path / "results.json") != replace(results, parameters=1)


def test_settings_survive_the_way_to_a_worker(made_up):
    settings = made_up("none", "fp16").settings
    assert Settings.of(json.loads(json.dumps(asdict(settings)))) == settings


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (721364, "721 kB"),
        (999_600, "1 MB"),
        (1442728, "1.44 MB"),
        (2.5e9, "2.5 GB"),
    ],
)
def test_bytes_are_readable(count, text):
    assert report.format_bytes(count) == text


def test_running_mean():
    assert report.running_mean([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]
