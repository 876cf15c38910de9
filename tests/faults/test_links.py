"""Links that are cut, or lose all packets in one direction, between ranks in network namespaces of their own."""

import os
import time
from contextlib import contextmanager

import pytest

from gradwire.bench import namespaces
from tests.support.faulty_run import check_end, started
from tests.support.training import WRAPPERS

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(namespaces.obstacle() is not None, reason=str(namespaces.obstacle())),
]
STEPS = 300  # more than a run takes until the link fails
NOWHERE = "02:00:00:00:00:99"  # the MAC address of no interface


def options(hook, wrapper, timeout_s, **others):
    training = {"hook": hook, "wrapper": wrapper, "steps": STEPS, "timeout_s": timeout_s}
    return training | {"how": None, "place": None, "victim": None, "at": None} | others


def cut(seconds):
    """Take down the link of the second host for a time."""
    with namespaces.NetNS(f"gradwire-{os.getpid()}-bridge", flags=0) as bridge:
        bridge.link("set", ifname="port1", state="down")
        time.sleep(seconds)
        bridge.link("set", ifname="port1", state="up")


@contextmanager
def one_way(here, there):
    """Lose all packets from one host to another."""
    with namespaces.NetNS(here.name, flags=0) as space:
        neighbor = {"dst": there.address, "ifindex": space.link_lookup(ifname=namespaces.INTERFACE)[0]}
        space.neigh("replace", lladdr=NOWHERE, state="permanent", **neighbor)
        yield
        space.neigh("del", **neighbor)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "fp16"])
def test_link_that_is_cut_for_six_seconds_changes_nothing(tmp_path, hook, wrapper):
    with namespaces.hosts(2) as hosts, started(2, tmp_path, hosts=hosts, **options(hook, wrapper, 60)) as ranks:
        ranks[0].wait_for_step(50)
        cut(6)
        check_end(ranks, hook, [0, 0])
    assert [len(rank.steps()) for rank in ranks] == [STEPS, STEPS]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "fp16"])
def test_link_that_is_cut_for_longer_than_the_timeout_raises_on_both_ranks(tmp_path, hook, wrapper):
    with namespaces.hosts(2) as hosts, started(2, tmp_path, hosts=hosts, **options(hook, wrapper, 8)) as ranks:
        ranks[0].wait_for_step(50)
        cut(20)
        check_end(ranks, hook, [1, 1])


@pytest.mark.parametrize("hook", ["none", "int4", "powersgd"])
def test_ranks_resume_once_a_link_is_back(tmp_path, hook):
    resuming = options(hook, "gradwire", 8, resumes=True)
    with namespaces.hosts(2) as hosts, started(2, tmp_path, hosts=hosts, **resuming) as ranks:
        ranks[0].wait_for_step(50)
        cut(20)
        check_end(ranks, hook, [0, 0])
    assert any("raised" in fact for fact in ranks[0].facts())


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "fp16"])
def test_link_that_loses_one_direction_raises_on_both_ranks(tmp_path, hook, sender):
    with namespaces.hosts(2) as hosts, started(2, tmp_path, hosts=hosts, **options(hook, "gradwire", 8)) as ranks:
        ranks[0].wait_for_step(50)
        with one_way(hosts[sender], hosts[1 - sender]):
            check_end(ranks, hook, [1, 1])


@pytest.mark.parametrize("hook", ["none", "int4", "powersgd", "fp16"])
def test_slow_link_with_a_delay_changes_nothing(tmp_path, hook):
    with (
        namespaces.hosts(2, delay_ms=40) as hosts,
        started(2, tmp_path, hosts=hosts, **options(hook, "gradwire", 60, steps=20)) as ranks,
    ):
        check_end(ranks, hook, [0, 0])
    assert [len(rank.steps()) for rank in ranks] == [20, 20]
