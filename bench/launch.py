"""Starting worker processes on this machine, and leaving none behind.

The launcher holds the write end of a pipe that torchrun and its workers have as standard input. When the launcher ends,
for whatever reason, the pipe closes and every worker exits (`exit_with_launcher`); torchrun then has nothing to wait
for. It runs in a session of its own, so that Ctrl-C in a terminal reaches the launcher only.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

_GRACE_S = 10


class LaunchError(Exception):
    """A worker failed.

    Attributes:
        log: what torchrun and the workers wrote to standard error.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def launch(module: str, arguments: Sequence[str], processes: int) -> None:
    """Run ``python -m module *arguments`` in ``processes`` processes under torchrun, and wait for them.

    Standard output is shared with the workers; their standard error is kept for the exception.

    Raises:
        LaunchError: a worker failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", "-m", module, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        torchrun = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            code = torchrun.wait()
        finally:
            _stop(torchrun)
        if code != 0:
            log.seek(0)
            raise LaunchError(f"a worker failed (torchrun ended with code {code}); its messages are above.", log.read())


def _environment() -> dict[str, str]:
    """The environment of the workers: what the user set wins."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    if loopback is not None:  # without it, gloo looks up this machine's name
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    return defaults | os.environ


def _stop(torchrun: "subprocess.Popen[bytes]") -> None:
    assert torchrun.stdin is not None
    torchrun.stdin.close()
    try:
        torchrun.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def exit_with_launcher() -> None:
    """In a worker: exit at once when the launcher has ended. Starts a thread that waits on standard input."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-launcher", daemon=True).start()
