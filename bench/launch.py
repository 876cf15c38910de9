"""Starting worker processes on this machine, and leaving none behind.

The launcher holds the write end of a pipe that the processes it starts, and theirs, have as standard input. When the
launcher ends, for whatever reason, the pipe closes and every worker exits (`exit_with_launcher`); torchrun then has
nothing to wait for. They run in sessions of their own, so that Ctrl-C in a terminal reaches the launcher only.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_GRACE_S = 10
_POLL_S = 0.1


class LaunchError(Exception):
    """A worker failed.

    Attributes:
        log: what the processes wrote to standard error.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        prefix: the command that takes the rank's command as its arguments, such as ``ip netns exec NAME``.
        interface: the network interface that its collectives use.
    """

    prefix: tuple[str, ...]
    interface: str


def launch(module: str, arguments: Sequence[str], processes: int) -> None:
    """Run ``python -m module *arguments`` in ``processes`` processes under torchrun, and wait for them.

    Standard output is shared with the workers; their standard error is kept for the exception.

    Raises:
        LaunchError: a worker failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", "-m", module, *arguments]
    _run([(command, {})])


def measured_by(module: str, settings: dict[str, Any], processes: int) -> Any:
    """`launch` a module that takes ``settings`` as JSON, with the ``path`` of a file; returns what rank 0 writes."""
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        path = Path(folder, "measured.json")
        launch(module, [json.dumps(settings | {"path": str(path)})], processes)
        return json.loads(path.read_text())


def launch_at(module: str, arguments: Sequence[str], places: Sequence[Place], address: str, port: int) -> None:
    """`launch` with one rank in each place, which find one another without torchrun.

    Args:
        module: what each rank runs.
        arguments: of its command line.
        places: where the ranks run.
        address: of rank 0.
        port: where rank 0 listens for the others.

    Raises:
        LaunchError: a worker failed.
    """
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}
    _run(
        [
            (
                [*place.prefix, sys.executable, "-m", module, *arguments],
                shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": place.interface},
            )
            for rank, place in enumerate(places)
        ]
    )


def _run(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> None:
    """Run commands, each with its additions to the environment, until all have ended or one has failed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        read_end, write_end = os.pipe()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, additions in commands:
                environment = _environment() | additions
                processes.append(
                    subprocess.Popen(command, env=environment, stdin=read_end, stderr=log, start_new_session=True)
                )
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


def _environment() -> dict[str, str]:
    """The environment of the workers: what the user set wins."""
    loopback = loopback_interface()
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    if loopback is not None:  # without it, gloo looks up this machine's name
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    return defaults | os.environ


def loopback_interface() -> str | None:
    """Its name, where it is known."""
    return {"linux": "lo", "darwin": "lo0"}.get(sys.platform)


def _stop(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exit_with_launcher() -> None:
    """In a worker: exit at once when the launcher has ended. Starts a thread that waits on standard input."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-launcher", daemon=True).start()


def leave() -> NoReturn:
    """In a worker that has done its work: exit without an end of the interpreter.

    PyTorch's hooks hand Python functions to gloo's threads, and a thread that lets go of one while the interpreter ends
    aborts the process (seen in one of 50 runs of PyTorch's powerSGD_hook on its DDP).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
