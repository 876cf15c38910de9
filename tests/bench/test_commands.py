"""Short runs of the benchmark commands: each prints its tables and writes its results with their provenance."""

import shutil

import pytest
from typer.testing import CliRunner

from gradwire.bench import host_double, telemetry
from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.kernel_cases import COMPARED
from gradwire.bench.kernels import COPY
from gradwire.bench.record import Metric, load
from gradwire.bench.reducer import REDUCERS
from gradwire.bench.shapes import SHAPES
from gradwire.bench.tables import find
from gradwire.cli.app import app
from gradwire.kernels import WIRE_FORMATS
from tools import recorded_gradients, rounding, validate


def check_kernels(records):
    assert {record.implementation for record in records} > {GRADWIRE, "foreach copy", "linalg.qr", COPY}
    assert len({record["kernel"] for record in records if record.metric == Metric.TIME_MS}) == len(COMPARED)


def check_reducer(records):
    assert [(record["hook"], record.implementation) for record in records] == list(REDUCERS)
    assert {(record.ranks, record.metric) for record in records} == {(2, Metric.BACKWARD_MS)}, "memory is the mlp's"


def check_host(records):
    found = {(r.implementation, r.metric): r.p50 for r in records}
    assert found[GRADWIRE, Metric.LAUNCHES_PER_BUCKET] == found[GRADWIRE_ON_PYTORCH, Metric.LAUNCHES_PER_BUCKET] == 2
    assert found[GRADWIRE, Metric.DRIVER_CALLS] >= 2 and found[PYTORCH, Metric.DRIVER_CALLS] == 0
    for metric in (Metric.BUCKET_US, Metric.DIRECT_US, Metric.CALLS):
        assert found[GRADWIRE, metric] > 0 and found[PYTORCH, metric] > 0


def check_telemetry(records):
    assert {record["hook"] for record in records} == set(telemetry.HOOKS)


def check_network(records):
    steps = {(r["rate"], r["hook"], r.implementation): r.p50 for r in records if r.metric == Metric.STEP_MS}
    assert set(steps) == {("loopback", hook, by) for hook in ("noop", "fp16") for by in (PYTORCH, GRADWIRE)}
    assert all(milliseconds > 0 for milliseconds in steps.values())
    assert find(records, Metric.SENT_PER_STEP) is None


def check_rounding(records):
    assert {r["wire"] for r in records if r.metric == rounding.RELATIVE_ERROR} <= set(WIRE_FORMATS)


@pytest.mark.parametrize(
    ("command", "options", "printed", "check"),
    [
        ("bench kernels", "--models gpt2-124m --sizes 1 --rounds 2", "gpt2-124m, 1 MiB", check_kernels),
        pytest.param(
            *("bench host", "--hooks fp16 --steps 3", "Host time, no GPU", check_host),
            marks=pytest.mark.skipif(not host_double.compilers(), reason="needs a C compiler"),
        ),
        pytest.param(
            *(
                "bench reducer",
                "--models tiny-layers --ranks 2 --steps 2",
                "tiny-layers: 200 of 0.027 M",
                check_reducer,
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("bench telemetry", "--ranks 1 --steps 1", "overhead: extra time of a measured step", check_telemetry),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("bench network", "--steps 2 --hooks fp16 --loopback", "this machine's loopback", check_network),
            marks=pytest.mark.slow,
        ),
        pytest.param(*("rounding", "", "Relative error of the mean gradient", check_rounding), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) and not value.startswith("-") else "",
)
def test_command_writes_the_results_it_prints(tmp_path, monkeypatch, command, options, printed, check):
    monkeypatch.setitem(SHAPES, "gpt2-124m", lambda: iter([(300, 200), (200,)] * 4))
    for name, value in {"NUMEL": 1 << 12, "SEEDS": 2, "STEPS": 2, "WORLD_SIZES": (2, 4)}.items():
        monkeypatch.setattr(rounding, name, value)
    monkeypatch.setattr(recorded_gradients, "STEPS", (1, 2))
    monkeypatch.setattr(recorded_gradients, "TRAININGS", [("digits", "sgd"), ("text", "muon")])
    path = tmp_path / "results.jsonl"
    arguments = [*command.split(), *options.split(), "--output", str(path)]
    done = CliRunner().invoke(app if command.startswith("bench") else validate.app, arguments)
    assert done.exit_code == 0, done.output
    assert printed in " ".join(done.output.split())
    records = load(path)
    assert records[0].provenance["threads_per_process"] == 1
    check(records)


def test_host_bench_without_a_compiler_names_the_remedy(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "host"])
    assert done.exit_code == 1 and "no C compiler. Install gcc or clang, or set CC" in done.output
