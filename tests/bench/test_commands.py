"""Short runs of the benchmark commands: each prints its tables and writes its results with their provenance."""

import shutil

import pytest
from typer.testing import CliRunner

from gradwire.bench import host_double, telemetry
from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.record import Metric, load
from gradwire.bench.reducer import REDUCERS
from gradwire.bench.shapes import SHAPES
from gradwire.cli.app import app
from tools import recorded_gradients, rounding, validate

# The command and its options, a part of its output, and what it measures: a key of the records, and its values.
COMMANDS = {
    "kernels": ("bench kernels --models gpt2-124m --sizes 1 --rounds 2", "gpt2-124m, 1 MiB", "kernel", None),
    "reducer": (
        "bench reducer --models tiny-layers --ranks 2 --steps 2",
        "tiny-layers: 200 of 0.027 M",
        *("hook", {hook for hook, _ in REDUCERS}),
    ),
    "telemetry": (
        "bench telemetry --ranks 1 --steps 1",
        "overhead: extra time of a measured step",
        *("hook", set(telemetry.OBSERVED_HOOKS)),
    ),
    "network": (
        "bench network --steps 2 --hooks fp16 --loopback",
        "2 hosts, link: loopback (all-reduce reaches",
        *("hook", {"noop", "fp16"}),
    ),
    "rounding": ("rounding", "Relative error of the mean gradient", "wire", None),
}


@pytest.mark.parametrize(
    "name", ["kernels", *(pytest.param(name, marks=pytest.mark.slow) for name in list(COMMANDS)[1:])]
)
def test_command_writes_the_results_it_prints(tmp_path, monkeypatch, name):
    command, printed, key, values = COMMANDS[name]
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    for option, value in {"NUMEL": 1 << 12, "SEEDS": 2, "STEPS": 2, "WORLD_SIZES": (2, 4)}.items():
        monkeypatch.setattr(rounding, option, value)
    monkeypatch.setattr(recorded_gradients, "STEPS", (1, 2))
    monkeypatch.setattr(recorded_gradients, "TRAININGS", [("digits", "sgd"), ("text", "muon")])
    path = tmp_path / "results.jsonl"
    arguments = [*command.split(), "--output", str(path)]
    done = CliRunner().invoke(app if command.startswith("bench") else validate.app, arguments)
    assert done.exit_code == 0, done.output
    assert printed in " ".join(done.output.split())
    records = load(path)
    assert records[0].provenance["threads_per_process"] == 1
    found = {record[key] for record in records if key in record.case}
    assert found == values if values is not None else len(found) > 3


# By hook: launches of a bucket on gradwire's DDP and on PyTorch's.
LAUNCHES = {"fp16": (2, 2), "scaled-fp16": (3, 3), "powersgd-r4-batched": (9, 7)}


@pytest.mark.skipif(not host_double.c_compilers(), reason="needs a C compiler")
@pytest.mark.parametrize(
    "hook", ["scaled-fp16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp16", "powersgd-r4-batched"))]
)
def test_host_bench_times_and_counts_a_bucket(tmp_path, hook):
    path = tmp_path / "results.jsonl"
    done = CliRunner().invoke(app, ["bench", "host", "--hooks", hook, "--steps", "3", "--output", str(path)])
    assert done.exit_code == 0 and "Host time, no GPU" in done.output, done.output
    found = {(record.implementation, record.metric): record.p50 for record in load(path)}
    assert tuple(found[ddp, Metric.LAUNCHES_PER_BUCKET] for ddp in (GRADWIRE, GRADWIRE_ON_PYTORCH)) == LAUNCHES[hook]
    assert found[GRADWIRE, Metric.DRIVER_CALLS] >= 2 and found[PYTORCH, Metric.DRIVER_CALLS] == 0
    for metric in (Metric.BUCKET_US, Metric.DIRECT_US, Metric.CALLS):
        assert found[GRADWIRE, metric] > 0 and found[PYTORCH, metric] > 0


def test_host_bench_without_a_compiler_names_the_remedy(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "host"])
    assert done.exit_code == 1 and "no C compiler. Install gcc or clang, or set CC" in done.output
