"""Hosts with a slow network between them, on one machine: network namespaces on a bridge, and a rate limit on each.

Linux only; needs root and iproute2. Every host is a namespace with one interface, joined to a bridge that has a
namespace to itself, so that nothing outside of them changes. Deleting the namespaces deletes all of it. A run that was
killed leaves them behind; the next run deletes those.
"""

import ipaddress
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

INTERFACE = "eth0"
_NETWORK = ipaddress.ip_network("10.77.0.0/24")  # seen in the namespaces only
_PREFIX = "gradwire-"
_QUEUE_MS = 50
# What may pass at once after a pause, beyond the rate: as little as lets gloo reach eight to nine tenths of it. With
# half as much at a gigabit, gloo reaches half of that, because the system hands over 64 KiB at a time.
_BURST_MS = 1
_LEAST_BURST = 16_384
_RATES_MBIT = (0.1, 1_000_000)  # slower, and a step takes hours; faster, and there is no limit


class NamespaceError(Exception):
    """The system refuses to make hosts, or to limit them."""


class Host(NamedTuple):
    """A namespace with one interface, `INTERFACE`.

    Attributes:
        name: of the namespace.
        address: of the interface.
    """

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs a command there."""
        return ("ip", "netns", "exec", self.name)


class Rate(NamedTuple):
    """What an interface may send.

    Attributes:
        name: as given: 100mbit, 1gbit, 2.5gbit, unlimited.
        mbit: megabits a second; None for no limit.
    """

    name: str
    mbit: float | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """The rate of that name. Raises ValueError if it is none."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
        mbit = None if match is None else float(match[1]) * (1000 if match[2] == "gbit" else 1)
        least, most = _RATES_MBIT
        if text != "unlimited" and (mbit is None or not least <= mbit <= most):
            raise ValueError(
                f"{text!r} is not a rate; expected one like 100mbit or 1gbit, from {least}mbit to {most}mbit, "
                "or unlimited"
            )
        return cls(text, mbit)


def obstacle() -> str | None:
    """Why namespaces cannot be made here; None if nothing is known to be in the way."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """``count`` hosts on one bridge, which are deleted at the end, whatever happens.

    Raises:
        NamespaceError: the system refuses.
    """
    delete_abandoned()
    bridge = f"{_PREFIX}{os.getpid()}-bridge"
    addresses = map(str, _NETWORK.hosts())
    made = [Host(f"{_PREFIX}{os.getpid()}-{index}", next(addresses)) for index in range(count)]
    try:
        _add(bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for index, host in enumerate(made):
            _add(host.name)
            port = f"port{index}"
            _ip("link", "add", INTERFACE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/{_NETWORK.prefixlen}", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        with ExitStack() as stack:  # goes on after an error
            for name in (bridge, *(host.name for host in made)):
                stack.callback(_delete, name)


def delete_abandoned() -> None:
    """Delete the namespaces of runs that are no more."""
    for name in existing():
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            _delete(name)


def existing() -> list[str]:
    """The namespaces of all runs."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
    return [name for name in names if re.fullmatch(rf"{_PREFIX}\d+-\w+", name)]


def limit(rate: Rate) -> None:
    """Limit what the interface of this host sends; to be called in its namespace."""
    queue = ("dev", INTERFACE, "root")
    if _tc("-j", "qdisc", "show", *queue).find('"tbf"') >= 0:
        _tc("qdisc", "delete", *queue)
    if rate.mbit is not None:
        bits = round(1e6 * rate.mbit)
        burst = max(_LEAST_BURST, round(bits / 8 * _BURST_MS / 1e3))
        _tc("qdisc", "add", *queue, "tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", f"{_QUEUE_MS}ms")


def sent_bytes() -> int:
    """What the interface of this host has sent so far; to be called in its namespace."""
    return int(Path("/sys/class/net", INTERFACE, "statistics/tx_bytes").read_text())


def _add(namespace: str) -> None:
    _ip("netns", "add", namespace)


def _delete(namespace: str) -> None:
    if namespace in existing():
        _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _tc(*arguments: str) -> str:
    return _command("tc", *arguments)


def _command(*command: str) -> str:
    # A session of its own: Ctrl-C is for this process to handle.
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    except subprocess.TimeoutExpired as error:
        raise NamespaceError(f"{' '.join(command)}: no answer within {error.timeout} s") from None
    if done.returncode != 0:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
