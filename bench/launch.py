"""The launcher of all benches: one worker process per rank, on this machine or in its network namespaces.

`run` starts a process for each rank, which calls ``main(settings, device)`` of a module, and returns the records of
rank 0. The launcher holds the write end of a pipe that is the workers' standard input. When the
launcher ends, for whatever reason, the pipe closes and every worker exits. Workers run in sessions of their own, so
that Ctrl-C in a terminal reaches the launcher only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradwire.bench.record import Record
from gradwire.bench.timing import backend_of, bench_device

_GRACE_S = 10
_POLL_S = 0.1

Worker = Callable[[dict[str, Any], torch.device], Sequence[Record]]


class LaunchError(Exception):
    """A worker failed; ``log`` is the standard error of all workers."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class Place(NamedTuple):
    """The place of a rank: set-up of its process, network interface, address and node."""

    # a function for the rank's process, before its program starts, such as `Host.enter`; None for this machine
    enter: Callable[[], None] | None = None
    # the network interface of its collectives; without one, gloo looks up this machine's name
    interface: str | None = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    address: str = "127.0.0.1"  # IP address of that interface
    node: int = 0  # number of its node, as torchrun's GROUP_RANK


HERE = Place()


def run(
    module: str, settings: dict[str, Any], places: Sequence[Place] | int, device: torch.device | None = None
) -> list[Record]:
    """Run the function ``main`` of a module in one process per rank; returns the records of rank 0.

    Args:
        module: name of the module.
        settings: handed to the worker. ``threads`` in it sets the number of CPU threads of each rank, ``timeout_s``
            the timeout of its collectives (default: 5 minutes).
        places: where each rank runs, or the number of ranks on this machine.
        device: cuda gives each rank a GPU of its own; by default, the CPU.

    Raises:
        LaunchError: a worker failed.
    """
    places = [HERE] * places if isinstance(places, int) else places
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        path = Path(folder, "records")
        settings = settings | {"path": str(path), "device": (device or torch.device("cpu")).type}
        launch("gradwire.bench.launch", [module, json.dumps(settings)], places)
        return [Record(**json.loads(line)) for line in path.read_text().splitlines()]


def _work(main: Worker, settings: dict[str, Any]) -> NoReturn:
    """In a worker: join the process group, call ``main(settings, device)``, write the records of rank 0, and exit."""
    exit_with_launcher()
    if "threads" in settings:
        torch.set_num_threads(settings["threads"])
    device = bench_device() if settings["device"] == "cuda" else torch.device("cpu")
    dist.init_process_group(backend_of(device), timeout=timedelta(seconds=settings.get("timeout_s", 300)))
    records = main(settings, device)
    if dist.get_rank() == 0:
        Path(settings["path"]).write_text("".join(f"{record.to_json()}\n" for record in records))
    dist.destroy_process_group()
    # PyTorch's hooks hand Python functions to gloo's threads. A thread that drops one while the interpreter ends aborts
    # the process (seen in one of 50 runs of PyTorch's powerSGD_hook on its DDP).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def exit_with_launcher() -> None:
    """In a worker: exit at once when the launcher has ended. Starts a thread that waits on standard input."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-launcher", daemon=True).start()


def launch(module: str, arguments: Sequence[str], places: Sequence[Place]) -> None:
    """Run ``python -m module *arguments`` as one rank in each place, until all have ended or one has failed.

    Standard output is shared with the workers; their standard error is kept for the exception.

    Raises:
        LaunchError: a worker failed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log, reserved_port() as port:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} | os.environ
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # finds the modules that are found here
        environment |= {
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(port),  # a port of this machine; in a namespace of its own every port is free
            "WORLD_SIZE": str(len(places)),
        }
        read_end, write_end = os.pipe()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            nodes = [place.node for place in places]
            for rank, place in enumerate(places):
                local_rank = nodes[:rank].count(place.node)
                rank_environment = environment | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "GROUP_RANK": str(place.node),
                }
                if place.interface is not None and (place.enter or "GLOO_SOCKET_IFNAME" not in environment):
                    rank_environment["GLOO_SOCKET_IFNAME"] = place.interface
                command = [sys.executable, "-m", module, *arguments]
                options: dict[str, Any] = {"env": rank_environment, "stdin": read_end, "stderr": log}
                process = subprocess.Popen(command, start_new_session=True, preexec_fn=place.enter, **options)
                processes.append(process)
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(_POLL_S)
        finally:
            os.close(read_end)
            os.close(write_end)
            _stop(processes)
        if any(codes):
            log.seek(0)
            code = next(code for code in codes if code)
            raise LaunchError(f"a worker failed (exit code {code}); its messages are above.", log.read())


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no other process is given meanwhile, and that a server with SO_REUSEADDR, as PyTorch's, can use."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    _work(import_module(sys.argv[1]).main, json.loads(sys.argv[2]))
