"""`GroupTransport`: how many sparse all-reduces are in flight, and what it counts."""

import threading
import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gradwire.comm import GroupTransport
from gradwire.comm.groups import duplicate_group
from tests.support.ranks import on_ranks, signals
from tests.support.training import error_of


class Unfinished:
    """A collective, and its future, that is done once somebody waits for it."""

    def __init__(self, tensor):
        self.is_sparse = tensor.is_sparse
        self.is_done = False

    def get_future(self):
        return self

    def then(self, _):
        return self

    def wait(self):
        self.is_done = True


# Two of a group corrupt the heap, within seconds (docs/log/communication.md).
def test_sparse_all_reduces_run_one_at_a_time():
    works = []

    def allreduce(tensors, options):
        (tensor,) = tensors
        works.append(Unfinished(tensor))
        assert sum(work.is_sparse and not work.is_done for work in works) <= 1
        return works[-1]

    transport = GroupTransport(SimpleNamespace(size=lambda: 2, rank=lambda: 0, allreduce=allreduce))
    dense, sparse = torch.ones(3), torch.eye(3).to_sparse()
    for tensor in [sparse, dense, sparse, dense, sparse]:
        transport.start(transport.all_reduce(tensor))
    assert [work.is_done for work in works] == [True, False, True, False, False]


@on_ranks(2, 3, limit=60)
def test_closed_transport_ends_its_collectives_at_once_on_all_ranks():
    # Neither a timeout nor a peer ends them: the group's timeout is ten minutes, and no peer takes part or leaves.
    store = signals("cut")
    group = duplicate_group(dist.group.WORLD, store, "cut", lambda: None)
    transport, is_alive = GroupTransport(group), weakref.ref(group)
    del group
    value = torch.ones(1 << 20)
    transport.wait(transport.start(transport.all_reduce(value))[0])
    dist.barrier()
    if dist.get_rank() > 0:
        store.wait(["closed"])
        assert error_of(lambda: transport.wait(transport.start(transport.all_reduce(torch.ones(3)))[0])) is not None
        return
    works, done = [transport.start(transport.all_reduce(torch.ones(3)))[0] for _ in range(5)], []
    for work in works:
        work.get_future().add_done_callback(lambda _: done.append(threading.current_thread()))
    transport.close()
    assert len(done) == 5
    assert is_alive() is None
    store.set("closed", "")
    assert [error_of(work.wait)[0] for work in works] == ["RuntimeError"] * 5
