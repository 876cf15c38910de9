"""A crew of processes that run the cases of `gpu_lane`, one process a rank, and give way to a new one after a failure.

The ranks of a crew share one GPU. NCCL takes two ranks of one GPU for duplicates unless their processes claim to be on
different hosts; they then talk over sockets, with few blocks each, so that both make progress side by side.
"""

from __future__ import annotations

import faulthandler
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

from gradwire.bench.gpu_checks import Skipped
from gradwire.bench.rehearsal import gpu_on_cpu, register_backend

Case = Callable[[torch.device], None]

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
    """How a case ended.

    Attributes:
        status: "passed", "failed" or "skipped".
        seconds: until the slowest rank had answered; without the start of the processes.
        text: the reason it was skipped; of a failure the tracebacks, the stacks and the output of every rank.
    """

    status: str
    seconds: float
    text: str


class Crew:
    """Processes of ranks 0 to ``size`` - 1 in a process group, started by the first case and again after a failure.

    Args:
        size: number of ranks.
        rehearsal: whether the CPU plays the part of the GPU, by `gradwire.bench.rehearsal`.
    """

    def __init__(self, size: int, rehearsal: bool) -> None:
        self._size = size
        self._rehearsal = rehearsal
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-gpu-lane-", ignore_cleanup_errors=True)
        self._members: list[_Member] = []
        self._n_starts = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(self, case: Case, limit: float = CASE_LIMIT) -> Outcome:
        """Run a case, which must pickle, on every rank."""
        start = time.monotonic()
        if not self._members:
            self._start(limit)
            answers = self._collect(START_LIMIT)
            if any(status != "passed" for status, _ in answers):
                return self._failure("The start of the processes", answers, time.monotonic() - start)
            start = time.monotonic()
        for member in self._members:
            with suppress(OSError):  # it has ended, which its missing answer will say
                member.connection.send(case)
        answers = self._collect(limit)
        seconds = time.monotonic() - start
        statuses = {status for status, _ in answers}
        if "failed" in statuses:
            return self._failure("The case", answers, seconds)
        if "skipped" in statuses:
            return Outcome("skipped", seconds, next(text for status, text in answers if status == "skipped"))
        return Outcome("passed", seconds, "")

    def _start(self, limit: float) -> None:
        folder = Path(self._folder.name) / str(self._n_starts)
        folder.mkdir()
        self._n_starts += 1
        arguments = (self._size, self._rehearsal, limit, folder)
        self._members = [_Member(rank, *arguments) for rank in range(self._size)]

    def _collect(self, limit: float) -> list[tuple[str, str]]:
        """Every rank's status and text; those that give no answer in time have failed."""
        answers = [("failed", NO_ANSWER)] * self._size
        waiting = {member.connection: rank for rank, member in enumerate(self._members)}
        deadline = time.monotonic() + limit
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), remaining):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = ("failed", "ended without an answer")
                if answers[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failure(self, what: str, answers: list[tuple[str, str]], seconds: float) -> Outcome:
        parts = [f"{what} failed after {seconds:.1f} s."]
        logs = self._end([rank for rank, (_, text) in enumerate(answers) if text == NO_ANSWER])
        for rank, ((status, text), log) in enumerate(zip(answers, logs, strict=True)):
            parts.append(f"--- rank {rank} {status} {text}".rstrip())
            parts.append(f"--- output of rank {rank}:\n{log}")
        return Outcome("failed", seconds, "\n".join(parts))

    def _end(self, stuck: Sequence[int] = ()) -> list[str]:
        """End the processes; what each had written, of those that are stuck with the stacks of all threads."""
        members, self._members = self._members, []
        for rank, member in enumerate(members):
            if rank in stuck and member.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGABRT)  # to faulthandler
            member.connection.close()  # the others end by themselves
        return [member.end() for member in members]


class _Member:
    def __init__(self, rank: int, size: int, rehearsal: bool, limit: float, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = folder / f"rank_{rank}.log"
        self.connection, theirs = context.Pipe()
        arguments = (theirs, rank, size, rehearsal, limit, folder / "rendezvous", self._log)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> str:
        """Wait for the end, or bring it about; the output."""
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _work(
    connection: Connection, rank: int, size: int, rehearsal: bool, limit: float, rendezvous: Path, log: Path
) -> None:
    """A rank: join the group, and run the cases that come until the connection closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)  # also what C++ and NCCL write
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    with ExitStack() as stack:
        try:
            device = _join(stack, rank, size, rehearsal, limit, rendezvous)
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            raise
        connection.send(("passed", ""))
        while True:
            try:
                case = connection.recv()
            except EOFError:
                os._exit(0)  # a group that is still open would wait for its peers
            faulthandler.dump_traceback_later(2 * limit, exit=True, file=2)  # nobody else ends a rank without a parent
            connection.send(_answer(case, device))
            faulthandler.cancel_dump_traceback_later()


def _join(stack: ExitStack, rank: int, size: int, rehearsal: bool, limit: float, rendezvous: Path) -> torch.device:
    """Join the default process group; the device of all cases."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "init_method": f"file://{rendezvous}",
        "rank": rank,
        "world_size": size,
        "timeout": timedelta(seconds=limit),
    }
    if rehearsal:
        os.environ["GRADWIRE_KERNELS"] = "torch"
        torch.set_num_threads(1)
        stack.enter_context(gpu_on_cpu())
        dist.init_process_group(register_backend(), **options)
        return torch.device("cpu")
    if size > 1:
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"emulated-{rank}")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    return device


def _answer(case: Case, device: torch.device) -> tuple[str, str]:
    try:
        case(device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Skipped as reason:
        return "skipped", str(reason)
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""
