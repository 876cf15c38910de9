"""`gradwire bench reducer`: its arithmetic on made-up times, its models, its tables, and a run for real."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gradwire.bench import reducer
from gradwire.bench.commands import app
from gradwire.bench.models import MODELS
from gradwire.bench.reducer import NO_REDUCER, PROVIDERS, reducer_tables, summarize

MADE_UP_MS = dict(zip(PROVIDERS, (10.0, 20.0, 15.0, 18.0, 12.0, 30.0, 15.0), strict=True))


def made_up():
    model = nn.Linear(3, 2)
    cases = [SimpleNamespace(provider=provider, model=model) for provider in PROVIDERS]
    return summarize("mlp", cases, [[MADE_UP_MS[provider] / 1e3] * 3 for provider in PROVIDERS])


def test_ratios_are_to_pytorch_with_the_same_hook_and_costs_beyond_no_reducer(world_of_one):
    rows = {row.provider: row for row in made_up()}
    assert (rows["gradwire"].vs_pytorch, rows["gradwire"].us_a_parameter) == (0.75, 2500)
    assert rows["gradwire, noop_hook"].vs_pytorch == 0.667
    assert rows["gradwire, fp16_compress_hook"].vs_pytorch == 0.5
    assert rows["PyTorch"].vs_pytorch is None and rows[NO_REDUCER].us_a_parameter == 0
    assert {(row.parameters, row.elements, row.ranks) for row in rows.values()} == {(2, 8, 1)}


def test_tables_fit_80_columns_and_say_what_the_numbers_mean(world_of_one, facts, printed):
    memory = {provider: 1e9 + 1e6 * ms for provider, ms in MADE_UP_MS.items()}
    rows = [reducer.asdict(row) for row in made_up()]
    text = printed(*reducer_tables({"steps": 3, "backwards": rows, "peak_memory": memory}, facts))
    assert "Backward, mlp: 2 parameters, 8e-06 M elements; ranks: 1" in text
    assert "beyond no reducer" in text and "5 MB" in text
    for phrase in ("us a parameter: median beyond", "vs PyTorch: in units of", "median (20th-80th percentile) of 3"):
        assert text.count(phrase) == 1
    assert max(map(len, text.splitlines())) <= 80
    without_memory = reducer_tables({"steps": 3, "backwards": rows, "peak_memory": {}}, facts)
    assert "us a parameter: median beyond" in printed(*without_memory)


@pytest.mark.parametrize(
    ("name", "parameters", "millions"), [("tiny-layers", 200, 0.0), ("transformer", 200, 3.2), ("mlp", 10, 50.0)]
)
def test_models_have_the_size_that_they_are_there_for(name, parameters, millions):
    with torch.device("meta"):
        tensors = list(MODELS[name].build().parameters())
    assert len(tensors) == parameters
    assert round(sum(tensor.numel() for tensor in tensors) / 1e6, 1) == millions


def test_the_densenet_has_six_parameters_a_layer():
    model = MODELS["densenet"].build()
    assert 600 <= len(list(model.parameters())) <= 620
    assert model(torch.randn(MODELS["densenet"].input_shape)).shape == (4, 10)


def test_wrong_gradients_are_refused_before_anything_is_timed(world_of_one, monkeypatch):
    def doubles(_, bucket):
        future = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    wrap, _ = PROVIDERS["gradwire, fp16_compress_hook"]
    monkeypatch.setitem(PROVIDERS, "gradwire, fp16_compress_hook", (wrap, doubles))
    with pytest.raises(RuntimeError, match=r"gradwire, fp16_compress_hook: .* nothing is timed"):
        reducer._time("tiny-layers", 2, torch.device("cpu"))


def test_a_run_with_two_ranks_writes_what_it_prints(tmp_path):
    path = tmp_path / "reducer.json"
    options = ["--models", "tiny-layers", "--ranks", "2", "--steps", "2", "--output", str(path)]
    done = CliRunner().invoke(app, ["bench", "reducer", *options])
    assert done.exit_code == 0, done.output
    measured = json.loads(path.read_text())["measurements"]
    assert [row["provider"] for row in measured["backwards"]] == list(PROVIDERS)
    assert {row["ranks"] for row in measured["backwards"]} == {2}
    assert measured["peak_memory"] == {}
    assert "tiny-layers: 200 parameters" in done.output


@pytest.mark.parametrize("option", [["--models", "resnet"], ["--ranks", "0"], ["--ranks", "two"]])
def test_unknown_models_and_ranks_are_refused(option):
    done = CliRunner().invoke(app, ["bench", "reducer", *option])
    assert done.exit_code == 2
    assert "unknown" in done.output and option[0] in done.output
