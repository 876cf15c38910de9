"""Destroyed and reinitialized process groups: everything that gradwire opens for a group ends with it."""

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.harness import open_sockets
from tests.support.ranks import on_ranks, signals
from tests.support.states import START, STATES, Ledger, Training, errors_of
from tests.support.training import WRAPPERS, build, gradients, message_of, train_steps, wrapped
from tests.support.worker import leave_group

N_CYCLES = 10


def open_handles():
    """Threads and sockets of this process."""
    return len([*Path("/proc/self/task").iterdir()]), open_sockets()


def open_handles_at_last(expected):
    """Threads and sockets, once there are no more than expected, or after ten seconds.

    The thread of a store's server closes the sockets of clients that have left at a time of its own.
    """
    deadline = time.monotonic() + 10
    while True:
        handles = open_handles()
        if all(now <= then for now, then in zip(handles, expected, strict=True)) or time.monotonic() > deadline:
            return handles


def train(hook):
    ddp = wrapped(model="conv", hook=None if hook == "none" else hook)
    train_steps(ddp, 4)
    return ddp


def train_in_groups(hook, rendezvous, signals):
    """The gradients of a training in each of several default groups, and the handles that are left of all of them.

    Ranks wait for each other after every group, by a store in the file ``signals``.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    together = dist.FileStore(signals, size)
    reused = None
    if rendezvous == "reused store":
        port = int(os.environ["MASTER_PORT"])
        reused = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(minutes=2))

    def begin(cycle):
        if reused is None:
            dist.init_process_group("gloo")
        else:
            store = dist.PrefixStore(str(cycle), reused)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    begin("without gradwire")
    dist.barrier()
    leave_group(together, "without gradwire")
    before = open_handles()
    results = []
    for cycle in range(N_CYCLES):
        begin(cycle)
        results.append(gradients(train(hook)))
        gc.collect()  # a wrapped model is a cycle, and holds its group, whose store is on the port of the next one
        leave_group(together, cycle)
    return results, before, open_handles_at_last(before)


QUICK = [("powersgd", "reused store")]


@pytest.mark.parametrize(
    ("hook", "rendezvous"),
    [
        pytest.param(hook, place, marks=[pytest.mark.slow] * ((hook, place) not in QUICK))
        for hook in ("none", "fp16", "scaled_fp16", "powersgd", "fp16_of_powersgd")
        for place in ("env://", "reused store")
    ],
)
def test_reinitialized_process_group_trains_and_leaves_nothing_open(worlds, tmp_path, hook, rendezvous):
    signals = str(tmp_path / "signals")
    outcomes = worlds(2).run_fresh(train_in_groups, hook=hook, rendezvous=rendezvous, signals=signals)
    assert_nothing_open(outcomes)
    results = [outcome.value[0] for outcome in outcomes]
    assert_same_on_all_ranks(results)
    assert len(results[0]) == N_CYCLES
    for cycle in results[0][1:]:
        assert_same_bits(cycle, results[0][0])


def assert_nothing_open(outcomes):
    for outcome in outcomes:
        assert outcome.how == "returned", outcome
        _, before, after = outcome.value
        assert all(now <= then for now, then in zip(after, before, strict=True)), "threads and sockets"


def destroy_on_one_rank(hook):
    """Error messages of the two steps after a rank destroys the process group."""
    dist.init_process_group("gloo")
    ddp = train(hook)
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    return [message_of(train_steps, ddp, 1, torch.Generator()) for _ in range(2)]


@pytest.mark.parametrize("hook", ["none", "fp16", "scaled_fp16", "powersgd"])
def test_process_group_destroyed_on_one_rank_raises_on_all(worlds, hook):
    here, peer = worlds(2).run_fresh(destroy_on_one_rank, hook=hook)
    assert here.how == peer.how == "returned", (here, peer)
    assert len(here.value) == len(peer.value) == 2
    assert all("The process group was destroyed" in text for text in here.value)
    assert "The process group was destroyed on rank 0" in peer.value[0]
    assert "resynchronize()" in peer.value[1]


class Forwarding(dist.ProcessGroup):
    """A process group in Python, which passes its collectives on to a gloo group."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "forwarding"

    def allreduce(self, tensors, options=None):
        return self.gloo.allreduce(tensors, options or dist.AllreduceOptions())

    def allgather(self, gathered, tensors, options=None):
        return self.gloo.allgather(gathered, tensors)

    def broadcast(self, tensors, options=None):
        return self.gloo.broadcast(tensors, options or dist.BroadcastOptions())


@on_ranks(2, 3)
def test_process_group_in_python_is_refused_as_unknown_and_averages_once_it_is_registered():
    store = signals("a group in Python")
    unknown = Forwarding(store, dist.get_rank(), dist.get_world_size(), timedelta(minutes=1))
    for use in (
        lambda: wrapped(group=unknown),
        lambda: train_steps(wrapped("pytorch", group=unknown, hook="fp16")),
        lambda: gradwire.collectives.all_reduce(torch.ones(8), group=unknown, wire="int8"),
    ):
        message = message_of(use)
        assert message.startswith("torch.distributed does not know this process group, a Forwarding, ")
        assert "new_group(backend=...)" in message and "destroyed" not in message
    dist.Backend.register_backend("forwarding", Forwarding, devices=["cpu"])
    group = dist.new_group(backend="forwarding")
    assert type(group) is Forwarding
    assert_same_bits(train_steps(wrapped(group=group), 3), train_steps(wrapped(), 3))


# --- another process group after some steps


def train_in_another_group(kind, wrapper, first, then):
    """Train in one of the groups of ranks ``first``, then in the group of ranks ``then``; None on other ranks.

    Returns the gradients of the later steps, and the names of which more was lost in them than by rounding; or the
    error of a step.
    """
    rank = dist.get_rank()
    (group,) = (each for ranks in first if (each := dist.new_group(ranks)) is not dist.GroupMember.NON_GROUP_MEMBER)
    training = Training(kind, wrapper, group=group)
    training.run(START + 2)
    group = dist.new_group(then)
    if rank not in then:
        return None
    training.ddp._update_process_group(group)
    training.state.process_group = group
    local, ledger = build("mlp"), Ledger(training.module, group)
    if kind != "scaled_fp16":
        for name, error in errors_of(training.state.state_dict()).items():
            ledger.lost[name] += error
    generator, seen = torch.Generator().manual_seed(rank), []
    for _ in range(4):
        batch = local.batch(generator)
        for each in (local, training.ddp):
            each.zero_grad()
            if (error := message_of(each(*batch).backward)) is not None:
                return error
        seen.append(gradients(training.module))
        ledger.add(gradients(local), seen[-1])
    if kind != "scaled_fp16":
        return seen, ledger.close(training.state)
    # Each step rounds to fp16 as many times as there are ranks, and once more.
    bound = {name: (len(then) + 1) * 2.0**-11 * size.max() for name, size in ledger.size.items()}
    return seen, [name for name, lost in ledger.lost.items() if (lost.abs() > bound[name]).any()]


MOVES = {"fewer": ([[0, 1, 2]], [1, 2]), "more": ([[0, 1], [2]], [0, 1, 2]), "others": ([[0, 1], [2]], [1, 2])}


@pytest.mark.parametrize(
    ("move", "wrapper"),
    [
        pytest.param(move, wrapper, marks=[pytest.mark.slow] * (wrapper == "pytorch" or move == "fewer"))
        for move in MOVES
        for wrapper in WRAPPERS
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("int4", "powersgd", "scaled_fp16") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in STATES
        if kind != "int4_on_nodes"  # of a fixed size
    ],
)
def test_state_follows_its_process_group_to_other_ranks(worlds, kind, move, wrapper):
    first, then = MOVES[move]
    results = worlds(3).run(train_in_another_group, kind=kind, wrapper=wrapper, first=first, then=then)
    moved = [results[rank] for rank in then]
    assert_same_on_all_ranks(moved)
    if kind == "powersgd_alternating" and len(first) > 1:
        # Each group has factors of its own, of which a step sends one side only.
        assert "memory p: 4, digest" in moved[0]
    else:
        assert moved[0][1] == [], "law 1"
