"""Hosts with a slow network between them, on one machine: network namespaces on a bridge, with rate limits.

Linux only; needs root and iproute2. Every host is a namespace with one interface, joined to a bridge in a namespace of
its own, so that nothing outside changes. Deleting the namespaces deletes everything. A killed run leaves them behind;
the next run deletes them.
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
# The burst of the token bucket: the smallest with which gloo reaches 80 to 90 % of the rate. With half of it at
# 1 Gb/s, gloo reaches half of the rate, because the system hands over 64 KiB at a time.
_BURST_MS = 1
_LEAST_BURST = 16_384
_RATES_MBIT = (0.1, 1_000_000)  # below, a step takes hours; above, nothing is limited


class NamespaceError(Exception):
    """The system refuses to make hosts or to limit their rate."""


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
        """The command that runs its arguments in the namespace."""
        return ("ip", "netns", "exec", self.name)


class Rate(NamedTuple):
    """The rate limit of an interface.

    Attributes:
        name: as given: 100mbit, 1gbit, 2.5gbit, unlimited.
        mbit: megabits per second; None for no limit.
    """

    name: str
    mbit: float | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """The rate of that name. Raises ValueError for any other text."""
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
    """The reason why namespaces cannot be made here; None if there is none."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """``count`` hosts on one bridge, deleted at the end, also after an error.

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
    """Delete the namespaces of runs whose process has ended."""
    for name in existing():
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            _delete(name)


def existing() -> list[str]:
    """The namespaces of all runs."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
    return [name for name in names if re.fullmatch(rf"{_PREFIX}\d+-\w+", name)]


def limit(rate: Rate) -> None:
    """Limit the rate of this host's interface; call it in the host's namespace."""
    queue = ("dev", INTERFACE, "root")
    if _tc("-j", "qdisc", "show", *queue).find('"tbf"') >= 0:
        _tc("qdisc", "delete", *queue)
    if rate.mbit is not None:
        bits = round(1e6 * rate.mbit)
        burst = max(_LEAST_BURST, round(bits / 8 * _BURST_MS / 1e3))
        _tc("qdisc", "add", *queue, "tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", f"{_QUEUE_MS}ms")


def sent_bytes() -> int:
    """Bytes that this host's interface has sent so far; call it in the host's namespace."""
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
