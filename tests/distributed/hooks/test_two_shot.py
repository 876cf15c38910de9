"""The two shots of an all-reduce, all-to-all and all-gather: on gloo groups, in an executor, in a single process."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import GroupTransport, Task, Transport, run_algorithm
from gradwire.comm.connections import connections_of, executor_for
from gradwire.comm.transport import MAX_CELL_BYTES, MAX_PIECES, pieces_on_gloo
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
SHAPES = [(1, 16), (3, 48), (8, 1), (2, 70_000), (4, 0), (0, 16)]  # pieces, bytes per cell


def message(rank, pieces, world_size, nbytes):
    """The message of a rank; every cell of every rank has bytes of its own."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (pieces, world_size, nbytes), dtype=torch.uint8, generator=generator)


def poisoned(*shape):
    return torch.full(shape, 255, dtype=torch.uint8)


async def two_shots(transport, sent):
    """The cells that this rank gets of every message, and the first bytes of every rank's cells."""
    received = poisoned(*sent.shape)
    await transport.all_to_all(received, sent)
    own = received.sum(1, dtype=torch.uint8)
    gathered = poisoned(*sent.shape)
    await transport.all_gather(gathered, own)
    return received, gathered


def expected_shots(rank, world_size, shape):
    """The result of `two_shots` on a rank."""
    messages = torch.stack([message(i, shape[0], world_size, shape[1]) for i in range(world_size)])
    return messages[:, :, rank].transpose(0, 1), messages.sum(0, dtype=torch.uint8)


def through_executor(sent):
    worker = executor_for(None, CPU)
    return worker.submit(Task(lambda _: two_shots(worker.transport, sent))).wait()


def through(make):
    """Both shots by the transport that ``make`` returns."""

    def run(sent):
        transport = make()
        return run_algorithm(two_shots(transport, sent), transport)

    return run


WAYS = {
    "default group": through(lambda: GroupTransport(dist.group.WORLD)),
    "own group": through(lambda: connections_of(None).transport("two shots", CPU)),
    "executor": through_executor,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
def test_both_shots_deliver_every_cell(way):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shots = WAYS[way](message(rank, shape[0], world_size, shape[1]))
        for actual, expected in zip(shots, expected_shots(rank, world_size, shape), strict=True):
            assert torch.equal(actual, expected), shape


@pytest.mark.parametrize("way", ["run", "start"])
@pytest.mark.parametrize("nbytes", [0, 16, 7])
def test_both_shots_together_count_the_message_once(way, nbytes):
    done = SimpleNamespace(wait=lambda: None)
    group = SimpleNamespace(
        size=lambda: 3, rank=lambda: 0, alltoall_base=lambda *_: done, _allgather_base=lambda *_: done
    )
    transport, sent = GroupTransport(group), message(0, 5, 3, nbytes)
    getattr(transport, way)(transport.all_to_all(torch.empty_like(sent), sent))
    assert transport.payload_bytes == sent.nbytes // 2
    getattr(transport, way)(transport.all_gather(sent, sent[:, 0]))
    assert transport.payload_bytes == sent.nbytes


def test_every_piece_is_in_flight_before_any_is_awaited():
    log = []

    def launch(*_):
        log.append("launched")
        return SimpleNamespace(wait=lambda: log.append("awaited"))

    transport = GroupTransport(
        SimpleNamespace(size=lambda: 2, rank=lambda: 0, alltoall_base=launch, _allgather_base=launch)
    )
    sent = message(0, 4, 2, 16)
    for collective in (transport.all_to_all(torch.empty_like(sent), sent), transport.all_gather(sent, sent[:, 0])):
        log.clear()
        transport.run(collective)
        assert log == ["launched"] * 4 + ["awaited"] * 4
        log.clear()
        assert len(transport.start(collective)) == 4
        assert log == ["launched"] * 4


@on_ranks(1, 2, 3)
def test_number_of_pieces_follows_the_size_of_the_message():
    size = dist.get_world_size()
    cells = size * MAX_CELL_BYTES
    sizes = [0, 1, cells, cells + 1, 2 * cells, 2 * cells + 1, MAX_PIECES * cells, 1 << 40]
    expected = [1, 1, 1, 2, 2, 3, MAX_PIECES, MAX_PIECES] if size > 1 else [1] * len(sizes)
    for transport in (connections_of(None).transport("two shots", CPU), GroupTransport(dist.group.WORLD)):
        assert [transport.pieces(nbytes) for nbytes in sizes] == expected


def test_cell_has_the_bytes_that_a_fast_link_sends_in_a_round_trip():
    """At 40 ms, a message of 1 MB a rank is not cut, and one of 8 MB has 8 pieces."""
    assert [pieces_on_gloo(2 * nbytes, 2, round_trip=0.04) for nbytes in (10**6, 2 * 10**6, 8 * 10**6)] == [1, 2, 8]
    assert pieces_on_gloo(1 << 20, 2, round_trip=1e-4) == pieces_on_gloo(1 << 20, 2) == 8


CELLS = torch.zeros(2, 3, 16, dtype=torch.uint8)
WRONG = {
    "two dimensions": (lambda t: t.all_to_all(CELLS, CELLS[0]), "sent is torch.uint8 of shape [3, 16]"),
    "another dtype": (lambda t: t.all_to_all(CELLS, CELLS.float()), "sent is torch.float32 of shape [2, 3, 16]"),
    "cells of two ranks": (lambda t: t.all_to_all(CELLS, CELLS[:, :2]), "expected torch.uint8 of shape [any, 3, any]"),
    "room for one piece": (lambda t: t.all_to_all(CELLS[:1], CELLS), "received is torch.uint8 of shape [1, 3, 16]"),
    "strided cells": (lambda t: t.all_to_all(CELLS[..., :8], CELLS[..., :8]), "A piece of sent has strides (16, 1)"),
    "own cells of all ranks": (lambda t: t.all_gather(CELLS, CELLS), "own is torch.uint8 of shape [2, 3, 16]"),
    "no cells": (lambda t: t.all_gather(CELLS, torch.tensor(3, dtype=torch.uint8)), "own is torch.uint8 of shape []"),
    "room for one rank": (
        lambda t: t.all_gather(CELLS[:, :1], CELLS[:, 0]),
        "gathered is torch.uint8 of shape [2, 1, 16]; expected torch.uint8 of shape [2, 3, 16]",
    ),
    "strided own cells": (lambda t: t.all_gather(CELLS[:, :, :8], CELLS[:, 0, ::2]), "A piece of own has strides (2,)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shot_of_wrong_tensors_raises(case):
    make, message_part = WRONG[case]
    with pytest.raises(ValueError) as error:
        make(Transport(3))
    assert message_part in str(error.value)
