"""A command that is stopped while its ranks run."""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

HANG_LIMIT = 600  # seconds; it ends what hangs, and nothing else takes that long, on a busy machine either

STOPS = [
    pytest.param(signal.SIGINT, id="SIGINT"),
    pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
    pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.slow),
]


def stopped(command, stop, folder, while_it_runs=lambda pid: None):
    """Send the signal ``stop`` to a command once it has two ranks; returns its process id.

    Checks the exit status, that no process is left, and that there is no traceback.
    """
    mark = str(uuid.uuid4())
    environment = os.environ | {"GRADWIRE_TEST": mark, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background has it ignored
    )
    try:
        wait_until(lambda: len(marked(mark)) >= 3)  # the command and two ranks
        while_it_runs(process.pid)
        process.send_signal(stop)
        assert process.wait(HANG_LIMIT) == (-signal.SIGKILL if stop == signal.SIGKILL else 128 + stop)
        wait_until(lambda: not marked(mark))
    finally:
        process.kill()
        output, _ = process.communicate(timeout=HANG_LIMIT)
    assert b"Traceback" not in output
    return process.pid


def wait_until(condition):
    deadline = time.monotonic() + HANG_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def marked(mark):
    """The processes that have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
