"""Worlds: worker processes that stay alive between tests and run, on every rank, the cases they are sent.

A case is a plain function at the top level of a test module; `World.run` names it to the workers, which import that
module, call the function with the given arguments, and send back its result. The workers are one gloo group, found
through a file, so a case uses ``torch.distributed`` as any training script does.

Workers are forked from a server process that has imported torch and gradwire, so a world costs little to start.

A case about faults needs processes of its own: `World.run_fresh` starts them for one case, which makes its own process
groups, and tells how each rank ended, whatever became of the others.
"""

import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from unittest import mock

from tests.support import worker

FOLDER = str(Path(__file__).parent)
PRELOAD = ["torch", "torch._dynamo", "gradwire", "pytest", "fork_server"]  # every DDP imports the second
# Seconds. They end what hangs, and are many times what anything takes: a busy machine fails no test.
START_LIMIT = 240.0
CASE_LIMIT = 240.0
# Once a rank has failed, the others are probably waiting for it in a collective.
GRACE = 3.0
# In place of the answer of a process that has ended without one.
EXITED = ("exited",)


class CaseFailed(Exception):
    """A case raised on some rank, or did not end; the message has every rank's traceback or stacks.

    Attributes:
        errors: the exceptions by rank, as far as they could be pickled.
    """

    def __init__(self, message, errors):
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended on one rank.

    Attributes:
        how: "returned", "raised", "exited" (the process ended before the case did) or "killed" (at the limit).
        value: what the case returned.
        error: the name of the exception's type.
        message: the exception's text.
        exit_code: of a process that exited; minus the number of the signal, if one ended it.
        output: what the rank wrote; at its end the exception's traceback, or the stacks of all threads.
    """

    how: str
    value: object = None
    error: str | None = None
    message: str | None = None
    exit_code: int | None = None
    output: str = ""


class World:
    """Processes of ranks 0 to ``size`` - 1, started at the first case, and anew after one that failed or spent them."""

    def __init__(self, size, folder):
        self.size = size
        self._folder = Path(folder)
        self._generation = count()
        self._members = []

    def run(self, case, *, limit=CASE_LIMIT, **arguments):
        """Call ``case(**arguments)`` on every rank; returns one result a rank.

        Args:
            case: a function at the top level of a module.
            limit: seconds after which the workers are killed and their stacks reported.
            arguments: passed on; anything that pickles.

        Raises:
            CaseFailed: the case raised or did not end.
        """
        answers = self._ask(case, limit, arguments)
        if all(answer is not None and answer[0] == "result" for answer in answers):
            if any(is_spent for *_, is_spent in answers):
                self.close()
            return [pickle.loads(value) for _, value, _ in answers]
        raise self._failure(case.__qualname__, answers)

    def _ask(self, case, limit, arguments):
        """The answers of all ranks to a case."""
        if not self._members:
            self._start()
        message = _message(case, arguments)
        try:
            for member in self._members:
                member.connection.send_bytes(message)
            return _collect(self._members, limit, grace=GRACE)
        except BaseException:
            self._kill()
            raise

    def run_fresh(self, case, *, limit=CASE_LIMIT, **arguments):
        """Call ``case(**arguments)`` on every rank, in a new process without a process group; returns `Outcome`s.

        The environment is a launcher's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so the case joins its group with
        ``dist.init_process_group("gloo")`` or `worker.join_group`, and may do so again after `worker.leave_group`.
        A rank that has returned or raised stays alive, its sockets open, until all have: only an exit or a signal in
        the case takes it away from its peers.

        Args:
            case: a function at the top level of a module.
            limit: seconds, once all processes have started, after which the ranks that still run are killed; their
                stacks are in their output.
            arguments: passed on; anything that pickles.
        """
        folder, context, message = self._next_folder(), _context(), _message(case, arguments)
        with _reserved_port() as port:
            launched = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            members = [
                _Member(context, rank, folder, worker.main_fresh, launched | {"RANK": str(rank)}, message)
                for rank in range(self.size)
            ]
            try:
                _collect(members, START_LIMIT)
                answers = _collect(members, limit)
            except BaseException:
                _abort(members)
                raise
            _abort([member for member, answer in zip(members, answers, strict=True) if answer is None])
            _dismiss(members)
            return [_outcome(*pair) for pair in zip(members, answers, strict=True)]

    def close(self):
        """End the workers."""
        _dismiss(self._members)
        self._members = []

    def _next_folder(self):
        folder = self._folder / str(next(self._generation))
        folder.mkdir()
        return folder

    def _start(self):
        folder, context = self._next_folder(), _context()
        rendezvous = str(folder / "rendezvous")
        self._members = [
            _Member(context, rank, folder, worker.main, rank, self.size, rendezvous) for rank in range(self.size)
        ]
        answers = _collect(self._members, START_LIMIT, grace=GRACE)
        if any(answer is None or answer[0] != "result" for answer in answers):
            raise self._failure("The start of the workers", answers)

    def _failure(self, what, answers):
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
        return CaseFailed("\n\n".join(parts), errors)

    def _kill(self):
        """End the workers at once; returns them."""
        members, self._members = self._members, []
        _abort(members)
        return members


class _Member:
    """A process, its log, and this side of the pipe to it, which is the first argument of ``target``."""

    def __init__(self, context, rank, folder, target, *arguments):
        self.rank = rank
        self.log = folder / f"rank_{rank}.log"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, str(self.log), *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def output(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self):
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _context():
    """What starts processes: a server, begun at the first call, that has the imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # A test of the kernels may have switched Triton's interpreter on for this process: far too slow for training.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, [environment.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, environment | worker.ENVIRONMENT, clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _reserved_port():
    """A port that no other process is given meanwhile, and that a server with SO_REUSEADDR, as PyTorch's, can use."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        yield reservation.getsockname()[1]


def _message(case, arguments):
    return pickle.dumps((case.__module__, case.__qualname__, pickle.dumps(arguments)))


def _collect(members, limit, grace=None):
    """The answer of every member: `EXITED` if it ended without one, None if the limit came first.

    Args:
        limit: in seconds.
        grace: the limit once a member has failed.
    """
    answers = [None] * len(members)
    waiting = {member.connection: member.rank for member in members}
    deadline = time.monotonic() + limit
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(waiting), remaining):
            rank = waiting.pop(connection)
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                answers[rank] = EXITED
            if grace is not None and answers[rank][0] != "result":
                deadline = min(deadline, time.monotonic() + grace)
    return answers


def _abort(members):
    """End members at once; faulthandler writes the stacks of all their threads."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.process.pid, signal.SIGABRT)
    _dismiss(members)


def _dismiss(members):
    """Let members end that wait for the next case."""
    for member in members:
        member.connection.close()
    for member in members:
        member.end()


def _outcome(member, answer):
    """The `Outcome` of a member that has ended."""
    output = member.output()
    if answer is None:
        return Outcome(how="killed", output=output)
    if answer == EXITED:
        return Outcome(how="exited", exit_code=member.process.exitcode, output=output)
    if answer[0] == "result":
        return Outcome(how="returned", value=pickle.loads(answer[1]), output=output)
    _, _, trace, error, message = answer
    return Outcome(how="raised", error=error, message=message, output=output + trace)
