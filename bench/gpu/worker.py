"""Processes that run the cases of the GPU lane, one per rank; after a failure, new ones replace them.

All ranks share one GPU. NCCL rejects two ranks on one GPU as duplicates unless their processes claim to be on different
hosts. They then communicate over sockets, with few thread blocks each, so that both make progress at the same time.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.bench.gpu.case import LaneCase, Skipped

# Makes a process a rank on the CPU, with stand-ins for a GPU until the stack ends; returns the backend of its group.
Rehearse = Callable[[ExitStack], str]

# Seconds. A cold cache of Triton compiles a few dozen kernels, 0.1 to 2 s each, while two ranks share the CPU.
CASE_LIMIT = 300.0
START_LIMIT = 180.0
# Once a rank has failed, the others are probably waiting for it in a collective.
GRACE = 5.0

SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": "16777216",
}

NO_ANSWER = "gave no answer in time"


class Outcome(NamedTuple):
    """The outcome of a case, or of the start: on one rank, or on all."""

    status: str  # "passed", "failed" or "skipped"
    text: str = ""  # the reason for a skip, or for a failure the tracebacks, of all ranks also stacks and output
    measured: Sequence[dict[str, Any]] = ()  # rows, if the case passed; of all ranks those of rank 0
    seconds: float = 0.0  # of all ranks, without the start of the processes


class Crew:
    """The processes of a group, started by the first case and again after a failure; ``rehearse`` must be picklable."""

    def __init__(self, size: int, rehearse: Rehearse | None = None) -> None:
        self._size = size
        self._rehearse = rehearse
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-gpu-lane-", ignore_cleanup_errors=True)
        self._members: list[_Member] = []
        self._n_starts = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(self, case: LaneCase, limit: float = CASE_LIMIT) -> Outcome:
        """Run a case on every rank; it must be picklable."""
        start = time.monotonic()
        if not self._members:
            self._start(limit)
            answers = self._collect(min(START_LIMIT, limit))
            if any(answer.status != "passed" for answer in answers):
                return self._failure("The start of the processes", answers, time.monotonic() - start)
            limit -= time.monotonic() - start
            start = time.monotonic()
        for member in self._members:
            with suppress(OSError):  # it has ended, and its answer will be missing
                member.connection.send(case)
        answers = self._collect(limit)
        seconds = time.monotonic() - start
        statuses = {answer.status for answer in answers}
        if "failed" in statuses:
            return self._failure("The case", answers, seconds)
        if "skipped" in statuses:
            return next(each for each in answers if each.status == "skipped")._replace(seconds=seconds)
        return answers[0]._replace(seconds=seconds)

    def _start(self, limit: float) -> None:
        folder = Path(self._folder.name) / str(self._n_starts)
        folder.mkdir()
        self._n_starts += 1
        arguments = (self._size, self._rehearse, limit, folder)
        self._members = [_Member(rank, *arguments) for rank in range(self._size)]

    def _collect(self, limit: float) -> list[Outcome]:
        """The answer of every rank; a rank that does not answer in time has failed."""
        answers = [Outcome("failed", NO_ANSWER)] * self._size
        waiting = {member.connection: rank for rank, member in enumerate(self._members)}
        deadline = time.monotonic() + limit
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), remaining):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = Outcome("failed", "ended without an answer")
                if answers[rank].status == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failure(self, what: str, answers: list[Outcome], seconds: float) -> Outcome:
        parts = [f"{what} failed after {seconds:.1f} s."]
        logs = self._end([rank for rank, answer in enumerate(answers) if answer.text == NO_ANSWER])
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            parts.append(f"--- rank {rank} {answer.status} {answer.text}".rstrip())
            parts.append(f"--- output of rank {rank}:\n{log}")
        return Outcome("failed", "\n".join(parts), seconds=seconds)

    def _end(self, stuck: Sequence[int] = ()) -> list[str]:
        """End the processes; returns their output, with the stacks of all threads for stuck ranks."""
        members, self._members = self._members, []
        for rank, member in enumerate(members):
            if rank in stuck and member.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGABRT)  # to faulthandler
            member.connection.close()  # the others end by themselves
        return [member.end() for member in members]


class _Member:
    def __init__(self, rank: int, size: int, rehearse: Rehearse | None, limit: float, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = folder / f"rank_{rank}.log"
        self.connection, theirs = context.Pipe()
        arguments = (theirs, rank, size, rehearse, limit, folder / "rendezvous", self._log)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> str:
        """Wait for the end, or kill the process; returns its output."""
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _work(
    connection: Connection, rank: int, size: int, rehearse: Rehearse | None, limit: float, rendezvous: Path, log: Path
) -> None:
    """A rank: join the group, and run cases until the connection closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)  # also for output of C++ and NCCL
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    with ExitStack() as stack:
        try:
            device = _join(stack, rank, size, rehearse, limit, rendezvous)
        except BaseException:
            connection.send(Outcome("failed", traceback.format_exc()))
            raise
        connection.send(Outcome("passed"))
        while True:
            try:
                case = connection.recv()
            except EOFError:
                os._exit(0)  # an open group would wait for the other ranks
            faulthandler.dump_traceback_later(2 * limit, exit=True, file=2)  # ends a rank whose parent has died
            connection.send(_answer(case, device))
            faulthandler.cancel_dump_traceback_later()


def _join(
    stack: ExitStack, rank: int, size: int, rehearse: Rehearse | None, limit: float, rendezvous: Path
) -> torch.device:
    """Join the default process group; returns the device of all cases."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "init_method": f"file://{rendezvous}",
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=limit),
    }
    if rehearse is not None:
        dist.init_process_group(rehearse(stack), **options)
        return torch.device("cpu")
    if size > 1:
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"emulated-{rank}")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    return device


def _answer(case: LaneCase, device: torch.device) -> Outcome:
    try:
        measured = case(device)
        torch.cuda.synchronize()
    except Skipped as reason:
        return Outcome("skipped", str(reason))
    except Exception:
        return Outcome("failed", traceback.format_exc())
    gc.collect()  # a DDP is part of a cycle, and a bench holds gigabytes
    torch.cuda.empty_cache()
    return Outcome("passed", "", measured or ())
