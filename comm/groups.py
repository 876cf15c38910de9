"""gradwire's own process groups: gloo groups with the ranks of a given group, whose connections can be cut."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gradwire.comm.store_collectives import DEFAULT_TIMEOUT, RanksMissing, StoreRequests, collective_timeout, get_all
from gradwire.comm.torch_internals import GlooGroup, PrefixStore, Store, device_timeouts, gloo_keys, gloo_options

DESTROY_SECONDS = 1.0  # longest wait for the end of a group whose connections are cut
_MIN_RTT = slice(148, 152)  # tcpi_min_rtt of Linux's struct tcp_info: microseconds
_UNKNOWN_RTT = 2**32 - 1


class OwnGroup(GlooGroup):  # type: ignore[misc]
    """A gloo group that only gradwire uses, and whose connections it can `cut`.

    gloo cannot cancel a collective: one that waits for a lost rank blocks, with its group, until the timeout.

    Attributes:
        round_trip: seconds of a round trip between the two ranks that are farthest apart, equal on all ranks.
    """

    round_trip = 0.0

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        before = _epolls()
        options = gloo_options(timeout)
        # gloo registers the sockets of a device with an epoll instance of its own. If another thread has created one
        # meanwhile, the new instances cannot be told apart.
        found = _epolls() - before
        self._epolls = found if len(found) == len(options._devices) else set()
        super().__init__(store, rank, size, options)

    def cut(self) -> None:
        """Shut down all sockets: collectives in flight fail at once, here and on the peers. No effect without /proc."""
        for connection in self._connections():
            with suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def own_round_trip(self) -> float:
        """Seconds of this rank's longest round trip: of each connection the shortest that the kernel has seen.

        Acknowledgements are the kernel's, so a busy process does not make it longer. 0 without /proc.
        """
        trips = [0]
        for connection in self._connections():
            with suppress(OSError):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
                trips.append(int.from_bytes(info[_MIN_RTT], sys.byteorder))
        return 1e-6 * max(trip for trip in trips if trip < _UNKNOWN_RTT)

    def _connections(self) -> Iterator[socket.socket]:
        """The sockets that connect this rank with others, each open until the next is taken."""
        for descriptor in [descriptor for epoll in self._epolls for descriptor in _watched(epoll)]:
            with suppress(OSError):  # closed meanwhile; or gloo's listener, which has no peer and must stay open
                if _target(descriptor).startswith("socket:"):
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.getpeername()
                        yield connection


def _epolls() -> set[int]:
    """The file descriptors of this process's epoll instances; none where there is no /proc."""
    found = set()
    with suppress(FileNotFoundError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if _target(int(descriptor.name)) == "anon_inode:[eventpoll]":
                    found.add(int(descriptor.name))
    return found


def _watched(epoll: int) -> list[int]:
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _target(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def is_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives of CPU tensors run on gloo."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get("cpu") == "gloo"


def duplicate_group(group: dist.ProcessGroup, store: Store, key: str, check: Callable[[], None]) -> dist.ProcessGroup:
    """Make a gloo group with the ranks and the timeout of ``group``. A collective call of these ranks only.

    ``dist.new_group`` names a group by the number of groups that the process has made, which may differ between ranks.
    So the ranks meet in ``store`` under a new key; ``check`` is called while waiting and raises to end the wait.

    Raises:
        NotImplementedError: ``group`` has no gloo.
        RuntimeError: some ranks did not make this call within the group's timeout.
    """
    if not is_gloo_on_cpu(group):
        raise NotImplementedError(
            f"The process group's backends are {dist.get_backend_config(group)}; gradwire's hooks need gloo "
            'for CPU tensors. Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
        )
    timeout = device_timeouts(group, DEFAULT_TIMEOUT)["cpu"]
    # Creating a gloo group blocks and cannot be interrupted, so the ranks meet in the store first. And they meet again
    # afterwards: a rank that closed its group at once would leave another one connecting until gloo's timeout.
    _meet(group, store, f"{key}/begins", check)
    made = OwnGroup(PrefixStore(key, store), group.rank(), group.size(), timeout)
    try:
        trips = _meet(group, store, f"{key}/connected", check, str(made.own_round_trip()))
        made.round_trip = max(map(float, trips))
    except BaseException:
        destroy([made])
        raise
    return made


def keys_of_duplicate(key: str, rank: int) -> list[str]:
    """The keys that a rank sets in `duplicate_group`."""
    return [f"{key}/begins/{rank}", f"{key}/connected/{rank}", *(f"{key}/{each}" for each in gloo_keys(rank))]


def _meet(group: dist.ProcessGroup, store: Store, key: str, check: Callable[[], None], value: str = "") -> list[str]:
    """Wait until every rank has made the same call; return the values of all."""
    keys = [f"{key}/{rank}" for rank in range(group.size())]
    StoreRequests(store).require(lambda store: store.set(keys[group.rank()], value), collective_timeout(group))
    try:
        return get_all(group, store, keys, "The exchange of gradients", check)
    except RanksMissing as error:
        raise RuntimeError(
            f"Ranks {error.ranks} have not begun to exchange gradients within {error.timeout}, as this rank has. Use "
            "the same model, wrapper and hook on every rank."
        ) from error


def destroy(last: list[dist.ProcessGroup]) -> None:
    """Cut and destroy a group of gradwire's own, ``last``'s only element; let go of any other.

    If a message is partly sent when its connection ends, the group's destructor waits for gloo's timeout. So it runs in
    a thread. At the interpreter's exit it does not run: a late return from C++ would abort the process.
    """
    if isinstance(last[0], OwnGroup):
        last[0].cut()
        if threading.main_thread().is_alive():
            thread = threading.Thread(target=last.clear, name="gradwire closes a group", daemon=True)
            thread.start()
            thread.join(DESTROY_SECONDS)
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(last[0]))
    else:
        last.clear()
