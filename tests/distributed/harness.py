"""Worlds: worker processes that stay alive between tests and run, on every rank, the cases they are sent.

A case is a plain function at the top level of a test module; `World.run` names it to the workers, which load that file
by its path, call the function with the given arguments, and send back what it returns. The workers are one gloo group,
found through a file, so a case uses ``torch.distributed`` as any training script does.

Workers are forked from a server process that has imported torch and gradwire, so a world costs little to start.
"""

import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest import mock

import worker

PRELOAD = ["torch", "torch._dynamo", "gradwire", "pytest"]  # every DDP imports the second
START_LIMIT = 120.0
CASE_LIMIT = 60.0
# Once a rank has failed, the others are probably waiting for it in a collective.
GRACE = 3.0


class CaseFailed(Exception):
    """A case raised on some rank, or did not end; the message has every rank's traceback or stacks.

    Attributes:
        errors: the exceptions by rank, as far as they could be pickled.
    """

    def __init__(self, message, errors):
        super().__init__(message)
        self.errors = errors


class World:
    """Processes of ranks 0 to ``size`` - 1, started at the first case, and anew after a case that failed."""

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
        if not self._members:
            self._start()
        message = pickle.dumps((case.__code__.co_filename, case.__module__, case.__qualname__, pickle.dumps(arguments)))
        try:
            for member in self._members:
                member.connection.send_bytes(message)
            answers = self._collect(limit)
        except BaseException:
            self._kill()
            raise
        if all(answer is not None and answer[0] == "result" for answer in answers):
            return [pickle.loads(value) for _, value in answers]
        raise self._failure(case.__qualname__, answers)

    def close(self):
        """End the workers."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.end()
        self._members = []

    def _start(self):
        folder = self._folder / str(next(self._generation))
        folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # A test of the kernels may have switched Triton's interpreter on for this process: far too slow for training.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with mock.patch.dict(os.environ, environment | worker.ENVIRONMENT, clear=True):
            multiprocessing.forkserver.ensure_running()
        self._members = [_Member(context, rank, self.size, folder) for rank in range(self.size)]
        answers = self._collect(START_LIMIT)
        if any(answer is None or answer[0] != "result" for answer in answers):
            raise self._failure("The start of the workers", answers)

    def _collect(self, limit):
        """The answer of every rank, or None where none came in time."""
        answers = [None] * self.size
        waiting = {member.connection: member.rank for member in self._members}
        deadline = time.monotonic() + limit
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), remaining):
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = None
                if answers[rank] is None or answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failure(self, what, answers):
        logs = self._kill()
        errors, parts = {}, [f"{what} failed in a world of {self.size}."]
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            if answer is None:
                parts.append(f"Rank {rank} gave no answer. Its output:\n{log}")
            elif answer[0] == "error":
                errors[rank] = pickle.loads(answer[1]) if answer[1] else None
                parts.append(f"Rank {rank} raised:\n{answer[2]}")
            else:
                parts.append(f"Rank {rank} came to its end.")
        return CaseFailed("\n\n".join(parts), errors)

    def _kill(self):
        """End the workers at once; returns what each had written, its stacks last."""
        members, self._members = self._members, []
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
        for member in members:
            member.end()
            member.connection.close()
        return [member.log.read_text(errors="replace") for member in members]


class _Member:
    def __init__(self, context, rank, size, folder):
        self.rank = rank
        self.log = folder / f"rank_{rank}.log"
        self.connection, theirs = context.Pipe()
        arguments = (theirs, rank, size, str(folder / "rendezvous"), str(self.log))
        self.process = context.Process(target=worker.main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def end(self):
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
