"""`World`: ranks in processes of their own that stay alive and run, on every rank, the functions they are sent.

The ranks are one gloo group, found through a file, so a function uses ``torch.distributed`` as any training script
does. They are forked from server processes that have imported torch and gradwire, so a world costs little to start.
Every rank has a server of its own, because forks share the seed of Python's ``hash``, and ranks in training do not.
"""

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.comm import connections_of

PRELOAD = ["torch", "torch._dynamo", "gradwire", "gradwire.testing"]  # every DDP imports the second
ENVIRONMENT = {"GRADWIRE_KERNELS": "torch", "OMP_NUM_THREADS": "1"}
# Seconds. They end what hangs, and are many times what anything takes: a busy machine breaks no law.
START_LIMIT = 240.0
CASE_LIMIT = 240.0
LAST_RESORT = 600.0  # ends a hanging rank after the calling process has gone
GRACE = 3.0  # once a rank has failed, the others are probably waiting for it in a collective

Answer = tuple[Any, ...]
EXITED: Answer = ("exited",)  # the answer of a process that has ended without one


class CaseFailed(Exception):
    """A function raised on some rank, or did not end; the message has every rank's traceback or stacks."""

    def __init__(self, message: str, errors: dict[int, Any], first: str | None, is_timeout: bool) -> None:
        super().__init__(message)
        self.errors = errors  # the exceptions by rank, as far as they could be pickled
        self.first = first or message  # the first exception's traceback; the whole message if no rank raised
        self.is_timeout = is_timeout  # whether some rank neither returned nor raised, and no other rank failed


class World:
    """Processes of ranks 0 to ``size`` - 1, started at the first call of `run`, and anew after a failure.

    ``folder`` has their logs; by default it is a temporary one. ``environment`` has further variables, such as those
    that choose kernels when they are imported.
    """

    def __init__(
        self, size: int, folder: str | Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.size = size
        self._environment = tuple(sorted((environment or {}).items()))
        self._temporary = tempfile.TemporaryDirectory(prefix="gradwire-") if folder is None else None
        self._folder = Path(self._temporary.name if self._temporary else folder or "")
        self._generation = count()
        self._members: list[Member] = []

    def run(self, function: Callable[..., Any], *, limit: float = CASE_LIMIT, **arguments: Any) -> list[Any]:
        """Call ``function(**arguments)`` on every rank; returns one result per rank.

        Args:
            function: a function at the top level of a module that the ranks can import.
            limit: seconds after which the ranks are killed and their stacks reported.
            arguments: passed on; must be picklable.

        Raises:
            CaseFailed: the function raised or did not end.
        """
        message = message_of_call(function, arguments)
        if not self._members:
            self._start()
        try:
            for member in self._members:
                member.connection.send_bytes(message)
            answers = collect(self._members, limit, grace=GRACE)
        except BaseException:
            self._kill()
            raise
        if all(answer is not None and answer[0] == "result" for answer in answers):
            if any(is_spent for _, _, is_spent in filter(None, answers)):
                self.close()
            return [pickle.loads(value) for _, value, _ in filter(None, answers)]
        raise self._failure(function.__qualname__, answers)

    def close(self) -> None:
        dismiss(self._members)
        self._members = []

    def next_folder(self) -> Path:
        """A new folder for the logs of processes."""
        folder = self._folder / str(next(self._generation))
        folder.mkdir()
        return folder

    def _start(self) -> None:
        folder = self.next_folder()
        rendezvous = str(folder / "rendezvous")
        self._members = [
            Member(rank, folder, serve, rank, self.size, rendezvous, environment=self._environment)
            for rank in range(self.size)
        ]
        answers = collect(self._members, START_LIMIT, grace=GRACE)
        if any(answer is None or answer[0] != "result" for answer in answers):
            raise self._failure("The start of the ranks", answers)

    def _failure(self, what: str, answers: Sequence[Answer | None]) -> CaseFailed:
        logs = [member.output() for member in self._kill()]
        errors, parts = {}, [f"{what} failed in a world of {self.size}."]
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            if answer is None or answer == EXITED:
                parts.append(f"Rank {rank} gave no answer. Its output:\n{log}")
            elif answer[0] == "error":
                errors[rank] = pickle.loads(answer[1]) if answer[1] else None
                parts.append(f"Rank {rank} raised:\n{answer[2]}")
            else:
                parts.append(f"Rank {rank} came to its end.")
        first = next((part for part in parts if " raised:\n" in part), None)
        return CaseFailed("\n\n".join(parts), errors, first, is_timeout=first is None and EXITED not in answers)

    def _kill(self) -> list["Member"]:
        """End the ranks at once; returns them."""
        members, self._members = self._members, []
        abort(members)
        return members


class Member:
    """A process, its log, and this side of the pipe to it, which is the first argument of ``target``."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        target: Callable[..., None],
        *arguments: Any,
        environment: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.rank = rank
        self.log = folder / f"rank_{rank}.log"
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, str(self.log), *arguments), daemon=True)
        server = fork_server(rank, environment)
        with mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", server.connect_to_new_process):
            self.process.start()
        theirs.close()

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> None:
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@functools.cache
def fork_server(rank: int, environment: tuple[tuple[str, str], ...] = ()) -> ForkServer:
    """The fork server that starts the processes of a rank, with all imports done; started at the first call.

    ``environment``: names and values of variables besides `ENVIRONMENT`.
    """
    server = ForkServer()
    server.set_forkserver_preload(PRELOAD)
    # This process may have switched Triton's interpreter on: far too slow for training.
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {**ENVIRONMENT, **dict(environment), "PYTHONHASHSEED": str(rank + 1)}
    with mock.patch.dict(os.environ, variables, clear=True):
        server.ensure_running()
    return server


def message_of_call(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    return pickle.dumps((function.__module__, function.__qualname__, pickle.dumps(arguments)))


def collect(members: Sequence[Member], limit: float, grace: float | None = None) -> list[Answer | None]:
    """The answer of every member: `EXITED` if it ended without one, None if none came within ``limit`` seconds.

    Once a member has failed, the others have ``grace`` seconds.
    """
    answers: list[Answer | None] = [None] * len(members)
    waiting = {member.connection: member.rank for member in members}
    deadline = time.monotonic() + limit
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(waiting), remaining):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                answer = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                answer = EXITED
            answers[rank] = answer
            if grace is not None and answer[0] != "result":
                deadline = min(deadline, time.monotonic() + grace)
    return answers


def abort(members: Sequence[Member]) -> None:
    """End members at once; faulthandler writes the stacks of all their threads."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.process.pid or 0, signal.SIGABRT)
    dismiss(members)


def dismiss(members: Sequence[Member]) -> None:
    """Let members end that wait for the next call."""
    for member in members:
        member.connection.close()
    for member in members:
        member.end()


# In the processes of the ranks.


def serve(connection: Connection, log: str, rank: int, size: int, rendezvous: str) -> None:
    """Make calls in the default group, one after another."""
    write_output_to(log)
    gc.freeze()  # collections after each call pass over what was imported
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=LAST_RESORT)
    )
    answer_calls(connection)


def answer_calls(connection: Connection) -> None:
    """Say that this rank is ready, then make calls until the other side closes the connection."""
    connection.send_bytes(pickle.dumps(("result", None)))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # a group that is still open would wait for its peers
        faulthandler.dump_traceback_later(LAST_RESORT, exit=True, file=2)
        answer = answer_to(message)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # a wrapped model is a cycle, and watches its parameters as long as it lives
        connection.send_bytes(answer)


def write_output_to(log: str) -> None:
    """Both streams, also of threads in C++, go to a file that the calling process reads after a failure."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_to(message: bytes) -> bytes:
    """Make a call: ("result", value, `is_spent`) or ("error", exception or None, traceback, type's name, text)."""
    module, name, arguments = pickle.loads(message)
    try:
        torch.manual_seed(0)
        function = getattr(importlib.import_module(module), name)
        value = pickle.dumps(function(**pickle.loads(arguments)))
        return pickle.dumps(("result", value, is_spent()))
    except Exception as error:
        answer = "error", pickled(error), traceback.format_exc(), type(error).__name__, str(error)
        return pickle.dumps(answer)


def is_spent() -> bool:
    """Whether later calls need new processes: after a failed exchange, and while a group of gradwire's own closes.

    Ranks that wait for each other keep it open until its timeout, and gloo's thread spins on data that no collective
    takes.
    """
    closing = any(thread.name == "gradwire closes a group" for thread in threading.enumerate())
    return closing or (dist.is_initialized() and connections_of(None).has_failed)


def pickled(error: Exception) -> bytes | None:
    """The exception, if it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return pickle.dumps(error)
    except Exception:
        return None
