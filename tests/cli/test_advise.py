"""The command on two ranks, as torchrun starts them, and alone; and what it refuses."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from gradwire.bench.launch import HERE, LaunchError, launch
from gradwire.cli import advise
from gradwire.cli.app import app

TRAINING = """
import torch
import typer
from torch import nn

def job(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    inputs = torch.randn(4, 64, device=device)
    return model, lambda model: model(inputs).square().mean()

def trained(device):
    model, loss = job(device)
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e9)

def frozen(device):
    return nn.Linear(2, 2).requires_grad_(False), lambda model: model(torch.ones(1, 2)).sum()

def fails_on_rank_1(device):
    width = 3 if torch.distributed.get_rank() == 1 else 2
    return nn.Linear(2, 2), lambda model: model(torch.ones(1, width)).sum()
"""


NETWORK = ["tiny-layers", "--bandwidth", "1gbit", "--world-size", "4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*arguments, status=2):
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["advise", *arguments])
    assert done.exit_code == status
    return " ".join(done.output.replace("│", " ").split())


def test_two_ranks_measure_the_network_and_advise(folder):
    options = ["--hooks", "int4,powersgd-r1", "--threads", "2", "--json", "a.json"]
    launch("gradwire.cli", ["advise", "my_training:job", *options], [HERE] * 2)
    content = json.loads((folder / "a.json").read_text())
    link = content["measurement"]["link"]
    assert content["measurement"]["is_link_measured"]
    assert content["measurement"]["threads"] == 2
    assert link["world_size"] == 2
    assert {"all-reduce float32", "all-reduce bfloat16", "all-to-all", "all-gather"} <= link["costs"].keys()
    samples = content["measurement"]["samples"]
    assert samples.keys() == link["costs"].keys()
    for kind, cost in link["costs"].items():
        sizes = [sample["nbytes"] for sample in samples[kind]]
        assert len(sizes) >= 2 and sizes == sorted(set(sizes))
        assert cost["latency"] == samples[kind][0]["seconds"] > 0
    predictions = {each["hook"]: each for each in content["predictions"]}
    assert predictions.keys() == {"none", "bf16", "int4", "powersgd-r1"}
    numel = 64 * 256 + 256 + 256 * 8 + 8
    assert predictions["none"]["payload_bytes"] == 4 * numel
    assert predictions["bf16"]["payload_bytes"] == 2 * numel
    assert predictions["int4"]["payload_bytes"] < numel
    assert predictions["int4"]["memory_bytes"] > 4 * numel  # the error memory
    assert all(each["step_seconds"] > 0 for each in predictions.values())


@pytest.mark.parametrize(
    ("job", "ranks", "message"),
    [
        pytest.param("frozen", 2, "No parameter of the model requires a gradient", marks=pytest.mark.slow),
        ("fails_on_rank_1", 2, "loss(model) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("job", 1, "The world size is 1"),
    ],
)
def test_job_that_cannot_be_measured_is_refused_on_every_rank(folder, job, ranks, message):
    with pytest.raises(LaunchError) as failure:
        launch("gradwire.cli", ["advise", f"my_training:{job}"], [HERE] * ranks)
    assert message in failure.value.log
    if job == "fails_on_rank_1":  # with its traceback
        assert "my_training.py" in failure.value.log or "On rank 1: " in failure.value.log
    else:
        assert "Traceback" not in failure.value.log


def test_single_process_predicts_for_a_given_network(folder):
    network = "--bandwidth 100mbit --world-size 8 --ranks-per-node 4 --latency 1000"
    arguments = f"advise my_training:trained --hooks int4 {network} --price 20000 --plot plot.png --json a.json".split()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "gradwire.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "with 1 CPU thread\n" in done.stdout
    assert "8 ranks on 2 nodes, 100 Mb/s per node given" in done.stdout
    content = json.loads((folder / "a.json").read_text())
    costs = content["measurement"]["link"]["costs"]
    assert content["measurement"]["model"]["optimizer"] > 0
    assert content["measurement"]["link"]["world_size"] == 8
    has_spare_cores = len(os.sched_getaffinity(0)) >= 4 * 2 if hasattr(os, "sched_getaffinity") else os.cpu_count() >= 8
    assert content["measurement"]["model"]["overlap"] == ("everything" if has_spare_cores else "nothing")
    assert costs["all-reduce float32"]["latency"] >= 2e-3
    assert costs["all-reduce float32"]["per_byte"] == pytest.approx(1.4e-7)
    for shot in ("all-to-all", "all-gather"):  # of a shard on each of the 4 ranks of a node
        assert costs[f"{shot} between nodes"]["per_byte"] == pytest.approx(4 * 8e-8)
        assert costs[f"{shot} in a node"] == {"latency": pytest.approx(1e-3, abs=1e-3), "per_byte": 0}
    sent = {each["hook"]: each["network_bytes"] for each in content["predictions"]}
    numel = 64 * 256 + 256 + 256 * 8 + 8
    assert sent["none"] == 2 * 2 * (1 - 1 / 8) * 4 * numel  # two nodes, each of which a ring of 8 ranks leaves once
    assert sent["bf16"] == sent["none"] / 2
    assert 0.52 < sent["int4"] / (2 * 2 * (1 - 1 / 2) * numel) < 0.65  # 4.25 bits, biases in 16, headers
    assert "5,234.88" in done.stdout  # 20,000 per GB, 1,000 steps without a hook
    assert (folder / "plot.png").exists()


@pytest.mark.parametrize(
    ("environment", "arguments", "threads"),
    [
        ({}, [], []),
        ({}, ["--ranks-per-node", "2"], [1]),
        ({"LOCAL_WORLD_SIZE": "2"}, [], []),
        ({"OMP_NUM_THREADS": "3"}, ["--ranks-per-node", "2"], []),
        ({"OMP_NUM_THREADS": "3"}, ["--ranks-per-node", "2", "--threads", "4"], [4]),
    ],
    ids=str,
)
def test_single_process_uses_the_threads_torchrun_would_give(monkeypatch, environment, arguments, threads):
    """One thread if several ranks share a node and OMP_NUM_THREADS is not set; `--threads` overrides it."""
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(advise, "_measured", mock.Mock(side_effect=typer.Exit))
    done = CliRunner().invoke(app, ["advise", *NETWORK, *arguments])
    assert done.exit_code == 0, done.output
    assert given == threads


def test_excluded_hooks_are_not_measured(monkeypatch):
    measure = mock.Mock(side_effect=typer.Exit)
    monkeypatch.setattr(advise, "_measured", measure)
    hooks = ["--hooks", "int8,int4,sign", "--exclude", "sign, int8,fp8"]
    done = CliRunner().invoke(app, ["advise", *NETWORK, *hooks])
    assert done.exit_code == 0, done.output
    assert measure.call_args.args[1] == ("int4",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-layers"], "Invalid value for --bandwidth, --world-size: a single process measures no network"),
        (["tiny-layers"], "describe the network: add --bandwidth 100mbit --world-size 8."),
        (["tiny-layers", "--bandwidth", "100mbit"], "describe the network: add --world-size 8."),
        (["tiny-layers", "--world-size", "2"], "Invalid value for --bandwidth: a single process"),
        (["tiny-layers", "--bandwidth", "fast", "--world-size", "2"], "'fast' is not a rate"),
        (["tiny-layers", "--bandwidth", "unlimited", "--world-size", "2"], "expected a number"),
        (["tiny-layers", "--hooks", "int5"], "'int5'"),
        (["tiny-layers", "--exclude", "int5"], "Invalid value for --exclude: unknown: 'int5'"),
        (["tiny-layers", "--exclude", "bf16"], "Invalid value for --exclude: no hook and bf16 are always measured"),
        ([*NETWORK, "--plot", "none/a.png"], "Invalid value for --plot: there is no folder none"),
    ],
)
def test_incomplete_or_wrong_options_are_refused(arguments, message):
    assert message in refusal(*arguments)


@pytest.mark.parametrize(
    "option", [("--bandwidth", "100mbit"), ("--world-size", "8"), ("--latency", "50"), ("--ranks-per-node", "2")]
)
def test_given_network_under_torchrun_is_refused_by_rank_0(monkeypatch, option):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refusal("tiny-layers", *option)
    assert f"Invalid value for {option[0]}: under torchrun the network is measured. Leave {option[0]} out" in message
    monkeypatch.setenv("RANK", "1")
    assert refusal("tiny-layers", *option) == ""
