"""A rank of `World.run_fresh`: one case on its own, which makes its process groups."""

import faulthandler
import os
import pickle
from contextlib import suppress

import torch
import torch.distributed as dist

from gradwire.testing._world import LAST_RESORT, answer_to, write_output_to


def main_fresh(connection, log, environment, message):
    """One case in ``environment``; after its answer the process stays until the other side closes the connection."""
    write_output_to(log)
    os.environ.update(environment)
    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps(("result", None)))
    faulthandler.dump_traceback_later(LAST_RESORT, exit=True, file=2)
    connection.send_bytes(answer_to(message))
    with suppress(EOFError, ConnectionError):
        connection.recv_bytes()
    os._exit(0)  # a group that is still open would wait for its peers


def leave_group(together, cycle):
    """Destroy the default group, and wait until every rank has done so.

    A rank that joins the next group while rank 0 still serves the store of the last one would connect to that store.
    So ranks wait through ``together``, a store that outlives the group, under ``cycle``, a new name.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    together.set(f"{cycle}/{rank}", "")
    together.wait([f"{cycle}/{other}" for other in range(size)])
