"""The two shots of an all-reduce: all-to-all and all-gather, on gloo groups and in a single process."""

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import GroupTransport, LocalTransport, run_algorithm
from gradwire.comm.connections import connections_of, executor_for

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
    """What `two_shots` returns on a rank."""
    messages = torch.stack([message(i, shape[0], world_size, shape[1]) for i in range(world_size)])
    return messages[:, :, rank].transpose(0, 1), messages.sum(0, dtype=torch.uint8)


def through_default_group(sent):
    transport = GroupTransport(dist.group.WORLD)
    return run_algorithm(two_shots(transport, sent), transport)


def through_own_group(sent):
    transport = connections_of(None).transport("two shots", CPU)
    return run_algorithm(two_shots(transport, sent), transport)


def through_executor(sent):
    worker = executor_for(None, CPU)
    return worker.submit(lambda _: two_shots(worker.transport, sent)).wait()


WAYS = {"default group": through_default_group, "own group": through_own_group, "executor": through_executor}


def shots_of(way, shapes):
    """Both shots of a message of each shape."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [WAYS[way](message(rank, pieces, world_size, nbytes)) for pieces, nbytes in shapes]


@pytest.mark.parametrize("way", WAYS)
def test_both_shots_deliver_every_cell(world, way):
    for rank, results in enumerate(world.run(shots_of, way=way, shapes=SHAPES)):
        for shape, shots in zip(SHAPES, results, strict=True):
            for actual, expected in zip(shots, expected_shots(rank, world.size, shape), strict=True):
                assert torch.equal(actual, expected), (rank, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_shots_of_a_single_process_copy(shape):
    transport = LocalTransport()
    shots = run_algorithm(two_shots(transport, message(0, shape[0], 1, shape[1])), transport)
    for actual, expected in zip(shots, expected_shots(0, 1, shape), strict=True):
        assert torch.equal(actual, expected)
    assert transport.payload_bytes == shape[0] * shape[1]
