"""Hosts with a slow network between them, on one machine: network namespaces on a bridge, with rate limits.

Linux only; needs root and pyroute2. Every host is a namespace with one interface, joined to a bridge in a namespace of
its own, so that nothing outside changes. On links with a delay, `gradwire.bench.late_packets` is in the bridge's place.
Deleting the namespaces deletes everything. A killed run leaves them in place; the next run deletes them.
"""

import importlib.util
import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from gradwire.bench.launch import HERE, Place

_HAS_PYROUTE2 = importlib.util.find_spec("pyroute2") is not None
if _HAS_PYROUTE2:
    from pyroute2 import IPRoute, NetlinkError, NetNS, config, netns
    from pyroute2.netlink.rtnl import TC_H_ROOT

    # pyroute2 forks, and ends its children with SIGTERM. A handler inherited from this process would unwind their
    # stacks and so delete the namespaces.
    config.disable_mp_signal = True

INTERFACE = "eth0"
_LATE_PACKETS = Path(__file__).with_name("late_packets.py")
_LATE_MTU = 60_000  # large packets keep the share of that program small
_NETWORK = ipaddress.ip_network("10.77.0.0/24")  # seen in the namespaces only
_PREFIX = "gradwire-"
_QUEUE_MS = 50
# The burst of the token bucket: the smallest with which gloo reaches 80 to 90 % of the rate. With half of it at
# 1 Gb/s, gloo reaches half of the rate, because the system hands over 64 KiB at a time.
_BURST_MS = 1
_MIN_BURST = 16_384
_MIN_MBIT = 0.1  # below, a step takes hours
MAX_LIMITED_MBIT = 30_000  # above, the count of bytes per second of a token bucket overflows
MAX_MODELED_MBIT = 10_000_000  # limit for links that are computed, not limited


class NamespaceError(Exception):
    """The system refuses to make hosts or to limit their rate."""


class Host(NamedTuple):
    """A namespace with one interface, `INTERFACE`."""

    name: str
    address: str  # the IP address of its interface

    def enter(self) -> None:
        """Move this process into the namespace, before it has threads: the ``preexec_fn`` of `subprocess.Popen`."""
        netns.setns(self.name, flags=0)


class Rate(NamedTuple):
    """The rate limit of an interface."""

    name: str  # the user's text: 100mbit, 1gbit, 2.5gbit, unlimited
    mbit: float | None  # megabits per second; None for no limit

    @classmethod
    def parse(cls, text: str, max_mbit: int = MAX_MODELED_MBIT) -> "Rate":
        """The rate of that name, of at most ``max_mbit``. Raises ValueError for any other text."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
        mbit = None if match is None else float(match[1]) * (1000 if match[2] == "gbit" else 1)
        if text != "unlimited" and (mbit is None or not _MIN_MBIT <= mbit <= max_mbit):
            raise ValueError(
                f"{text!r} is not a rate; expected one like 100mbit or 1gbit, from {_MIN_MBIT}mbit to "
                f"{max_mbit // 1000}gbit, or unlimited"
            )
        return cls(text, mbit)

    @classmethod
    def named(cls, name: str) -> "Rate":
        """The rate of that name in settings or results, `LOOPBACK` included."""
        return LOOPBACK if name == LOOPBACK.name else cls.parse(name)

    @property
    def is_loopback(self) -> bool:
        """Whether there is no link: all ranks are on this machine."""
        return self == LOOPBACK


LOOPBACK = Rate("loopback", None)


def obstacle() -> str | None:
    """The reason why namespaces cannot be made here; None if there is none."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if not _HAS_PYROUTE2:
        return "pyroute2 is not installed"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    try:
        with hosts(1):
            return None
    except NamespaceError as error:
        return f"the system refuses to make network namespaces: {error}"


@contextmanager
def hosts(count: int, delay_ms: float = 0.0) -> Iterator[list[Host]]:
    """``count`` hosts on one network, deleted at the end, also after an error.

    Every packet arrives ``delay_ms`` after it was sent.
    """
    delete_abandoned()
    prefix = f"{_PREFIX}{os.getpid()}-"
    addresses = map(str, _NETWORK.hosts())
    made = [Host(f"{prefix}{index}", next(addresses)) for index in range(count)]
    with ExitStack() as stack:
        with _refusals():
            inside = {host: _add(host.name, stack) for host in made}
            if delay_ms > 0:
                _join_by_late_packets(inside, delay_ms, stack)
            else:
                _join_by_bridge(made, _add(f"{prefix}bridge", stack))
            for host, space in inside.items():
                space.addr("add", index=_index(space, INTERFACE), address=host.address, prefixlen=_NETWORK.prefixlen)
                for interface in (INTERFACE, "lo"):
                    space.link("set", ifname=interface, state="up")
        yield made


@contextmanager
def places_of(
    count: int, rates: Sequence[Rate], ranks_per_host: int = 1, delay_ms: float = 0.0
) -> Iterator[list[Place]]:
    """The places of ranks on ``count`` hosts: in a namespace for each, or, if the only rate is `LOOPBACK`, here."""
    nodes = [node for node in range(count) for _ in range(ranks_per_host)]
    if all(rate.is_loopback for rate in rates):
        yield [HERE._replace(node=node) for node in nodes]
    else:
        with hosts(count, delay_ms) as made:
            yield [Place(made[node].enter, INTERFACE, made[node].address, node) for node in nodes]


def _join_by_bridge(made: Sequence[Host], bridge: "NetNS") -> None:
    """Give every host an interface that is joined to a bridge."""
    bridge.link("add", ifname="bridge", kind="bridge", state="up")
    for number, host in enumerate(made):
        port = f"port{number}"
        bridge.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": host.name})
        bridge.link("set", ifname=port, master=_index(bridge, "bridge"), state="up")


def _join_by_late_packets(inside: Mapping[Host, "NetNS"], delay_ms: float, stack: ExitStack) -> None:
    """Give every host an interface whose packets a process delivers late, until ``stack`` ends it."""
    devices = [f"{host.name}={host.address}" for host in inside]
    command = [sys.executable, str(_LATE_PACKETS), str(delay_ms), INTERFACE, *devices]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise OSError("no TUN devices; a delay needs /dev/net/tun")
    for space in inside.values():
        space.link("set", ifname=INTERFACE, mtu=_LATE_MTU)


def delete_abandoned() -> None:
    """Delete the namespaces of runs whose process has ended."""
    for name in existing():
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            _delete(name)


def existing() -> list[str]:
    return [name for name in netns.listnetns() if re.fullmatch(rf"{_PREFIX}\d+-\w+", name)]


def limit(rate: Rate) -> None:
    """Limit the rate of this host's interface; call it in the host's namespace. Loopback stays as it is."""
    if rate.is_loopback:
        return
    with _refusals(), IPRoute() as here:
        index = _index(here, INTERFACE)
        if any(queue.get("kind") == "tbf" for queue in here.get_qdiscs(index=index)):
            here.tc("del", index=index, parent=TC_H_ROOT)
        if rate.mbit is not None:
            bits = round(1e6 * rate.mbit)
            mtu = here.get_links(index)[0].get_attr("IFLA_MTU")
            burst = max(_MIN_BURST, mtu, round(bits / 8 * _BURST_MS / 1e3))
            here.tc("add", "tbf", index=index, rate=f"{bits}bit", burst=burst, latency=f"{_QUEUE_MS}ms")


def sent_bytes() -> int:
    """Bytes that this host's interface has sent so far; call it in the host's namespace."""
    lines = map(str.split, Path("/proc/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == f"{INTERFACE}:")


def _add(name: str, stack: ExitStack) -> "NetNS":
    """A namespace that ``stack`` deletes."""
    stack.callback(_delete, name)
    netns.create(name)
    return stack.enter_context(NetNS(name, flags=0))


def _delete(name: str) -> None:
    if name in existing():
        netns.remove(name)


def _index(where: "IPRoute", interface: str) -> int:
    index: int = where.link_lookup(ifname=interface)[0]
    return index


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise NamespaceError where the kernel refuses."""
    try:
        yield
    except (NetlinkError, OSError) as error:
        raise NamespaceError(str(error)) from error
