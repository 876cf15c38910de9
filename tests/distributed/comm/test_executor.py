"""`WorkerExecutor`: several tasks in flight, futures in order, one order of collectives on all ranks."""

import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import Task, connections
from gradwire.comm.connections import executor_for
from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT
from tests.support.ranks import from_all_ranks, on_ranks, signals
from tests.support.training import error_of

CPU = torch.device("cpu")
LIMIT = timedelta(minutes=1)


def sums_of(worker, value, begun=lambda: None):
    """A task of one collective, which returns its sum and the address of its wire memory."""

    async def task(workspace):
        wire = workspace.wire(1000, torch.float32).fill_(value)
        begun()
        await worker.transport.all_reduce(wire)
        return wire[0].item(), wire.data_ptr()

    return worker.submit(Task(task))


@on_ranks(2, 3)
def test_tasks_in_flight_use_separate_workspaces():
    store, worker = signals("separate workspaces"), executor_for(None, CPU)
    if dist.get_rank() != 0:
        store.wait(["begun"], LIMIT)
    left = iter(range(MAX_TASKS_IN_FLIGHT - 1, -1, -1))
    futures = [sums_of(worker, k, lambda: next(left) > 0 or store.set("begun", "")) for k in range(MAX_TASKS_IN_FLIGHT)]
    everywhere = from_all_ranks([future.wait() for future in futures])
    for results in everywhere:
        assert [total for total, _ in results] == [k * dist.get_world_size() for k in range(MAX_TASKS_IN_FLIGHT)]
    assert len({address for _, address in everywhere[0]}) == MAX_TASKS_IN_FLIGHT


def new_executor():
    """An executor of this run's own, which may fail."""
    return connections.connections_of(dist.new_group()).executor(CPU)


@on_ranks(2, 3)
def test_failed_task_lets_earlier_tasks_finish_and_fails_later_ones():
    store, worker = signals("failed task"), new_executor()

    async def failing(_):
        if dist.get_rank() == 0:
            store.set("failed", "")
        raise ValueError("expected")

    if dist.get_rank() != 0:
        store.wait(["failed"], LIMIT)
    first, second, third = sums_of(worker, 1), worker.submit(Task(failing)), sums_of(worker, 2)
    errors = [error_of(future.wait) for future in (second, third, sums_of(worker, 3))]
    assert errors == [("ValueError", "expected")] * 3
    assert first.done()
    assert first.wait()[0] == dist.get_world_size()


async def all_reduce_twice(transport, interrupt):
    value = torch.ones(3)
    interrupt(0)
    await transport.all_reduce(value)
    interrupt(1)
    await transport.all_reduce(value)
    interrupt(2)
    return value[0].item()


async def two_shots(transport, interrupt):
    """A sum of two ones and a square; the messages are longer than what a connection holds on its way."""
    sent = torch.ones(3, transport.world_size, 1 << 20, dtype=torch.uint8)
    received, gathered = torch.zeros_like(sent), torch.zeros_like(sent)
    interrupt(0)
    await transport.all_to_all(received, sent)
    own = received.sum(1, dtype=torch.uint8)
    interrupt(1)
    await transport.all_gather(gathered, own * own)
    interrupt(2)
    assert (gathered == gathered[0, 0, 0]).all()
    return gathered[0, 0, 0].item()


EXCHANGES = {"all-reduces": all_reduce_twice, "shots": two_shots}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
@on_ranks(2, 3)
def test_task_failure_on_one_rank_raises_on_all_others(exchange, at):
    worker = new_executor()
    fails = dist.get_rank() == dist.get_world_size() - 1

    def submit(k):
        def interrupt(stage):
            if fails and k == 1 and stage == at:
                raise ValueError("expected")

        return worker.submit(Task(lambda _: EXCHANGES[exchange](worker.transport, interrupt)))

    futures = [submit(k) for k in range(4)]
    errors = [error and error[0] for error in map(error_of, [future.wait for future in futures])]
    # The failed task is complete on other ranks if it failed after its last collective; no sum is ever wrong.
    kind = "ValueError" if fails else "RuntimeError"
    assert errors == [None, None if at == 2 and not fails else kind, kind, kind]
    for future, error in zip(futures, errors, strict=True):
        assert error is not None or future.wait() == dist.get_world_size() ** 2


@on_ranks(2, 3)
def test_peer_lost_between_shots_raises_and_closes_the_groups():
    others, worker = set(threading.enumerate()), new_executor()
    groups = [weakref.ref(worker.transport.group), weakref.ref(worker._later)]
    dist.barrier()

    async def first_shot(_):
        sent = torch.ones(3, worker.transport.world_size, 1 << 20, dtype=torch.uint8)
        await worker.transport.all_to_all(torch.zeros_like(sent), sent)

    if dist.get_rank() != 0:
        worker.submit(Task(first_shot)).wait()
        worker.close(60)
        return
    assert (
        error_of(worker.submit(Task(lambda _: two_shots(worker.transport, lambda stage: None))).wait)[0]
        == "RuntimeError"
    )
    worker.close(60)
    for thread in set(threading.enumerate()) - others:  # the worker, and the one in which the groups close
        thread.join(60)
    assert [group() for group in groups] == [None, None]


@on_ranks(2, 3)
def test_connections_end_with_their_process_group():
    before = len(connections._connections)
    for _ in range(3):
        group = dist.new_group()
        total, _ = sums_of(executor_for(group, CPU), 1).wait()
        dist.destroy_process_group(group)
    assert (len(connections._connections) - before, total) == (0, dist.get_world_size())


@on_ranks(1)
def test_devices_without_cuda_streams_are_refused_by_name():
    made = connections.connections_of(dist.new_group())
    errors = {kind: error_of(made.executor, torch.device(kind)) for kind in ("xpu", "hpu", "mps", "meta")}
    for kind, (error, message) in errors.items():
        assert error == "NotImplementedError"
        assert f"The gradients are on {kind}; gradwire runs on CUDA and ROCm GPUs" in message
