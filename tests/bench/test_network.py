"""`gradwire bench network`: its arithmetic and tables on made-up times, and short runs of the command."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.bench import emulated, namespaces, network
from gradwire.bench.emulated import LATENCY, wire_seconds
from gradwire.bench.implementations import GRADWIRE, LAYERS, NARROW, PYTORCH, WIDE
from gradwire.bench.namespaces import NamespaceError, Rate
from gradwire.bench.network import summarize
from gradwire.bench.record import Metric, load
from gradwire.bench.timing import Timing
from gradwire.cli.app import app
from gradwire.comm import GroupTransport
from gradwire.kernels import WIRE_FORMATS
from gradwire.planner.hook_registry import HOOKS
from tests.support import rehearsal
from tests.support.rehearsal import gpu_on_cpu

KEPT = Path(__file__).parents[2] / "bench" / "results" / "network.jsonl"


def made_up(sent_bytes):
    """noop takes 20 ms on PyTorch's DDP, 40 in one bucket, 10 on gradwire's; PyTorch's hooks 160, gradwire's 30."""
    runs = [("noop", PYTORCH, 20, False), ("noop", PYTORCH, 40, True), ("noop", GRADWIRE, 10, False)]
    for hook in ("powersgd-r4", "fp16"):
        runs += [(hook, PYTORCH, 160, HOOKS[hook].pytorch.one_bucket), (hook, GRADWIRE, 30, False)]
    return summarize(
        "1gbit",
        2,
        [
            SimpleNamespace(
                hook=hook,
                name=name,
                seconds=[ms / 1e3, 9.0 * ms, ms / 1e3],
                one_bucket=one_bucket,
                link_bytes=sent_bytes,
            )
            for hook, name, ms, one_bucket in runs
        ],
    )


def values(records, metric):
    return [record.p50 for record in records if record.metric == metric]


def test_exposed_time_is_beyond_noop_on_same_ddp_with_same_buckets():
    records = made_up([1000, 1002, 9000])
    assert values(records, Metric.STEP_MS) == [20, 40, 10, 160, 30, 160, 30]
    assert values(records, Metric.EXPOSED_MS) == [0, 0, 0, 120, 20, 140, 20]
    assert set(values(records, Metric.SENT_PER_STEP)) == {1002}
    assert values(made_up([]), Metric.SENT_PER_STEP) == []


@pytest.mark.parametrize(("hosts", "mbit"), [(2, 1000.0), (4, 1500.0)])
def test_link_rate_counts_the_bytes_of_each_ring_rank(world_of_one, monkeypatch, hosts, mbit):
    """8 MB take 64 ms, the median; of n ranks each sends 2 (n - 1) / n of them."""
    clock = iter([0.0, 0.05, 1.0, 1.064, 2.0, 2.9])
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert network._probe(hosts) == pytest.approx(mbit)


def test_emulated_message_takes_latency_and_transmission_time():
    assert wire_seconds(0, Rate.parse("10gbit"), 2) == LATENCY
    assert wire_seconds(125_000_000, Rate.parse("1gbit"), 2) == pytest.approx(1 + LATENCY)
    assert wire_seconds(125_000_000, Rate.parse("10gbit"), 8) == pytest.approx(0.175 + LATENCY)
    assert wire_seconds(125_000_000, Rate.parse("unlimited"), 8) == 0


def test_emulated_link_delays_both_shots_and_leaves_them_exact(monkeypatch, world_of_one):
    rate, spins = Rate.parse("1gbit"), []
    monkeypatch.setattr(emulated, "timed", lambda *_: Timing(0.1))  # a calibration of 1e8 cycles
    monkeypatch.setattr(rehearsal._Device, "spin", lambda _, cycles: spins.append(cycles))
    transport, sent = GroupTransport(dist.group.WORLD), torch.arange(96, dtype=torch.uint8).view(2, 1, 48)
    received, gathered = torch.zeros_like(sent), torch.zeros_like(sent)
    with gpu_on_cpu(), emulated.emulated_link(rate, 4, torch.device("cpu")):
        transport.run(transport.all_to_all(received, sent))
        transport.run(transport.all_gather(gathered, received[:, 0]))
    assert torch.equal(gathered, sent)
    assert spins == [int(1e9 * wire_seconds(24, rate, 4))] * 4, "one for each piece of each shot"


def in_process(*arguments):
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["bench", "network", *arguments])


@pytest.mark.parametrize("obstacle", ["pyroute2 is not installed", None])
def test_impossible_namespaces_are_reported_with_loopback_as_remedy(monkeypatch, obstacle):
    def refuse(*_):
        raise NamespaceError("Operation not permitted")

    monkeypatch.setattr(namespaces, "obstacle", lambda: obstacle)
    monkeypatch.setattr(namespaces, "hosts", refuse)
    before = signal.getsignal(signal.SIGTERM)
    done = in_process()
    assert signal.getsignal(signal.SIGTERM) == before
    assert done.exit_code == 1
    assert (obstacle or "Operation not permitted") in done.stderr
    assert "--loopback" in done.stderr


def payload(hook):
    """Bytes that each of two ranks sends in a step of the model: 2 (n - 1) / n times its elements, which is 1."""
    return NARROW * WIDE * LAYERS * WIRE_FORMATS[hook].block_bytes(64) // 64


def test_kept_bytes_at_the_interface_follow_the_formula():
    kept = [r for r in load(KEPT) if r.metric == Metric.SENT_PER_STEP and r.implementation == GRADWIRE]
    sent = {(r["rate"], r["hook"]): r.p50 for r in kept}
    for rate in ("1gbit", "unlimited"):
        for hook in ("fp16", "bf16", "int8", "int4", "int2"):
            assert payload(hook) <= sent[rate, hook] < 1.03 * payload(hook), (rate, hook)
