"""Cases that go wrong, for test_gpu_lane.py; processes that it starts import this module by its name."""

import torch.distributed as dist

from gradwire.bench.gpu.case import Skipped


def one_rank_raises(device):
    print("rank", dist.get_rank(), "was here")
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 cannot")
    dist.barrier()


def all_pass(device):
    print("rank", dist.get_rank(), "passes")


def is_skipped(device):
    raise Skipped("for a reason")
