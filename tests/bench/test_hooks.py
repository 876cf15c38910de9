"""`gradwire bench hooks`: its arithmetic on made-up times, its tables, and a round with a small model."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.bench import implementations
from gradwire.bench.hooks import measure_round, summarize
from gradwire.bench.implementations import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.record import Metric
from gradwire.bench.tables import find
from gradwire.bench.timing import DriverCalls, driver_calls
from gradwire.planner.hook_registry import HOOKS

CPU = torch.device("cpu")
SIDES = (GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH)


def timed(hook, name, ms, one_bucket=False):
    seconds = [ms / 1e3] * 3
    return SimpleNamespace(
        hook=hook, name=name, one_bucket=one_bucket, seconds=seconds, host_seconds=seconds, calls=None
    )


def made_up_round(hook):
    """noop takes 10 ms on gradwire's DDP, 20 on PyTorch's, 30 there in one bucket; the hook 40, 50 and 120."""
    one_bucket = HOOKS[hook].pytorch.one_bucket
    references = {
        (GRADWIRE, False): timed("noop", GRADWIRE, 10.0),
        (PYTORCH, False): timed("noop", PYTORCH, 20.0),
        (PYTORCH, True): timed("noop", PYTORCH, 30.0, one_bucket=True),
    }
    runs = [
        timed(hook, GRADWIRE, 40.0),
        timed(hook, GRADWIRE_ON_PYTORCH, 50.0),
        timed(hook, PYTORCH, 120.0, one_bucket),
    ]
    return summarize(2, runs, references)


def own_costs(records):
    return [find(records, Metric.OWN_MS, name).p50 for name in SIDES]


def test_own_cost_is_beyond_noop_on_same_ddp_with_same_buckets():
    records = made_up_round("powersgd-r4")
    assert own_costs(records) == [30, 30, 90]
    assert [find(records, Metric.STEP_MS, name)["one_bucket"] for name in SIDES] == [False, False, True]
    assert find(records, Metric.NOOP_STEP_MS, PYTORCH).p50 == 30
    assert own_costs(made_up_round("fp16")) == [30, 30, 100]


@pytest.fixture
def small_model(monkeypatch, world_of_one):
    for name, value in {"LAYERS": 2, "NARROW": 64, "WIDE": 128}.items():
        monkeypatch.setattr(implementations, name, value)


def test_round_measures_every_side_of_every_hook(small_model):
    records = [record for hook in ("noop", "powersgd-r1") for record in measure_round(hook, 2, CPU)]
    steps = [record for record in records if record.metric == Metric.STEP_MS]
    assert [(step["hook"], step.implementation, step["one_bucket"]) for step in steps] == [
        (hook, name, hook != "noop" and name == PYTORCH) for hook in ("noop", "powersgd-r1") for name in SIDES
    ]
    assert {record.ranks for record in records} == {1}
    for step in steps:
        side = [r for r in records if (r["hook"], r.implementation) == (step["hook"], step.implementation)]
        assert 0 < step.p20 <= step.p50 <= step.p80
        assert find(side, Metric.HOST_MS).p50 > 0
        assert find(side, Metric.LAUNCHES) is find(side, Metric.SYNCHRONIZATIONS) is None
        assert find(side, Metric.OWN_MS).p50 == pytest.approx(step.p50 - find(side, Metric.NOOP_STEP_MS).p50, abs=1e-3)


def test_driver_calls_are_counted_by_name():
    names = ["aten::add", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync"]
    names += ["cudaStreamSynchronize", "cudaDeviceSynchronize", "void kernel()"]
    assert DriverCalls.among(names) == DriverCalls(launches=4, synchronizations=2)
    assert driver_calls(lambda: pytest.fail("a CPU has no driver"), CPU) is None
