"""gradwire's own process groups: gloo groups with the ranks of a given group, whose connections can be cut."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from gradwire.comm.store_collectives import wait_for_ranks
from gradwire.comm.torch_internals import PrefixStore, Store

DESTROY_SECONDS = 1.0  # longest wait for the end of a group whose connections are cut
THREADS_PER_DEVICE = 2  # PyTorch's default: gloo works on as many collectives of a group at a time


def is_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives of CPU tensors run on gloo."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get("cpu") == "gloo"


class OwnGroup(dist.ProcessGroupGloo):
    """A gloo group that only gradwire uses.

    gloo cannot cancel a collective. One that waits for a lost rank waits until the group's timeout, and nothing can
    destroy the group before. `cut` shuts down the sockets instead, so that collectives in flight fail within
    milliseconds, here and on the peers.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        before = _epolls()
        options._devices = _devices()
        # gloo registers the sockets of a device with an epoll instance of its own. If another thread has created one
        # meanwhile, the new instances cannot be told apart.
        found = _epolls() - before
        self._epolls = found if len(found) == len(options._devices) else set()
        options._threads = THREADS_PER_DEVICE * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)

    def cut(self) -> None:
        """Shut down all connections. Without effect on systems without /proc."""
        for descriptor in [descriptor for epoll in self._epolls for descriptor in _watched(epoll)]:
            with suppress(OSError):  # closed meanwhile; or gloo's listener, which has no peer and must stay open
                if _target(descriptor).startswith("socket:"):
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)


def _devices() -> list[Any]:
    """gloo's network devices, as PyTorch chooses them."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


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
    """The file descriptors that an epoll instance watches."""
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _target(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def duplicate_group(group: dist.ProcessGroup, store: Store, key: str, check: Callable[[], None]) -> dist.ProcessGroup:
    """Make a gloo group with the ranks and the timeout of ``group``. A collective call of these ranks only.

    ``dist.new_group`` cannot be used: it names a group by the number of groups that the process has made, which may
    differ between the ranks. The ranks find each other in ``store`` under a key that was never used before. ``check``
    is called while waiting for them and raises to end the wait.

    Raises:
        NotImplementedError: ``group`` has no gloo.
        RuntimeError: some ranks did not make this call within the group's timeout.
    """
    if not is_gloo_on_cpu(group):
        raise NotImplementedError(
            f"The process group's backends are {dist.get_backend_config(group)}; gradwire's hooks need gloo "
            'for CPU tensors. Use init_process_group("gloo"), or "cpu:gloo,cuda:nccl".'
        )
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    # Creating a gloo group blocks and cannot be interrupted, so the ranks meet in the store first.
    keys = [f"{key}/{rank} is here" for rank in range(group.size())]
    store.set(keys[group.rank()], "")
    if missing := wait_for_ranks(group, store, keys, timeout, check):
        raise RuntimeError(
            f"Ranks {missing} have not begun to exchange gradients within {timeout}, as this rank has. Use "
            "the same model, wrapper and hook on every rank."
        )
    return cast("dist.ProcessGroup", OwnGroup(PrefixStore(key, store), group.rank(), group.size(), timeout))


def destroy(last: list[dist.ProcessGroup]) -> None:
    """Cut and destroy a group of gradwire's own; let go of any other.

    gloo forgets a message that is partly sent or received when its connection ends: that collective, and the
    destruction of its group, wait for the timeout, in a thread of their own. At the interpreter's exit no group is
    destroyed: a thread that returns from C++ later would abort the process.

    Args:
        last: the only reference to the group, which is dropped.
    """
    if last and isinstance(last[0], OwnGroup):
        last[0].cut()
        if threading.main_thread().is_alive():
            thread = threading.Thread(target=last.clear, name="gradwire closes a group", daemon=True)
            thread.start()
            thread.join(DESTROY_SECONDS)
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(last[0]))
    else:
        last.clear()
