"""`World` of `gradwire.testing`, plus cases about faults, which need processes of their own.

A case is a plain function at the top level of a test module. `World.run` runs it on ranks that stay alive between
tests; `World.run_fresh` starts processes for one case, which makes its own process groups, and tells how each rank
ended, whatever became of the others.
"""

import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.launch import reserved_port
from gradwire.testing import _world
from gradwire.testing._world import CASE_LIMIT, ENVIRONMENT, EXITED, START_LIMIT, CaseFailed
from tests.support import gpu_worker, worker
from tests.support.gpu_worker import SHARED_GPU

__all__ = ["ENVIRONMENT", "INTERPRETER", "CaseFailed", "Outcome", "World", "open_sockets"]

# Variables of ranks whose kernels run in Triton's interpreter, where they read addresses in device memory.
INTERPRETER = {"TRITON_INTERPRET": "1", "GRADWIRE_KERNELS": "auto"}

# The fork server imports the last by its bare name; ranks find this repository's `tests` by what it has done.
_world.PRELOAD += ["pytest", "fork_server"]
if SHARED_GPU:  # see `tests.support.gpu_worker`
    _world.serve = gpu_worker.serve
    del ENVIRONMENT["GRADWIRE_KERNELS"]
    CASE_LIMIT = gpu_worker.TIMEOUT
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a case on one rank."""

    how: str  # "returned", "raised", "exited" (the process ended before the case did) or "killed" (at the limit)
    value: object = None  # the result of the case
    error: str | None = None  # name of the exception's type
    message: str | None = None  # text of the exception
    exit_code: int | None = None  # of a process that exited; minus the number of the signal, if one ended it
    output: str = ""  # ends with the exception's traceback, or the stacks of all threads


class World(_world.World):
    """A world that also runs cases in fresh processes."""

    def run_fresh(self, case, *, limit=CASE_LIMIT, **arguments):
        """Call ``case(**arguments)`` on every rank, in a new process without a process group; returns `Outcome`s.

        The environment is a launcher's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so the case joins its group with
        ``dist.init_process_group("gloo")``, and may do so again after `worker.leave_group`.
        A rank that has returned or raised stays alive, its sockets open, until all have: only an exit or a signal in
        the case takes it away from its peers. Ranks that still run ``limit`` seconds after the start are killed.
        """
        folder, message = self.next_folder(), _world.message_of_call(case, arguments)
        with reserved_port() as port:
            launched = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            members = [
                _world.Member(rank, folder, worker.main_fresh, launched | {"RANK": str(rank)}, message)
                for rank in range(self.size)
            ]
            try:
                _world.collect(members, START_LIMIT)
                answers = _world.collect(members, limit)
            except BaseException:
                _world.abort(members)
                raise
            _world.abort([member for member, answer in zip(members, answers, strict=True) if answer is None])
            _world.dismiss(members)
            return [_outcome(*pair) for pair in zip(members, answers, strict=True)]


def open_sockets():
    """Number of sockets of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


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
