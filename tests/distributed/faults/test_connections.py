"""Connections of a process group after an error: executors, new groups and notices."""

import threading
from contextlib import ExitStack, suppress
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.comm import Task, connections_of, groups, transport, worker_executor
from gradwire.comm.connections import Connections
from gradwire.comm.store_collectives import POLL_SECONDS
from gradwire.exchange.bucket import Bucket
from gradwire.exchange.reduction import reduce_bucket
from gradwire.exchange.settings import settings_of
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks, signals
from tests.support.training import (
    SMALL,
    WRAPPERS,
    Fault,
    build,
    error_of,
    message_of,
    own_batches,
    train_steps,
    wrapped,
)

CPU = torch.device("cpu")


def failing_hook(algorithm, group, bucket):
    return reduce_bucket(connections_of(group), Bucket.of(bucket), algorithm, settings_of("failing"))


@on_ranks(1)
def test_abandoned_executor_touches_no_gradient_later():
    executor = connections_of(dist.new_group()).executor(CPU)
    is_running, may_end, has_returned = threading.Event(), threading.Event(), threading.Event()
    gradient = torch.zeros(3)

    async def task(_):
        is_running.set()
        may_end.wait()
        gradient.fill_(1)

    future = executor.submit(Task(task))
    is_running.wait()

    def abandon():
        executor.abandon()
        seen.append(gradient.clone())
        has_returned.set()

    seen = []
    thread = threading.Thread(target=abandon)
    thread.start()
    returned_early = has_returned.wait(POLL_SECONDS)
    may_end.set()
    thread.join()
    error_of(future.wait)
    assert not returned_early
    assert_same_bits(seen, [torch.ones(3)])


@on_ranks(2, limit=90)
def test_new_wrapper_on_the_group_of_a_failed_task_trains():
    group = dist.new_group(timeout=timedelta(seconds=30))
    old = WRAPPERS["pytorch"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)

    async def fail_on_rank_0(step):
        if dist.get_rank() == 0:
            raise Fault
        await step.transport.all_reduce(torch.ones(3))

    old.register_comm_hook(None, lambda _, bucket: failing_hook(fail_on_rank_0, group, bucket))
    batch = old.module.batch(own_batches())
    error = error_of(lambda: old(*batch).backward())
    assert error[0] == "RuntimeError"
    seen = train_steps(wrapped(group=group, hook="fp16"), 2)
    assert_same_on_all_ranks(from_all_ranks(seen))
    assert all(gradient.isfinite().all() for gradient in seen[1].values())


@on_ranks(2)
def test_rank_uses_a_new_group_only_after_all_ranks_have_connected():
    store, make = signals("connected"), groups.OwnGroup
    returned = []

    def slow_group(*arguments):
        """Rank 1 begins to use the group a moment after rank 0 has connected."""
        made = make(*arguments)
        with suppress(RuntimeError):
            store.wait(["rank 0 uses it"], timedelta(seconds=1))
            returned.append("too early")
        return made

    found = Connections(dist.new_group())
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(groups, "OwnGroup", slow_group))
        found.transport("backward", CPU)
        store.set(f"rank {dist.get_rank()} uses it", "")
    dist.barrier()
    found.end()
    assert returned == []


@on_ranks(2, limit=90)
def test_failed_task_of_pytorchs_ddp_raises_on_connected_peer():
    group = dist.new_group(timeout=timedelta(seconds=60))
    ddp = WRAPPERS["pytorch"](build("mlp"), process_group=group, bucket_cap_mb=SMALL)

    async def fail_on_rank_0(step):
        await step.transport.all_reduce(torch.ones(3))
        if dist.get_rank() == 0:
            raise Fault("from the algorithm")
        await step.transport.all_reduce(torch.ones(3))

    ddp.register_comm_hook(None, lambda _, bucket: failing_hook(fail_on_rank_0, group, bucket))
    batch, open_groups = ddp.module.batch(own_batches()), []

    def keep_open(last):
        open_groups.extend(last)
        last.clear()

    with ExitStack() as stack:
        for module in (worker_executor, transport):
            stack.enter_context(mock.patch.object(module, "destroy", keep_open))
        message = message_of(lambda: ddp(*batch).backward())
        dist.barrier()
    assert "from the algorithm" in message
    if dist.get_rank() == 1:
        assert "A gradient exchange failed on rank 0" in message


@on_ranks(2)
def test_reason_of_the_rank_that_leaves_first_is_kept():
    found = connections_of(dist.new_group())
    for rank in range(2):
        if dist.get_rank() == rank:
            found.fail(f"reason of rank {rank}")
        dist.barrier()
    assert found.failure_elsewhere() == "reason of rank 0"


@on_ranks(1)
def test_threads_that_begin_at_once_get_the_same_connections():
    group, found, made, both = dist.new_group(), [], Connections.__init__, threading.Event()

    def begin(self, group):
        made(self, group)
        if threading.current_thread() is first:  # the other thread has begun, and maybe makes connections too
            second.start()
            both.wait(0.5)
        else:
            both.set()

    first, second = (threading.Thread(target=lambda: found.append(connections_of(group))) for _ in range(2))
    with mock.patch.object(Connections, "__init__", begin):
        first.start()
        first.join()
        second.join()
    assert found[0] is found[1]


@on_ranks(2)
def test_collectives_on_another_type_of_device_take_the_process_group_itself():
    group = dist.new_group()
    own, shared = (connections_of(group).transport("test", torch.device(kind)) for kind in ("cpu", "cuda"))
    assert isinstance(own.group, groups.OwnGroup)
    assert shared.group is group
