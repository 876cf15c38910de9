"""Several ranks in one process: their algorithms run side by side, collective by collective."""

import torch
import torch.distributed as dist

from gradwire.comm import Driver
from gradwire.comm.transport import AllGather, AllToAll


def run_in_lockstep(algorithms, watch=None):
    """Run one algorithm for each rank to its end; ``watch`` gets every rank's tensors before each all-reduce."""
    drivers = [Driver(algorithm) for algorithm in algorithms]
    while True:
        awaited = [collective for driver in drivers if (collective := driver.advance()) is not None]
        if not awaited:
            return
        assert len(awaited) == len(drivers), "some ranks have ended"
        kind = type(awaited[0])
        assert {type(collective) for collective in awaited} == {kind}, "the ranks await different collectives"
        if kind is AllToAll:
            _all_to_all(awaited)
        elif kind is AllGather:
            _all_gather(awaited)
        else:
            _all_reduce(awaited, watch)


def _all_reduce(awaited, watch):
    if watch is not None:
        watch([collective.tensors for collective in awaited])
    for tensors in zip(*(collective.tensors for collective in awaited), strict=True):
        stacked = torch.stack(tensors)
        reduced = stacked.amax(0) if awaited[0].op == dist.ReduceOp.MAX else stacked.sum(0, dtype=tensors[0].dtype)
        for tensor in tensors:
            tensor.copy_(reduced)


def _all_to_all(awaited):
    for rank, shot in enumerate(awaited):
        for peer, other in enumerate(awaited):
            shot.target[:, peer] = other.source[:, rank]


def _all_gather(awaited):
    for shot in awaited:
        for peer, other in enumerate(awaited):
            shot.target[:, peer] = other.source
