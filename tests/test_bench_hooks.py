"""`gradwire bench hooks`: its arithmetic on made-up times, its table, and a round for real on a small model."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import gradwire
from gradwire.bench import contenders, hook_cost
from gradwire.bench.commands import app
from gradwire.bench.contenders import GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH
from gradwire.bench.hook_cost import DEFAULT_HOOKS, cost_tables, summarize
from gradwire.bench.hooks import HOOKS
from gradwire.bench.measuring import Calls, calls_of_driver

CPU = torch.device("cpu")


def timed(hook, provider, ms, one_bucket=False):
    seconds = [ms / 1e3] * 3
    return SimpleNamespace(
        hook=hook, provider=provider, one_bucket=one_bucket, seconds=seconds, host_seconds=seconds, calls=None
    )


def made_up_round(hook, ours=(40.0, 50.0), theirs=120.0):
    one_bucket = HOOKS[hook].peer.one_bucket
    references = {
        (GRADWIRE, False): timed("noop", GRADWIRE, 10.0),
        (PYTORCH, False): timed("noop", PYTORCH, 20.0),
        (PYTORCH, True): timed("noop", PYTORCH, 30.0, one_bucket=True),
    }
    runs = [
        timed(hook, GRADWIRE, ours[0]),
        timed(hook, GRADWIRE_ON_PYTORCH, ours[1]),
        timed(hook, PYTORCH, theirs, one_bucket),
    ]
    return summarize(2, runs, references)


def test_own_cost_is_beyond_noop_on_the_same_ddp_with_the_same_buckets():
    ours, mixed, theirs = made_up_round("powersgd-r4")
    assert (ours.own_ms, mixed.own_ms, theirs.own_ms) == (30, 30, 90)
    assert (ours.own_vs_pytorch, mixed.own_vs_pytorch, theirs.own_vs_pytorch) == (0.333, 0.333, None)
    assert (ours.step_vs_pytorch, mixed.step_vs_pytorch, theirs.step_vs_pytorch) == (0.333, 0.417, None)
    assert (ours.one_bucket, mixed.one_bucket, theirs.one_bucket) == (False, False, True)
    assert theirs.noop_ms["p50"] == 30
    ours, mixed, theirs = made_up_round("fp16")
    assert (ours.own_ms, mixed.own_ms, theirs.own_ms) == (30, 30, 100)


@pytest.mark.parametrize(("ours", "theirs"), [((40.0, 50.0), 15.0), ((9.0, 19.0), 120.0)])
def test_there_is_no_ratio_where_a_cost_is_not_positive(ours, theirs):
    assert [cost.own_vs_pytorch for cost in made_up_round("fp16", ours, theirs)] == [None, None, None]


def test_the_table_of_all_hooks_fits_into_80_columns(facts, printed):
    costs = [vars(cost) for hook in HOOKS for cost in made_up_round(hook, (1234.5, 1350.0), 2345.0)]
    peaks = {hook: {GRADWIRE: 10**9, GRADWIRE_ON_PYTORCH: 10**9, PYTORCH: 1_234_567_890} for hook in HOOKS}
    measured = {"model": contenders.MODEL, "steps": 30, "threads": 1, "costs": costs, "peak_memory": peaks}
    text = printed(*cost_tables(measured, facts))
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    for hook in HOOKS:
        assert [hook] in rows
    assert ["gradwire", "1234.5", "(1234-1234)", "0.53x", "1224.5", "0.53x"] in rows
    assert ["PyTorch's", "fp16_compress_hook", "2345.0", "-", "-", "235", "MB"] in rows
    assert "PyTorch's powerSGD_hook, one bucket" in text
    assert "PyTorch's powerSGD_hook *, one bucket" in text  # beside what PyTorch has not


@pytest.fixture
def small_model(monkeypatch, world_of_one):
    for name, value in {"LAYERS": 2, "NARROW": 64, "WIDE": 128}.items():
        monkeypatch.setattr(contenders, name, value)


def test_a_round_for_real(small_model):
    costs = [cost for hook in ("noop", "powersgd-r1") for cost in hook_cost._round(hook, 2, CPU)]
    assert [(cost.hook, cost.provider, cost.one_bucket) for cost in costs] == [
        ("noop", GRADWIRE, False),
        ("noop", GRADWIRE_ON_PYTORCH, False),
        ("noop", PYTORCH, False),
        ("powersgd-r1", GRADWIRE, False),
        ("powersgd-r1", GRADWIRE_ON_PYTORCH, False),
        ("powersgd-r1", PYTORCH, True),
    ]
    for cost in costs:
        assert cost.ranks == 1
        assert 0 < cost.step_ms["p20"] <= cost.step_ms["p50"] <= cost.step_ms["p80"]
        assert cost.host_ms > 0
        assert cost.launches is cost.synchronizations is None
        assert cost.own_ms == pytest.approx(cost.step_ms["p50"] - cost.noop_ms["p50"], abs=1e-3)


def test_nothing_is_timed_if_a_check_fails(small_model, monkeypatch):
    def fails(*_):
        raise RuntimeError("wrong; nothing is timed.")

    monkeypatch.setattr(contenders.Contender, "check", fails)
    monkeypatch.setattr(hook_cost, "track", None)  # of the timed steps
    with pytest.raises(RuntimeError, match="nothing is timed"):
        hook_cost._round("noop", 1, CPU)


def test_each_number_of_ranks_and_each_memory_is_measured_in_processes_of_its_own(small_model, monkeypatch):
    """The costs, of the ranks asked for; then the peak of every hook and provider, each by a single rank."""
    asked = []

    def measured_by(module, settings, ranks):
        asked.append((settings.get("weigh", settings.get("hooks")), ranks))
        return len(asked) if "weigh" in settings else [{"ranks": ranks}]

    monkeypatch.setattr(hook_cost, "measured_by", measured_by)
    measured = hook_cost.measure(["fp16"], ranks=[1, 2], steps=3, threads=1)
    places = [(hook, by) for hook in ("noop", "fp16") for by in (GRADWIRE, GRADWIRE_ON_PYTORCH, PYTORCH)]
    assert asked == [(["fp16"], 1), (["fp16"], 2), *(([hook, by], 1) for hook, by in places)]
    assert measured["costs"] == [{"ranks": 1}, {"ranks": 2}]
    assert [measured["peak_memory"][hook][by] for hook, by in places] == [3, 4, 5, 6, 7, 8]
    assert hook_cost._weigh("fp16", GRADWIRE, CPU) > 2**20


@pytest.mark.slow
def test_ranks_and_memory_are_measured_in_processes_of_their_own(tmp_path):
    """Two real rounds of two ranks, and the memory of two hooks: a process for each contender."""
    path = tmp_path / "hooks.json"
    arguments = ["bench", "hooks", "--steps", "1", "--ranks", "2", "--hooks", "fp16", "--output", str(path)]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "80"}).invoke(app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    facts, measured = document["provenance"], document["measurements"]
    assert {"date", "commit", "cpu", "system", "torch", "python", "command", "load_average_before"} <= facts.keys()
    assert facts["gradwire"] == gradwire.__version__
    assert facts["threads_per_process"] == measured["threads"] == 1
    assert "cpus_busy_with_others" in facts
    assert [cost["ranks"] for cost in measured["costs"]] == [2] * 3
    peaks = measured["peak_memory"]
    assert list(peaks) == ["noop", "fp16"]
    # PyTorch's DDP has fp32 buffers of 50 MB, and its hook copies of 25; gradwire's has 13 for each of two buckets.
    assert peaks["fp16"][PYTORCH] - peaks["fp16"][GRADWIRE] > 10e6


def test_calls_are_counted_by_name():
    names = ["aten::add", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync"]
    names += ["cudaStreamSynchronize", "cudaDeviceSynchronize", "void kernel()"]
    assert Calls.of(names) == Calls(launches=4, synchronizations=1)
    assert calls_of_driver(lambda: pytest.fail("a CPU has no driver"), CPU) is None


def test_the_default_hooks_have_no_duplicates():
    assert len(set(DEFAULT_HOOKS)) == len(DEFAULT_HOOKS)
    assert set(DEFAULT_HOOKS) <= set(HOOKS)
