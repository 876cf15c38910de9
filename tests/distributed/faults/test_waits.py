"""Waits through the store end: after the group's timeout, when a peer leaves, and when the store gives no answer."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import connections_of
from gradwire.comm.store_collectives import RanksMissing, StoreRequests, gather_json, store_all_gather
from tests.support.ranks import from_all_ranks, on_ranks, signals

SHORT = timedelta(seconds=1)


def test_store_that_gives_no_answer_raises_within_the_timeout():
    answer = threading.Event()
    requests = StoreRequests(dist.HashStore())
    with pytest.raises(RuntimeError, match="Rank 0, which hosts the store of this process group, has ended or has"):
        requests.require(lambda _: answer.wait(), SHORT)
    answer.set()


WAITS = {
    "meeting": lambda group, check: store_all_gather(group, "meeting", "here", check=check),
    "values": lambda group, check: gather_json(group, "values", 1, check),
    "nodes": lambda group, check: connections_of(group).nodes(),
    "connections": lambda group, check: connections_of(group).transport("first", torch.device("cpu"), check),
}


@pytest.mark.parametrize("wait", WAITS)
@on_ranks(3, limit=30)
def test_wait_ends_after_the_groups_timeout_and_names_the_missing_rank(wait):
    group = dist.new_group(timeout=SHORT)
    error = None
    if dist.get_rank() < 2:
        with pytest.raises((RanksMissing, RuntimeError)) as caught:
            WAITS[wait](group, lambda: None)
        error = str(caught.value)
        assert "anks [2] have not" in error
        assert str(SHORT) in error
    assert [each is None for each in from_all_ranks(error)] == [False, False, True]


@pytest.mark.parametrize("wait", ["meeting", "values", "connections"])
@on_ranks(2, limit=30)
def test_wait_ends_when_a_peer_leaves(wait):
    # The group's timeout is much longer than the limit of the test.
    group, store = dist.new_group(), signals(f"peer leaves, {wait}")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="expected"):
            WAITS[wait](group, connections_of(group).check_peers)
        store.set("done", "")
    else:
        connections_of(group).fail("expected")
        store.wait(["done"], timedelta(seconds=20))
