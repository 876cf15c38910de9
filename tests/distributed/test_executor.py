"""The worker of a CPU: several algorithms under way, futures in order, one order of collectives on all ranks."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_on_all_ranks

from gradwire.hooks import executor
from gradwire.hooks.executor import UNDER_WAY, executor_for

CPU = torch.device("cpu")
LIMIT = timedelta(minutes=1)
names = itertools.count()


def signals():
    """A store of this run's own, whose keys ranks set and wait for."""
    return dist.PrefixStore(f"test_executor/{next(names)}", dist.distributed_c10d._get_default_store())


def sums_of(worker, value, begun=lambda: None):
    """A task of one collective, which returns its sum and the address of its wire memory."""

    async def task(workspace):
        wire = workspace.wire(1000, torch.float32).fill_(value)
        begun()
        await worker.transport.all_reduce(wire)
        return wire[0].item(), wire.data_ptr()

    return worker.submit(task)


def begin_before_any_is_done():
    """Rank 0 begins as many tasks as may be under way; the other ranks come only then."""
    store, worker = signals(), executor_for(None, CPU)
    if dist.get_rank() != 0:
        store.wait(["begun"], LIMIT)
    left = iter(range(UNDER_WAY - 1, -1, -1))
    futures = [sums_of(worker, k, lambda: next(left) > 0 or store.set("begun", "")) for k in range(UNDER_WAY)]
    return [future.wait() for future in futures]


def test_several_tasks_are_under_way_each_with_its_own_memory(world):
    everywhere = world.run(begin_before_any_is_done)
    for results in everywhere:
        assert [total for total, _ in results] == [k * world.size for k in range(UNDER_WAY)]
    assert len({address for _, address in everywhere[0]}) == UNDER_WAY


def fail_while_another_waits():
    """The second task fails while the first waits for other ranks; whether the first was done before it was told."""
    store, worker = signals(), executor_for(None, CPU)

    async def failing(_):
        if dist.get_rank() == 0:
            store.set("failed", "")
        raise ValueError("expected")

    if dist.get_rank() != 0:
        store.wait(["failed"], LIMIT)
    first, second = sums_of(worker, 1), worker.submit(failing)
    try:
        second.wait()
    except ValueError:
        return first.done(), first.wait()[0], sums_of(worker, 2).wait()[0]


def test_a_failure_waits_its_turn_and_harms_no_other_task(world):
    assert world.run(fail_while_another_waits) == [(True, world.size, 2 * world.size)] * world.size


def interleave(counts):
    """Tasks of different numbers of collectives, each of which adds to what the one before gave."""
    worker = executor_for(None, CPU)

    async def task(value, count):
        for _ in range(count):
            await worker.transport.all_reduce(value)
            value += 1
        return value.item()

    values = [torch.tensor(float(k)) for k in range(len(counts))]
    futures = [worker.submit(lambda _, v=v, n=n: task(v, n)) for v, n in zip(values, counts, strict=True)]
    return [future.wait() for future in futures]


@pytest.mark.parametrize("counts", [(3, 1, 2), (0, 4, 0, 1, 1), (1, 2) * 10])
def test_tasks_of_any_number_of_collectives_run_together(world, counts):
    expected = []
    for k, count in enumerate(counts):
        value = k
        for _ in range(count):
            value = value * world.size + 1
        expected.append(value)
    results = world.run(interleave, counts=counts)
    assert_same_on_all_ranks(results)
    assert results[0] == expected


def outlive_groups():
    """Executors of groups that come and go; how many of them are left, and what the last one computes."""
    for _ in range(3):
        group = dist.new_group()
        total, _ = sums_of(executor_for(group, CPU), 1).wait()
        dist.destroy_process_group(group)
    alive = [group for group, _ in executor._executors.values() if group != dist.group.WORLD]
    return len(alive), total


def test_executors_of_destroyed_groups_are_let_go(world):
    assert world.run(outlive_groups) == [(1, world.size)] * world.size
