"""The command on two ranks, as torchrun starts them, and alone; and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from gradwire.bench.commands import app
from gradwire.bench.launch import HERE, LaunchError, launch

TRAINING = """
import torch
from torch import nn

def job(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    inputs = torch.randn(4, 64, device=device)
    return model, lambda model: model(inputs).square().mean()

def frozen(device):
    return nn.Linear(2, 2).requires_grad_(False), lambda model: model(torch.ones(1, 2)).sum()

def fails_on_rank_1(device):
    width = 3 if torch.distributed.get_rank() == 1 else 2
    return nn.Linear(2, 2), lambda model: model(torch.ones(1, width)).sum()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*arguments):
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["advise", *arguments])
    assert done.exit_code != 0
    return " ".join(done.output.replace("│", " ").split())


def test_two_ranks_measure_the_network_and_advise(folder):
    launch(
        "gradwire.bench", ["advise", "my_training:job", "--hooks", "int4,powersgd-r1", "--json", "a.json"], [HERE] * 2
    )
    content = json.loads((folder / "a.json").read_text())
    link = content["measurement"]["link"]
    assert content["measurement"]["is_link_measured"]
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
    assert predictions["int4"]["payload_bytes"] < 2 * numel
    assert predictions["int4"]["memory_bytes"] > 4 * numel  # the error memory
    assert all(each["step_seconds"] > 0 for each in predictions.values())


def test_model_without_gradients_is_refused_on_every_rank(folder):
    with pytest.raises(LaunchError) as failure:
        launch("gradwire.bench", ["advise", "my_training:frozen"], [HERE] * 2)
    assert "No parameter of the model requires a gradient" in failure.value.log
    assert "Traceback" not in failure.value.log


def test_loss_that_fails_on_one_rank_is_refused_on_every_rank_with_its_traceback(folder):
    with pytest.raises(LaunchError) as failure:
        launch("gradwire.bench", ["advise", "my_training:fails_on_rank_1"], [HERE] * 2)
    assert "loss(model) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in failure.value.log
    assert "my_training.py" in failure.value.log or "On rank 1: " in failure.value.log


def test_world_of_one_under_torchrun_is_refused(folder):
    with pytest.raises(LaunchError) as failure:
        launch("gradwire.bench", ["advise", "my_training:job"], [HERE])
    assert "The world size is 1" in failure.value.log
    assert "Traceback" not in failure.value.log


def test_single_process_predicts_for_a_given_network(folder):
    command = [sys.executable, "-m", "gradwire.bench", "advise", "my_training:job", "--hooks", "int4"]
    options = [
        "--bandwidth",
        "100mbit",
        "--world-size",
        "8",
        "--latency",
        "1000",
        "--plot",
        "plot.png",
        "--json",
        "a.json",
    ]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=120, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "100 Mb/s given" in done.stdout
    content = json.loads((folder / "a.json").read_text())
    costs = content["measurement"]["link"]["costs"]
    assert content["measurement"]["link"]["world_size"] == 8
    assert costs["all-reduce float32"]["latency"] >= 14e-3
    assert costs["all-reduce float32"]["per_byte"] == pytest.approx(8e-8 * 14 / 8)
    assert (folder / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-layers"], "a single process measures no network"),
        (["tiny-layers", "--bandwidth", "100mbit"], "a single process measures no network"),
        (["tiny-layers", "--bandwidth", "fast", "--world-size", "2"], "'fast' is not a rate"),
        (["tiny-layers", "--bandwidth", "unlimited", "--world-size", "2"], "expected a number"),
        (["tiny-layers", "--hooks", "int5"], "'int5'"),
    ],
)
def test_incomplete_or_wrong_options_are_refused(arguments, message):
    assert message in refusal(*arguments)


def test_given_network_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "under torchrun the network is measured" in refusal("tiny-layers", "--bandwidth", "100mbit")


def test_unknown_job_is_refused_with_the_contract(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("no_such_module:job", "--bandwidth", "100mbit", "--world-size", "2")
    assert "There is no module 'no_such_module'" in message
    assert not torch.distributed.is_initialized()
