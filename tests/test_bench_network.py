"""`gradwire bench network`: its arithmetic and tables on made-up times, and short runs for real."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.bench import contenders, namespaces, network
from gradwire.bench.commands import app
from gradwire.bench.contenders import GRADWIRE, MODEL, PYTORCH
from gradwire.bench.emulated import LATENCY, wire_seconds
from gradwire.bench.hooks import HOOKS
from gradwire.bench.namespaces import NamespaceError, Rate
from gradwire.bench.network import DEFAULT_HOOKS, LOOPBACK, step_tables, summarize

# Seconds; it ends what hangs, and nothing else takes that long, on a busy machine either.
HANG_LIMIT = 600
OBSTACLE = namespaces.obstacle()
BENCH = [sys.executable, "-m", "gradwire.bench", "bench", "network"]


def timed(hook, provider, one_bucket=False, sent=1000):
    return SimpleNamespace(hook=hook, provider=provider, one_bucket=one_bucket, link_bytes=[sent, sent + 2, 9 * sent])


def made_up(rate="1gbit", hooks=("powersgd-r4",), sent=1000, is_loopback=False):
    """noop takes 20 ms on PyTorch's DDP, 40 in one bucket, 10 on gradwire's; PyTorch's hooks 160, gradwire's 30."""
    runs = [timed("noop", PYTORCH), timed("noop", PYTORCH, one_bucket=True), timed("noop", GRADWIRE)]
    ms = [20, 40, 10]
    for hook in hooks:
        runs += [timed(hook, PYTORCH, HOOKS[hook].peer.one_bucket, sent), timed(hook, GRADWIRE, sent=sent)]
        ms += [160, 30]
    return summarize(rate, runs, [[value / 1e3] * 3 for value in ms], is_loopback)


def test_steps_are_compared_with_noop_on_the_same_ddp_with_the_same_buckets_and_with_pytorch():
    steps = made_up(hooks=("powersgd-r4", "fp16"))
    assert [step.vs_noop for step in steps] == [1, 1, 1, 4, 3, 8, 3]
    assert [step.exposed_ms for step in steps] == [0, 0, 0, 120, 20, 140, 20]
    assert [step.vs_pytorch for step in steps] == [None, None, 0.5, None, 0.188, None, 0.188]
    assert {step.link_bytes for step in steps} == {1002}


def test_bytes_are_unknown_on_loopback():
    assert {step.link_bytes for step in made_up(is_loopback=True)} == {None}


def test_link_bytes_are_what_the_interface_sent_in_a_step_and_both_barriers(world_of_one, monkeypatch):
    for name, value in {"LAYERS": 2, "NARROW": 32, "WIDE": 64}.items():
        monkeypatch.setattr(contenders, name, value)
    sent, limits = [0], []

    def step(contender, batch):
        sent.append({"noop": 0, "fp16": 1000}[contender.hook])
        return 1e-3

    made = network.make_contenders(["fp16"], torch.device("cpu"))
    monkeypatch.setattr(contenders.Contender, "step", step)
    monkeypatch.setattr(contenders.Contender, "check", lambda *_: None)
    monkeypatch.setattr(dist, "barrier", lambda: sent.append(10))
    monkeypatch.setattr(network, "_probe", lambda *_: sent.append(100_000) or 9.0)
    monkeypatch.setattr(namespaces, "sent_bytes", lambda: sum(sent))
    monkeypatch.setattr(namespaces, "limit", limits.append)
    rates = [Rate.parse("1gbit"), Rate.parse("unlimited")]
    steps, reached = network.time_steps(made, rates, steps=3, hosts=2, is_emulated=False)
    assert limits == rates and reached == {"1gbit": 9.0, "unlimited": 9.0}
    sizes = (("noop", 20), ("noop", 20), ("fp16", 1020), ("fp16", 1020))
    found = [(step.rate, step.hook, step.link_bytes) for step in steps]
    assert found == [(rate.name, *size) for rate in rates for size in sizes]


@pytest.mark.parametrize(("hosts", "mbit"), [(2, 1000.0), (4, 1500.0)])
def test_reached_rate_is_what_each_rank_of_a_ring_sends(world_of_one, monkeypatch, hosts, mbit):
    """8 MB take 64 ms, the median; of n ranks each sends 2 (n - 1) / n of them."""
    clock = iter([0.0, 0.05, 1.0, 1.064, 2.0, 2.9])
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert network._probe(hosts, torch.device("cpu")) == pytest.approx(mbit)


def measured(rates, hooks, is_loopback=False, is_emulated=False):
    return {
        "model": MODEL,
        "emulated": is_emulated,
        "hosts": 2,
        "steps": 15,
        "reached_mbit": {rate: 1234.5 for rate in rates},
        "measured": [vars(step) for rate in rates for step in made_up(rate, hooks, 123_456_789, is_loopback)],
    }


def test_the_tables_of_all_hooks_fit_into_80_columns(facts, printed):
    text = printed(*step_tables(measured(["100mbit", "1gbit"], [hook for hook in HOOKS if hook != "noop"]), facts))
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    for hook in HOOKS:
        assert rows.count([hook]) == 2, hook
    assert ["gradwire", "30", "(30-30)", "20", "0.19x", "123", "MB"] in rows
    assert "2 hosts, link: 1gbit (a plain all-reduce reaches 1,234 Mb/s)" in text
    assert text.count("in turns") == 1  # what the numbers mean is said once


def test_the_table_of_loopback_names_no_bytes(facts, printed):
    text = printed(*step_tables(measured([LOOPBACK.name], ["fp16"], is_loopback=True), facts))
    assert "2 hosts, this machine's loopback" in text
    assert ["gradwire", "30", "(30-30)", "20", "0.19x", "-"] in [line.split() for line in text.splitlines()]


def test_the_default_hooks_begin_with_the_reference():
    assert DEFAULT_HOOKS[0] == "noop"
    assert set(DEFAULT_HOOKS) <= set(HOOKS)


def test_the_table_of_a_modelled_link_says_so(facts, printed):
    text = printed(*step_tables(measured(["25gbit"], ["fp16"], is_loopback=True, is_emulated=True), facts))
    assert "2 hosts, a model of a link: 25gbit" in text
    assert "one rank stands for 2" in " ".join(text.split())


def test_a_modelled_message_takes_latency_and_its_bytes():
    assert wire_seconds(0, Rate.parse("10gbit"), 2) == LATENCY
    assert wire_seconds(125_000_000, Rate.parse("1gbit"), 2) == pytest.approx(1 + LATENCY)
    assert wire_seconds(125_000_000, Rate.parse("10gbit"), 8) == pytest.approx(0.175 + LATENCY)
    assert wire_seconds(125_000_000, Rate.parse("unlimited"), 8) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_modelled_link_without_a_gpu_is_refused():
    done = in_process("--emulated")
    assert done.exit_code == 2
    assert "there is no GPU" in " ".join(done.stderr.split())


def in_process(*arguments):
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["bench", "network", *arguments])


def test_without_root_or_iproute2_it_says_so_and_offers_loopback(monkeypatch):
    monkeypatch.setattr(namespaces, "obstacle", lambda: "tc not found; install iproute2")
    done = in_process()
    assert done.exit_code == 1
    assert "tc not found; install iproute2" in done.stderr
    assert "--loopback" in done.stderr


def test_a_system_that_refuses_namespaces_is_reported_likewise(monkeypatch):
    def refuse(*_):
        raise NamespaceError("ip netns add x: Operation not permitted")

    monkeypatch.setattr(namespaces, "obstacle", lambda: None)
    monkeypatch.setattr(namespaces, "_command", refuse)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = in_process()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1
    assert "Operation not permitted" in done.stderr
    assert "--loopback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--rates", "1gb"], "--rates"),
        (["--hooks", "fp17"], "--hooks"),
        (["--hosts", "1"], "--hosts"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments, option):
    done = in_process(*arguments)
    assert done.exit_code == 2
    assert option in done.stderr


def run_for_real(path, *arguments):
    command = [*BENCH, "--steps", "2", "--hooks", "fp16", "--output", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    steps = {(s["rate"], s["hook"], s["provider"]): s for s in document["measurements"]["measured"]}
    assert all(step["step_ms"]["p50"] > 0 for step in steps.values())
    return document, steps


def test_a_run_over_loopback(tmp_path):
    document, steps = run_for_real(tmp_path / "network.json", "--loopback")
    assert set(steps) == {("loopback", hook, by) for hook in ("noop", "fp16") for by in (PYTORCH, GRADWIRE)}
    assert document["provenance"]["threads_per_process"] == 1
    assert document["provenance"]["command"].startswith("gradwire bench network --steps 2 --hooks fp16")
    assert all(step["link_bytes"] is None for step in steps.values())


@pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces: {OBSTACLE}")
@pytest.mark.slow
def test_a_run_over_a_link_of_two_rates(tmp_path):
    document, steps = run_for_real(tmp_path / "network.json", "--rates", "200mbit,unlimited")
    reached = document["measurements"]["reached_mbit"]
    assert 0 < reached["200mbit"] < 210
    payload = 2 * 12 * 512 * 2048
    for rate in ("200mbit", "unlimited"):
        for provider in (PYTORCH, GRADWIRE):
            assert steps[rate, "noop", provider]["link_bytes"] < 10_000
            # Of two ranks each sends the payload once; headers are at most a tenth of it.
            assert payload <= steps[rate, "fp16", provider]["link_bytes"] < 1.1 * payload


def marked(mark):
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


def wait_until(condition):
    deadline = time.monotonic() + HANG_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


@pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces: {OBSTACLE}")
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_stopping_it_leaves_no_process_no_namespace_and_no_file(tmp_path, stop):
    mark = f"GRADWIRE_TEST={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    environment = os.environ | {name: value, "TMPDIR": str(tmp_path)}
    command = [*BENCH, "--steps", "100000", "--hooks", "noop", "--output", str(tmp_path / "out.json")]
    bench = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background has it ignored
    )

    def own_namespaces():
        return [name for name in namespaces.existing() if name.startswith(f"gradwire-{bench.pid}-")]

    try:
        wait_until(lambda: len(marked(mark)) >= 3)  # the command and two ranks
        assert len(own_namespaces()) == 3
        bench.send_signal(stop)
        assert bench.wait(HANG_LIMIT) == (-signal.SIGKILL if stop == signal.SIGKILL else 128 + stop)
        wait_until(lambda: not marked(mark))
    finally:
        bench.kill()
        output, _ = bench.communicate(timeout=HANG_LIMIT)
    if stop == signal.SIGKILL:
        namespaces.delete_abandoned()  # as the next run does
    else:
        assert list(tmp_path.iterdir()) == []
    assert own_namespaces() == []
    assert b"Traceback" not in output
