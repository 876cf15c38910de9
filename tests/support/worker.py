"""A rank of a `harness.World`: runs cases in the default group until it is told to end, or one case on its own."""

import faulthandler
import gc
import importlib
import os
import pickle
import resource
import threading
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.comm.connections import connections_of

ENVIRONMENT = {"GRADWIRE_KERNELS": "torch", "OMP_NUM_THREADS": "1"}
# When the test process itself has gone, nobody ends a worker that hangs.
LAST_RESORT = 600.0


def run(message):
    """Answer one message.

    ("result", value, `is_spent`) or ("error", exception or None, traceback, type's name, text).
    """
    module, name, arguments = pickle.loads(message)
    try:
        torch.manual_seed(0)
        case = getattr(importlib.import_module(module), name)
        value = pickle.dumps(case(**pickle.loads(arguments)))
        return pickle.dumps(("result", value, is_spent()))
    except Exception as error:
        answer = "error", pickled(error), traceback.format_exc(), type(error).__name__, str(error)
        return pickle.dumps(answer)


def is_spent():
    """Whether later cases need new processes.

    After a failed exchange on the default group. Also while a group of gradwire's own closes: ranks that wait for each
    other keep it open until its timeout, and gloo's thread spins once data has come that no collective here takes.
    """
    closing = any(thread.name == "gradwire closes a group" for thread in threading.enumerate())
    return closing or (dist.is_initialized() and connections_of(None).has_failed)


def pickled(error):
    try:
        pickle.loads(pickle.dumps(error))
        return pickle.dumps(error)
    except Exception:
        return None


def write_output_to(log):
    """Both streams, also of threads in C++, go to a file that the test process reads after a failure."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(connection, log, rank, size, rendezvous):
    """Cases in the default group, one after another."""
    write_output_to(log)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=LAST_RESORT)
    )
    connection.send_bytes(pickle.dumps(("result", None)))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # a group that is still open would wait for its peers
        faulthandler.dump_traceback_later(LAST_RESORT, exit=True, file=2)
        answer = run(message)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # a wrapped model is a cycle, and watches its parameters as long as it lives
        connection.send_bytes(answer)


def main_fresh(connection, log, environment, message):
    """One case in ``environment``; after its answer the process stays until the other side closes the connection."""
    write_output_to(log)
    os.environ.update(environment)
    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps(("result", None)))
    faulthandler.dump_traceback_later(LAST_RESORT, exit=True, file=2)
    connection.send_bytes(run(message))
    with suppress(EOFError, ConnectionError):
        connection.recv_bytes()
    os._exit(0)  # a group that is still open would wait for its peers


def join_group(timeout=None):
    """Make the default gloo group of a fresh case.

    Args:
        timeout: seconds, of the group's collectives only; ranks may take longer to join, on a busy machine.
    """
    dist.init_process_group("gloo")
    if timeout is not None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))


def leave_group(together, cycle):
    """Destroy the default group, and wait until every rank has done so.

    A rank that joins the next group while rank 0 still serves the store of the last one would connect to that store.

    Args:
        together: a store of all ranks that outlives the group.
        cycle: a name for this group, one that was not used before.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    together.set(f"{cycle}/{rank}", "")
    together.wait([f"{cycle}/{other}" for other in range(size)])
