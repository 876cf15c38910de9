"""Hosts made of network namespaces: reachable, limited, and deleted afterwards, also after errors."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.bench import namespaces
from gradwire.bench.namespaces import NamespaceError, Rate

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
# The module by itself: it needs nothing else of gradwire, and importing PyTorch takes seconds.
ALONE = f"import sys; sys.path.insert(0, {str(Path(namespaces.__file__).parent)!r}); import namespaces; "
LIMIT = f"{ALONE}[namespaces.limit(namespaces.Rate.parse(name)) for name in sys.argv[1:]]"
COUNT = f"{ALONE}print(namespaces.sent_bytes())"


def python(host, code, *arguments):
    return [*host.prefix, sys.executable, "-c", code, *arguments]


def of_this_process() -> list[str]:
    return [name for name in namespaces.existing() if name.startswith(f"gradwire-{os.getpid()}-")]


@contextlib.contextmanager
def dead_process():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    yield process.pid


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("100mbit", 100), ("1gbit", 1000), ("2.5gbit", 2500), ("0.5mbit", 0.5), ("unlimited", None)],
)
def test_rate_is_parsed_as_megabits(text, mbit):
    assert Rate.parse(text) == (text, mbit)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1gb", "gbit", "0mbit", "0.0gbit", "-1gbit", "1gbit;reboot", "1 gbit", "infgbit", "0.01mbit", "9999gbit"],
)
def test_invalid_rate_is_refused(text):
    with pytest.raises(ValueError, match="100mbit or 1gbit, from 0"):
        Rate.parse(text)


@pytest.mark.parametrize(
    ("missing", "euid", "platform", "expected"),
    [
        ((), 0, "linux", None),
        (("ip", "tc"), 0, "linux", "ip and tc not found; install iproute2"),
        (("tc",), 0, "linux", "tc not found; install iproute2"),
        ((), 1000, "linux", "only root"),
        ((), 0, "darwin", "Linux"),
    ],
)
def test_obstacle_is_named(monkeypatch, missing, euid, platform, expected):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool in missing else f"/sbin/{tool}")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: euid)
    monkeypatch.setattr(namespaces.sys, "platform", platform)
    obstacle = namespaces.obstacle()
    assert obstacle is None if expected is None else expected in obstacle


def test_sent_bytes_are_those_the_interface_transmitted(monkeypatch, tmp_path):
    statistics = tmp_path / "eth0" / "statistics"
    statistics.mkdir(parents=True)
    for name, value in {"tx_bytes": 123_456, "rx_bytes": 7_000, "tx_packets": 99}.items():
        (statistics / name).write_text(f"{value}\n")
    monkeypatch.setattr(namespaces, "Path", lambda root, *parts: Path(tmp_path, *parts))
    assert namespaces.sent_bytes() == 123_456


def test_failed_command_is_named_with_its_reason():
    with pytest.raises(NamespaceError, match=r"^ls /no/such/file: .*No such file"):
        namespaces._command("ls", "/no/such/file")


@needs_namespaces
def test_hosts_reach_each_other_and_count_sent_bytes():
    with namespaces.hosts(3) as (first, _, third):
        server = subprocess.Popen(python(first, SERVE, first.address), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout.readline() == "ready\n"
            sent = python(third, SEND, first.address, "1000000")
            done = subprocess.run(sent, capture_output=True, text=True, timeout=240, check=True)
        finally:
            server.kill()
            server.communicate()
        assert done.stdout == "1000000\n"
        counted = int(
            subprocess.run(python(third, COUNT), capture_output=True, text=True, timeout=240, check=True).stdout
        )
        # Headers add at most 66 bytes to a segment of 1448; beside them there are acknowledgements and ARP.
        assert 1_000_000 < counted < 1_100_000
    assert of_this_process() == []


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
        subprocess.run(python(host, LIMIT, *rates), timeout=240, check=True)
        show = [*host.prefix, "tc", "-j", "qdisc", "show", "dev", namespaces.INTERFACE, "root"]
        queues = json.loads(subprocess.run(show, capture_output=True, text=True, timeout=240, check=True).stdout)
    limits = [queue["options"]["rate"] for queue in queues if queue["kind"] == "tbf"]
    assert limits == ([] if bytes_per_second is None else [bytes_per_second])


@needs_namespaces
def test_exception_leaves_no_namespace():
    with pytest.raises(KeyboardInterrupt), namespaces.hosts(2):
        assert len(of_this_process()) == 3  # two hosts and the bridge's
        raise KeyboardInterrupt
    assert of_this_process() == []


@needs_namespaces
@pytest.mark.parametrize("failing", range(15))
def test_failure_at_any_point_of_setup_leaves_no_namespace(monkeypatch, failing):
    calls = iter(range(1_000))
    command = namespaces._command

    def fails_once(*arguments):
        changes = not {"list", "delete"} & set(arguments)  # 3 for the bridge, 6 for each host
        if changes and next(calls) == failing:
            raise NamespaceError("refused")
        return command(*arguments)

    monkeypatch.setattr(namespaces, "_command", fails_once)
    with pytest.raises(NamespaceError, match="refused"), namespaces.hosts(2):
        pytest.fail("the hosts were made")
    assert of_this_process() == []


@needs_namespaces
def test_only_namespaces_of_ended_processes_are_deleted():
    with dead_process() as pid, namespaces.hosts(1):
        abandoned, foreign = f"gradwire-{pid}-0", f"gradwirex-{pid}-0"
        for name in (abandoned, foreign):
            namespaces._ip("netns", "add", name)
        try:
            kept = of_this_process()
            namespaces.delete_abandoned()
            names = [line.split()[0] for line in namespaces._ip("netns", "list").splitlines()]
            assert abandoned not in names
            assert foreign in names
            assert of_this_process() == kept != []
        finally:
            for name in (abandoned, foreign):
                with contextlib.suppress(NamespaceError):
                    namespaces._ip("netns", "delete", name)
