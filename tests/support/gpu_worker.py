"""A rank of `World` that shares this machine's GPU with the others, over NCCL: ``GRADWIRE_TESTS_ON=cuda pytest tests``.

Tests that name no device get the GPU, which is PyTorch's default device there. Tests that need gloo fail. With
``GRADWIRE_TESTS_ON=rehearsal`` the ranks compute on the CPU, in groups with the rules of NCCL, and tell which tests do.
"""

import gc
import os
import sys
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.testing import _world

SHARED_GPU = os.environ.get("GRADWIRE_TESTS_ON")
TIMEOUT = 60.0  # seconds; over NCCL, peers of a failed rank wait for it


def serve(connection, log, rank, size, rendezvous):
    """Make calls in the default group, one after another."""
    from gradwire.bench.gpu.worker import SHARED_GPU as NCCL
    from tests.support import rehearsal

    _world.write_output_to(log)
    gc.freeze()
    options = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": size}
    options["timeout"] = timedelta(seconds=TIMEOUT)
    with ExitStack() as stack:
        if SHARED_GPU == "rehearsal":
            dist.init_process_group(rehearsal.enter(stack), **options)
        else:
            os.environ.update(NCCL, NCCL_HOSTID=f"rank-{rank}")
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
            torch.set_default_device(device)
            torch.Generator = generator_on(device, torch.Generator)
            dist.init_process_group("nccl", device_id=device, **options)
        _world.answer_calls(connection)


def generator_on(device, generator):
    """``generator``, on this device if a test makes it without one: default devices do not apply to generators."""

    def made(*arguments, **options):
        in_test = sys._getframe(1).f_globals["__name__"].startswith("tests.")
        return generator(*arguments, **options) if arguments or options or not in_test else generator(device)

    return made
