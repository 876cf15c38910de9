"""Requests to the store that have no answer or fail, and meetings of which some ranks are missing."""

import threading
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from gradwire.comm import store_collectives
from gradwire.comm.store_collectives import RanksMissing, StoreRequests, gradwire_store, store_all_gather
from tests.support.ranks import on_ranks, signals

LIMIT = timedelta(minutes=1)


@on_ranks(3)
def test_missing_rank_of_a_subgroup_is_named_by_global_rank():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        with pytest.raises(RanksMissing, match=r"ranks \[2\] have not made it") as caught:
            store_all_gather(group, "meeting", "here", timedelta(seconds=0.5))
        assert caught.value.ranks == [2]


def test_request_without_an_answer_blocks_neither_itself_nor_later_ones():
    is_back, made = threading.Event(), []
    notices = StoreRequests(None)

    def request(store, number):
        made.append(number)
        if number == 1:
            is_back.wait()
        return number

    assert notices.ask(lambda store: request(store, 0)) == 0
    assert notices.ask(lambda store: request(store, 1), seconds=0.01) is None
    assert notices.ask(lambda store: request(store, 2)) is None
    notices.tell(lambda store: request(store, 3))
    assert made == [0, 1]
    is_back.set()
    while 3 not in made or notices.is_stuck:
        pass
    assert notices.ask(lambda store: request(store, 4)) == 4
    assert made == [0, 1, 3, 4]


def test_error_of_a_required_request_is_the_cause_of_the_error():
    def request(store):
        raise KeyError("of the request")

    with pytest.raises(RuntimeError, match="has ended or has given no answer") as caught:
        StoreRequests(None).require(request, LIMIT)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("outcome", ["met", "failed"])
@on_ranks(2)
def test_store_gather_has_the_outcome_of_the_first_rank_on_all_ranks(outcome):
    expected = ["of rank 0", "of rank 1"] if outcome == "met" else "RanksMissing"
    store, group, rank = signals(outcome), dist.new_group(), dist.get_rank()
    decided = [f"meet/{outcome}/1/outcome"]

    def see_nobody(*_):
        """Give up; where the ranks meet, only once the other has seen all."""
        if outcome == "met":
            gradwire_store(group).wait(decided, LIMIT)
        else:
            store.wait(["other is here"], LIMIT)
        return [1 - rank]

    def see_all(*_):
        if outcome == "failed":
            store.set("other is here", "")
            gradwire_store(group).wait(decided, LIMIT)
        return []

    with ExitStack() as stack:
        if outcome == "failed" or rank == 0:
            wait = see_nobody if rank == 0 else see_all
            stack.enter_context(mock.patch.object(store_collectives, "wait_for_ranks", wait))
        try:
            first = store_all_gather(group, outcome, f"of rank {rank}", timeout=timedelta(seconds=10))
        except RanksMissing:
            first = "RanksMissing"
    assert (first, store_all_gather(group, outcome, f"again {rank}")) == (expected, ["again 0", "again 1"])
