"""The test harness: a failing or hanging rank fails its test with stacks and does not harm later tests."""

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import CaseFailed
from tests.support.ranks import from_all_ranks, on_ranks


def sum_of_ranks(offset):
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_0():
    dist.barrier()  # every rank is in here when one fails
    if dist.get_rank() == 0:
        raise ValueError("the reason")
    dist.barrier()


def hang_on_rank_1():
    if dist.get_rank() == 1:
        threading.Event().wait()


def die_on_rank_0():
    if dist.get_rank() == 0:
        os._exit(3)


def process_id():
    return os.getpid()


def test_ranks_return_a_result_each_and_stay_alive_between_cases(world):
    assert world.run(sum_of_ranks, offset=10) == [sum(range(10, 10 + world.size))] * world.size
    assert world.run(process_id) == world.run(process_id)


@on_ranks(2)
def test_garbage_collection_of_workers_skips_modules_of_the_fork_server():
    assert all(frozen > 100_000 for frozen in from_all_ranks(gc.get_freeze_count()))


def test_exception_of_one_rank_fails_the_case(worlds):
    world = worlds(2)
    with pytest.raises(CaseFailed, match="the reason") as failure:
        world.run(fail_on_rank_0)
    assert isinstance(failure.value.errors[0], ValueError)
    assert "in fail_on_rank_0" in str(failure.value), "the stack of the rank that waits"
    assert world.run(sum_of_ranks, offset=0) == [1, 1]


@pytest.mark.parametrize("case", [hang_on_rank_1, die_on_rank_0])
def test_rank_without_an_answer_fails_the_case(worlds, case):
    world = worlds(2)
    world.run(sum_of_ranks, offset=0)
    with pytest.raises(CaseFailed, match=r"Rank \d gave no answer") as failure:
        world.run(case, limit=2)
    if case is hang_on_rank_1:
        assert "in hang_on_rank_1" in str(failure.value)
    assert world.run(sum_of_ranks, offset=0) == [1, 1]
