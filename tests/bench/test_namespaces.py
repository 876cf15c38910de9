"""Hosts made of network namespaces: reachable, limited, and deleted afterwards, also after errors."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer

from gradwire.bench import late_packets, namespaces
from gradwire.bench.gpu import timings
from gradwire.bench.namespaces import NamespaceError, Rate
from gradwire.cli.options import parse_rate

OBSTACLE = namespaces.obstacle()
needs_namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=f"no network namespaces: {OBSTACLE}")

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    with server.accept()[0] as peer:
        received = 0
        while data := peer.recv(65536):
            received += len(data)
        peer.sendall(str(received).encode())
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001), timeout=240) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    print(peer.recv(100).decode())
"""
TELL = "print(time.perf_counter() - began)"
# The module by itself: it needs nothing else of gradwire, and importing PyTorch takes seconds.
ALONE = f"import sys; sys.path.insert(0, {str(Path(namespaces.__file__).parent)!r}); import namespaces; "
LIMIT = f"{ALONE}[namespaces.limit(namespaces.Rate.parse(name)) for name in sys.argv[1:]]"
COUNT = f"{ALONE}print(namespaces.sent_bytes())"


def start(host, code, *arguments):
    """A Python program on the host."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, preexec_fn=host.enter, stdout=subprocess.PIPE, text=True)


def output_of(host, code, *arguments):
    with start(host, code, *arguments) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output


def namespaces_of_this_process() -> list[str]:
    return [name for name in namespaces.existing() if name.startswith(f"gradwire-{os.getpid()}-")]


def test_rate_is_parsed_as_megabits():
    texts = {"100mbit": 100, "1gbit": 1000, "2.5gbit": 2500, "0.5mbit": 0.5, "400gbit": 400_000, "unlimited": None}
    assert {text: Rate.parse(text) for text in texts} == {text: (text, mbit) for text, mbit in texts.items()}


@pytest.mark.parametrize(
    "text", ["", "1", "1gb", "gbit", "0mbit", "-1gbit", "1gbit;reboot", "1 gbit", "infgbit", "0.01mbit", "99999gbit"]
)
def test_invalid_rate_is_refused(text):
    with pytest.raises(ValueError, match="100mbit or 1gbit, from 0"):
        Rate.parse(text)


def test_rate_beyond_the_token_bucket_is_refused_for_interfaces_only():
    for rate in {"400gbit", *timings.RATES}:
        assert parse_rate(rate, "--bandwidth", is_modeled=True).name == rate
    with pytest.raises(typer.BadParameter, match=r"'400gbit' is not a rate; .* to 30gbit"):
        parse_rate("400gbit", "--rates")


PROC_NET_DEV = """\
Inter-|   Receive                                           |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  100       1    0    0    0     0          0         0   100       1    0    0    0     0       0          0
  eth0: 7000      20    0    0    0     0          0         0 123456      99    0    0    0     0       0          0
"""


def test_sent_bytes_equal_the_interface_counter(monkeypatch, tmp_path):
    (tmp_path / "dev").write_text(PROC_NET_DEV)
    monkeypatch.setattr(namespaces, "Path", lambda path: tmp_path / Path(path).name)
    assert namespaces.sent_bytes() == 123_456


@pytest.mark.parametrize("delay_ms", [0.0, 0.25, 40.0])
def test_any_delay_takes_the_place_of_the_bridge(monkeypatch, delay_ms):
    relay, joined = mock.MagicMock(), []
    relay.return_value.__enter__.return_value.stdout.readline.return_value = b"ready\n"
    monkeypatch.setattr(namespaces, "subprocess", mock.Mock(Popen=relay))
    monkeypatch.setattr(namespaces, "delete_abandoned", lambda: None)
    monkeypatch.setattr(namespaces, "_add", lambda name, stack: mock.MagicMock())
    monkeypatch.setattr(namespaces, "_join_by_bridge", lambda made, bridge: joined.append(len(made)))
    with namespaces.hosts(2, delay_ms):
        pass
    assert joined == ([2] if delay_ms == 0 else [])
    assert [float(call.args[0][2]) for call in relay.call_args_list] == ([] if delay_ms == 0 else [delay_ms])


@pytest.mark.parametrize("delay_ms", ["0.25", "40.0"])
def test_packets_are_late_by_the_milliseconds_of_the_command(monkeypatch, capsys, delay_ms):
    threads = mock.Mock()
    monkeypatch.setattr(late_packets.sys, "argv", ["late_packets.py", delay_ms, "eth0", "a=10.77.0.1", "b=10.77.0.2"])
    monkeypatch.setattr(late_packets.sys, "stdin", io.StringIO())
    monkeypatch.setattr(late_packets, "open_device", lambda namespace, name: f"{name} of {namespace}")
    monkeypatch.setattr(late_packets.threading, "Thread", threads)
    late_packets.main()
    sinks = {bytes([10, 77, 0, 1]): "eth0 of a", bytes([10, 77, 0, 2]): "eth0 of b"}
    expected = [(sink, sinks, pytest.approx(float(delay_ms) / 1e3)) for sink in sinks.values()]
    assert [call.kwargs["args"] for call in threads.call_args_list] == expected
    assert capsys.readouterr().out == "ready\n"


@needs_namespaces
def test_hosts_reach_each_other_and_count_sent_bytes():
    with namespaces.hosts(3) as (first, _, third):
        server = start(first, SERVE, first.address)
        try:
            assert server.stdout.readline() == "ready\n"
            assert output_of(third, SEND, first.address, "1000000") == "1000000\n"
        finally:
            server.kill()
            server.communicate()
        counted = int(output_of(third, COUNT))
        # Headers add at most 66 bytes to a segment of 1448; acknowledgements and ARP come on top.
        assert 1_000_000 < counted < 1_100_000
    assert namespaces_of_this_process() == []


@pytest.mark.slow
@needs_namespaces
def test_packets_arrive_after_the_delay():
    with namespaces.hosts(3, delay_ms=40) as (first, _, third):
        output_of(first, LIMIT, "1gbit")  # its bucket holds a packet of this network
        output_of(third, LIMIT, "1gbit")
        with start(first, SERVE, first.address) as server:
            assert server.stdout.readline() == "ready\n"
            received, seconds = output_of(
                third, f"import time; began = time.perf_counter()\n{SEND}{TELL}", first.address, "1000000"
            ).split()
        assert received == "1000000"
        # A handshake, and the last byte, whose number comes back: two round trips.
        assert float(seconds) >= 4 * 0.04
        assert 1_000_000 < int(output_of(third, COUNT)) < 1_010_000
    assert namespaces_of_this_process() == []


@needs_namespaces
@pytest.mark.parametrize(
    ("rates", "bytes_per_second"),
    [
        (["100mbit"], 12_500_000),
        (["100mbit", "1gbit"], 125_000_000),
        (["1gbit", "unlimited"], None),
        (["unlimited"], None),
    ],
)
def test_limit_replaces_the_previous_one(rates, bytes_per_second):
    with namespaces.hosts(1) as (host,):
        output_of(host, LIMIT, *rates)
        with namespaces.NetNS(host.name) as inside:
            queues = inside.get_qdiscs(index=namespaces._index(inside, namespaces.INTERFACE))
            options = [queue.get_attr("TCA_OPTIONS") for queue in queues if queue.get("kind") == "tbf"]
            limits = [each.get_attr("TCA_TBF_PARMS")["rate"] for each in options]
    assert limits == ([] if bytes_per_second is None else [bytes_per_second])


@needs_namespaces
def test_exception_leaves_no_namespace_and_runs_no_handler_in_children():
    """The handler once deleted the namespaces in one of three runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt), namespaces.hosts(2):
                assert len(namespaces_of_this_process()) == 3  # two hosts and the bridge's
                raise KeyboardInterrupt
            assert namespaces_of_this_process() == []
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_namespaces
@pytest.mark.parametrize("failing", range(7))
def test_failure_at_any_point_of_setup_leaves_no_namespace(monkeypatch, failing):
    calls = iter(range(1_000))

    def fails_once(step):
        def wrapped(*arguments):
            if next(calls) == failing:
                raise OSError("refused")
            return step(*arguments)

        return wrapped

    monkeypatch.setattr(namespaces.netns, "create", fails_once(namespaces.netns.create))  # the bridge's and two hosts'
    monkeypatch.setattr(namespaces, "_index", fails_once(namespaces._index))  # two for each host
    with pytest.raises(NamespaceError, match="refused"), namespaces.hosts(2):
        pytest.fail("the hosts were made")
    assert namespaces_of_this_process() == []


@needs_namespaces
def test_only_namespaces_of_ended_processes_are_deleted():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    pid = process.pid
    with namespaces.hosts(1):
        abandoned, foreign = f"gradwire-{pid}-0", f"gradwirex-{pid}-0"
        for name in (abandoned, foreign):
            namespaces.netns.create(name)
        try:
            kept = namespaces_of_this_process()
            namespaces.delete_abandoned()
            names = namespaces.netns.listnetns()
            assert abandoned not in names
            assert foreign in names
            assert namespaces_of_this_process() == kept != []
        finally:
            for name in (abandoned, foreign):
                with contextlib.suppress(FileNotFoundError):
                    namespaces.netns.remove(name)
