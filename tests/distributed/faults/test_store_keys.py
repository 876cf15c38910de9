"""Keys in the process group's store: they do not accumulate over failed steps, meetings, wrappers and groups."""

import gc
import tempfile
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from gradwire.comm import connections, connections_of, store_collectives
from gradwire.comm.store_collectives import RanksMissing, delete_on_last, store_all_gather
from tests.support.ranks import from_all_ranks, on_ranks, signals
from tests.support.training import error_of, failing_hook, train_steps, wrapped

LIMIT = timedelta(minutes=1)


def stores(folder):
    return {
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True),
        "FileStore": lambda: dist.FileStore(str(folder / "store"), 1),
        "HashStore": dist.HashStore,
    }


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore"])
def test_last_rank_deletes_the_keys_in_each_of_pytorchs_stores(kind, tmp_path):
    innermost = stores(tmp_path)[kind]()
    store = dist.PrefixStore("group", dist.PrefixStore("all", innermost))
    before = store.num_keys()
    for key in "ab":
        store.set(key, key)
    delete_on_last(store, "left", 2, ["a", "b", "never set"])
    assert store.check(["a", "b"])
    delete_on_last(store, "left", 2, ["a", "b", "never set"])
    assert not any(store.check([key]) for key in ("a", "b", "left"))
    assert store.num_keys() == before


@contextmanager
def counted_store(kind, group):
    """A function that counts the keys of the group's store once all ranks have come; a FileStore replaces it."""
    with ExitStack() as stack:
        store = dist.distributed_c10d._get_default_store()
        if kind == "FileStore":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = from_all_ranks(str(Path(folder) / "store"))[0]
            store = dist.FileStore(path, dist.get_world_size())
            for module in (connections, store_collectives):
                stack.enter_context(mock.patch.object(module, "gradwire_store", lambda _: dist.PrefixStore("a", store)))

        def n_keys():
            dist.barrier()
            number = store.num_keys()
            dist.barrier()
            return number

        yield n_keys
        dist.barrier()  # before the folder is removed


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore"])
@on_ranks(2, 3, limit=60)
def test_failed_steps_and_wrappers_leave_no_keys(kind):
    group = dist.new_group()
    with counted_store(kind, group) as n_keys:
        ddp, counts = wrapped(hook="fp16", group=group), []
        for number in range(3):
            train_steps(ddp)
            counts.append(n_keys())
            with failing_hook(ddp, 0 if dist.get_rank() == number % 2 else -1):
                assert error_of(train_steps, ddp) is not None
            ddp.resynchronize()
            if number == 1:
                ddp = wrapped(hook="powersgd", group=group)
    assert counts[1:] == counts[:1] * 2


@on_ranks(2, limit=60)
def test_released_wrappers_leave_no_keys():
    group, counts = dist.new_group(), []
    with counted_store("TCPStore", group) as n_keys:
        for _ in range(3):
            ddp = wrapped(group=group)
            ddp.reducer.exchange.announce_forward()
            counts.append(n_keys())
            del ddp
            gc.collect()
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("ends_in", ["a step", "an error"])
@on_ranks(2, 3, limit=60)
def test_destroyed_groups_leave_no_keys(ends_in):
    n_keys_of_pytorch = dist.get_world_size()
    with counted_store("TCPStore", None) as n_keys:
        before = n_keys()
        for _ in range(2):
            group = dist.new_group()
            ddp = wrapped(hook="fp16", group=group)
            train_steps(ddp)
            if ends_in == "an error":
                with failing_hook(ddp, 0 if dist.get_rank() == 0 else -1):
                    assert error_of(train_steps, ddp) is not None
            dist.barrier()
            dist.destroy_process_group(group)
            del group, ddp
            gc.collect()
        after = n_keys()
    assert after == before + 2 * n_keys_of_pytorch


@on_ranks(3, limit=60)
def test_last_rank_of_a_failed_meeting_deletes_its_keys():
    group, store, rank = dist.new_group(), signals("failed meeting"), dist.get_rank()
    with counted_store("TCPStore", group) as n_keys:
        before, signaled = n_keys(), 1
        if rank < 2:
            with pytest.raises(RanksMissing):
                store_all_gather(group, "meeting", "early", timedelta(seconds=1))
            store.add("given up", 1)
        while rank == 2 and store.add("given up", 0) < 2:
            pass
        met = store_all_gather(group, "meeting", str(rank))
        after = n_keys()
    assert met == ["0", "1", "2"]
    assert after == before + signaled


@on_ranks(2)
def test_notice_is_kept_until_the_last_rank_has_destroyed_the_group():
    group, store = dist.new_group(), signals("destroyed")
    found = connections_of(group)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        store.set("is destroyed", "")
    else:
        store.wait(["is destroyed"], LIMIT)
        assert found.failure_elsewhere() == "The process group was destroyed on rank 0."
        dist.destroy_process_group(group)
        assert found.failure_elsewhere() is None
