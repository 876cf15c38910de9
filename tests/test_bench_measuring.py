"""What the benches share: percentiles, the load that others make, provenance, and workers that end together."""

import itertools
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from gradwire.bench import measuring, results
from gradwire.bench.launch import LaunchError, Place, launch_at, loopback_interface
from gradwire.bench.measuring import Neighbours, in_turn, percentiles_ms
from gradwire.bench.results import provenance, save_measurements


def test_percentiles_are_milliseconds():
    assert percentiles_ms([step / 1e3 for step in range(11)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
    assert percentiles_ms([0.5]) == {"p20": 500.0, "p50": 500.0, "p80": 500.0}


def test_contenders_take_turns_in_every_order():
    orders = [in_turn("abcd", turn) for turn in range(60)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert {pair for order in orders for pair in itertools.pairwise(order)} == set(itertools.permutations("abcd", 2))
    assert orders[7] == in_turn("abcd", 7), "as on the other ranks"


def test_neighbours_are_what_is_busy_and_not_this_process(monkeypatch):
    # 4 seconds, in which all took 5 seconds of processors, and this process 2.
    readings = iter([(100.0, 10.0, 3.0), (104.0, 15.0, 5.0)])
    monkeypatch.setattr(Neighbours, "_read", staticmethod(lambda: next(readings)))
    assert Neighbours().busy_cpus() == 0.75


def test_neighbours_are_unknown_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "Path", lambda *_: tmp_path / "none")
    assert Neighbours().busy_cpus() is None


def test_readings_are_seconds_of_all_processes_and_of_this_one_with_its_children(monkeypatch, tmp_path):
    stat = tmp_path / "stat"  # columns: user, nice, system, idle, iowait, irq, softirq, steal, and both of guests
    stat.write_text("cpu  1000 200 300 40000 500 600 700 80 9000 90\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(measuring, "Path", lambda *_: stat)
    monkeypatch.setattr(measuring.os, "sysconf", {"SC_CLK_TCK": 100}.get)
    monkeypatch.setattr(measuring.os, "times", lambda: (1.5, 0.25, 4.0, 0.5, 99.0))
    _, total, own = Neighbours._read()
    assert (total, own) == (15.8, 6.25)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="reads /proc")  # noqa: PTH110 - one word
def test_what_this_process_does_is_no_neighbour():
    """Its time is counted on both sides, in one unit: all processes take about what this one takes, or more."""
    before, end = Neighbours._read(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    elapsed, total, own = (b - a for a, b in zip(before, Neighbours._read(), strict=True))
    assert own > 0.2, "the counters have steps of hundredths"
    assert own < 2 * total, "more neighbours only make the total larger"
    assert elapsed > 0


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_of_a_process_is_bytes(monkeypatch, system, unit):
    monkeypatch.setattr(measuring.sys, "platform", system)
    monkeypatch.setattr(measuring.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=50_000))
    assert measuring.peak_memory(torch.device("cpu")) == 50_000 * unit


def test_provenance_says_where_and_when_and_with_what():
    facts = provenance(torch.device("cpu"), "gloo", 3)
    assert facts["threads_per_process"] == 3
    assert facts["backend"] == "gloo"
    assert facts["gpu"] is None
    assert facts["load_average_before"] >= 0
    assert all(facts[key] for key in ("date", "gradwire", "torch", "python", "system", "cpu", "cpu_count"))
    json.dumps(facts)


def test_measurements_are_saved_with_their_provenance_whole_or_not_at_all(tmp_path):
    path = tmp_path / "numbers.json"
    save_measurements({"a": 1}, {"cpu": "x"}, path)
    assert json.loads(path.read_text()) == {"provenance": {"cpu": "x"}, "measurements": {"a": 1}}
    with pytest.raises(TypeError):
        save_measurements({"a": object()}, {}, path)
    assert json.loads(path.read_text())["measurements"] == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    assert results._commit() is None


PLACES = [Place((), loopback_interface() or "lo")] * 2


def run_python(code):
    """``code`` in each of two ranks; `timeit` because its arguments are statements."""
    launch_at("timeit", ["-n1", "-r1", f"import os, sys, time\n{code}"], PLACES, "127.0.0.1", 1234)


def test_each_rank_gets_its_environment(tmp_path):
    names = "('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME', 'OMP_NUM_THREADS')"
    run_python(f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str([os.environ[k] for k in {names}]))")
    for rank in "01":
        written = (tmp_path / rank).read_text()
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        assert written == str([rank, "2", "127.0.0.1", "1234", PLACES[0].interface, threads])


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """Rank 0 waits for ever on what `exit_with_launcher` watches: its standard input."""
    path = tmp_path / "ended"
    code = (
        f"if os.environ['RANK'] == '1': sys.exit('rank 1 has failed')\nos.read(0, 1); open({str(path)!r}, 'w').close()"
    )
    with pytest.raises(LaunchError, match="exit code 1") as error:
        run_python(code)
    assert "rank 1 has failed" in error.value.log
    assert path.exists()
