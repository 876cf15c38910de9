"""Runs one of PyTorch's tests in freshly forked ranks, and tells how it ended on each.

PyTorch spawns the ranks of a test, which takes ten seconds and more, while a fork of a process that has imported
everything takes none. It is safe as long as that process has started no thread, so it does nothing but this.
"""

import faulthandler
import functools
import multiprocessing.connection
import os
import resource
import signal
import tempfile
import time
import traceback
import unittest
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import suite

LIMIT = 240.0
# Once a rank has failed, the others are probably waiting for it in a collective.
GRACE = 3.0

PASSED, FAILED, TIMED_OUT, SKIPPED = "passed", "failed", "timed out", "skipped"


@dataclass
class Outcome:
    """The end of a test."""

    result: str  # one of the four words above
    reason: str  # why it was skipped, or the first line of the first error
    details: str  # tracebacks, stacks and output of the ranks that failed or hung
    seconds: float


class Suite:
    """PyTorch's tests about DDP, ``names``, against "stock" (PyTorch's class) or "gradwire", in its own process."""

    def __init__(self, against, world_size):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, against, world_size))
        self._process.start()
        theirs.close()
        try:
            self.names = self._connection.recv()
        except BaseException as error:
            self._connection.close()  # the process ends with its connection
            if isinstance(error, EOFError):
                raise RuntimeError("PyTorch's tests could not be loaded; the reason is in the output.") from None
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()
        self._process.join()

    def run(self, name, limit=LIMIT):
        """Run one test; returns its `Outcome`. Ranks that still run after ``limit`` seconds are killed."""
        if name not in self.names:
            raise ValueError(f"PyTorch has no test {name} about DDP; without --tests, all are run and named.")
        self._connection.send((name, limit))
        return self._connection.recv()


def _serve(connection, against, world_size):
    module = suite.load(against, world_size)
    connection.send(suite.about_ddp(module))
    with suppress(EOFError):
        while True:
            name, limit = connection.recv()
            connection.send(_run(module, name, world_size, limit))


def _run(module, name, world_size, limit):
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(module, name, number, world_size, Path(folder)) for number in range(world_size)]
        _collect(ranks, limit)
        result, reason = _verdict(ranks, limit)
        logs = [rank.end() for rank in ranks]
    details = [
        f"Rank {rank.number} {rank.result or 'gave no answer'}.\n{rank.traceback}{log}"
        for rank, log in zip(ranks, logs, strict=True)
        if rank.result not in (PASSED, SKIPPED)
    ]
    return Outcome(result, reason, "\n".join(details), time.monotonic() - start)


class _Rank:
    """A rank as its parent sees it; ``result`` is None until it has answered."""

    def __init__(self, module, name, number, world_size, folder):
        self.number = number
        self.result, self.reason, self.traceback = None, "", ""
        self.connection, theirs = multiprocessing.Pipe()
        self._log = folder / f"rank_{number}.log"
        self._log.touch()  # the process may be killed before it opens the file
        arguments = (module, name, number, world_size, folder, self._log, theirs)
        self._process = multiprocessing.get_context("fork").Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self):
        """Take the answer that has come, or note that none will."""
        try:
            self.result, self.reason, self.traceback = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            self.result, self.reason = FAILED, f"the process died with exit code {self._process.exitcode}"

    def end(self):
        """Let the process exit, or kill it if it has not answered; returns what it wrote, its stacks last."""
        if self.result is None:
            os.kill(self._process.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
        with suppress(BrokenPipeError):
            self.connection.send(None)
        self._process.join(GRACE)
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._log.read_text(errors="replace")


def _collect(ranks, limit):
    """Wait for the answers of the ranks, up to the limit."""
    waiting = {rank.connection: rank for rank in ranks}
    deadline = time.monotonic() + limit
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(waiting), remaining):
            rank = waiting.pop(connection)
            rank.receive()
            if rank.result == FAILED:
                deadline = min(deadline, time.monotonic() + GRACE)


def _verdict(ranks, limit):
    """The worst result of the ranks, and its reason."""
    for result in (FAILED, None, SKIPPED):
        for rank in ranks:
            if rank.result == result:
                return (TIMED_OUT, f"no answer within {limit:g} s") if result is None else (result, rank.reason)
    return PASSED, ""


def _main(module, name, number, world_size, folder, log, connection):
    """The life of a rank."""
    _write_output_to(log)
    connection.send(_attempt(module, name, number, world_size, folder))
    connection.recv()  # until then, others may need this rank's end of their connections
    os._exit(0)  # a group that is still open would wait for its peers


def _attempt(module, name, number, world_size, folder):
    """The result of the test on this rank, the reason, and the traceback."""
    import cpu
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):
        _barrier = staticmethod(functools.partial(module.Barrier.sync, timeout=LIMIT))

    test = Test(name)
    test.rank, test.file_name = number, str(folder / "rendezvous")
    method = getattr(test, name)
    if name in cpu.NEEDS_GPU:
        return SKIPPED, cpu.NEEDS_GPU[name], ""
    if getattr(method, "__unittest_skip__", False):
        return SKIPPED, f"PyTorch skips it: {method.__unittest_skip_why__}", ""
    for expected in ("barrier", "test_dir"):
        (folder / expected).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
    dist.init_process_group(
        suite.BACKEND, init_method=test.init_method, rank=number, world_size=world_size, timeout=timeout
    )
    set_rng_seed()
    try:
        with cpu.OnCPU():
            method()
    except unittest.SkipTest as skip:
        return SKIPPED, str(skip), ""
    except SystemExit as exit:
        reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if exit.code not in reasons:
            return FAILED, f"SystemExit: {exit.code}", traceback.format_exc()
        return SKIPPED, reasons[exit.code], ""
    except Exception as error:
        first_line, *_ = str(error).splitlines() or [""]
        return FAILED, f"{type(error).__name__}: {first_line}", traceback.format_exc()
    return PASSED, "", ""


def _write_output_to(log):
    """Both streams, also of threads in C++, go to a file that is read after a failure."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
