"""`gradwire bench reducer`: its arithmetic on made-up times, its models, its tables, and a run of the command."""

from types import SimpleNamespace

import torch
from torch import nn

from gradwire.bench.implementations import GRADWIRE, PYTORCH
from gradwire.bench.models import MODELS
from gradwire.bench.record import Measured, Metric, records_of
from gradwire.bench.reducer import NO_REDUCER, REDUCERS, summarize, tables

MADE_UP_MS = dict(zip(REDUCERS, (10.0, 20.0, 15.0, 18.0, 12.0, 30.0, 15.0), strict=True))


def made_up(facts, with_memory=False):
    model = nn.Linear(3, 2)
    cases = [SimpleNamespace(hook=hook, implementation=by, model=model) for hook, by in REDUCERS]
    records = summarize("mlp", cases, [[ms / 1e3] * 3 for ms in MADE_UP_MS.values()])
    for (hook, by), ms in MADE_UP_MS.items() if with_memory else ():
        records += records_of("reducer", {"model": "mlp", "hook": hook}, by, 1, {Metric.MEMORY: 1e9 + 1e6 * ms})
    return Measured({"steps": 3}, records).with_provenance(facts)


def test_table_compares_with_pytorch_with_same_hook_and_with_no_reducer(world_of_one, facts):
    (only,) = tables(made_up(facts))
    assert only.title == "Backward time (ms), 1 rank"
    assert only.headers[2:6] == [NO_REDUCER, PYTORCH, GRADWIRE, "speed-up"]
    assert only.rows == [
        ["mlp", "no hook", "10", "20", "15", "1.33x", "5,000", "2,500"],
        ["mlp", "noop", "", "18", "12", "1.50x", "4,000", "1,000"],
        ["mlp", "fp16", "", "30", "15", "2.00x", "10,000", "2,500"],
    ]
    records = made_up(facts)
    assert {(r["parameters"], r["elements"], r.ranks, r.metric) for r in records} == {(2, 8, 1, Metric.BACKWARD_MS)}


def test_memory_is_beyond_no_reducer(world_of_one, facts):
    memory = tables(made_up(facts, with_memory=True))[1]
    assert memory.rows == [["no hook", "10 MB", "5 MB"], ["noop", "8 MB", "2 MB"], ["fp16", "20 MB", "5 MB"]]


def test_models_have_their_numbers_of_parameters():
    sizes = {"tiny-layers": (200, 0.0), "transformer": (200, 3.2), "mlp": (10, 50.0)}
    for name, size in sizes.items():
        with torch.device("meta"):
            tensors = list(MODELS[name].build().parameters())
        assert (len(tensors), round(sum(tensor.numel() for tensor in tensors) / 1e6, 1)) == size
