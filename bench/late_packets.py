"""A network with late packets, for root on Linux: ``python late_packets.py DELAY_MS NAME NAMESPACE=ADDRESS ...``.

Each namespace gets a TUN device of this name. A packet is passed on to the device of its destination a delay after it
was sent. This takes the place of the kernel's netem, which many kernels lack. The program prints a line when the
devices exist, and ends with its standard input; the devices end with it.

This file is run by its path, without importing gradwire and PyTorch.
"""

import fcntl
import ipaddress
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from select import select

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # of an IPv4 header
_MAX_PACKET = 65_535


def open_device(namespace: str, name: str) -> int:
    """The file of a new TUN device in a namespace, in which this thread stays."""
    from pyroute2 import netns

    netns.setns(namespace, flags=0)
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def pass_on(source: int, sinks: Mapping[bytes, int], delay: float) -> None:
    """Write every packet of a device to the one of its destination, ``delay`` seconds after it was read."""
    late: deque[tuple[float, bytes]] = deque()
    while True:
        wait = max(0.0, late[0][0] - time.perf_counter()) if late else None
        if select([source], [], [], wait)[0]:
            packet = os.read(source, _MAX_PACKET)
            late.append((time.perf_counter() + delay, packet))
        while late and late[0][0] <= time.perf_counter():
            packet = late.popleft()[1]
            sink = sinks.get(packet[_DESTINATION])  # none for broadcasts and IPv6
            if sink is not None:
                os.write(sink, packet)


def main() -> None:
    delay, name = float(sys.argv[1]) / 1e3, sys.argv[2]
    addresses = dict(argument.split("=") for argument in sys.argv[3:])
    sinks = {ipaddress.ip_address(address).packed: open_device(space, name) for space, address in addresses.items()}
    for source in sinks.values():
        threading.Thread(target=pass_on, args=(source, sinks, delay), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
