"""A model of a network for a machine with a single GPU: collectives of one rank that take as long as a link would.

The only rank's all-reduce is real, over NCCL. After it a stream of its own, the wire, spins for

    latency + 2 (n - 1) / n * bytes / rate            a ring all-reduce over n ranks (Patarasuk, Yuan, 2009)

and what waits for the collective waits for that. Messages follow one another on the wire. What is modelled is time
alone: no congestion, no imbalance between ranks, and n times the same gradient. Tensors that travel together are
charged the latency each. PyTorch's DDP without a hook issues its collectives in C++, where no model reaches them; its
`allreduce_hook` stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.bench.measuring import timed
from gradwire.bench.namespaces import Rate

LATENCY = 20e-6  # seconds a message
_CALIBRATION = 100_000_000  # cycles: tens of milliseconds


def wire_seconds(nbytes: int, rate: Rate, ranks: int) -> float:
    """What an all-reduce of so many bytes takes on the modelled link."""
    if rate.mbit is None:
        return 0.0
    return LATENCY + 2 * (ranks - 1) / ranks * 8e-6 * nbytes / rate.mbit


class Carried:
    """Stands for ``dist.Work``: a collective that is done when the wire has carried it."""

    def __init__(self, future: Future[list[Tensor]]) -> None:
        self._future = future

    def get_future(self) -> Future[list[Tensor]]:
        """The future whose value is a list of the reduced tensor."""
        return self._future

    def wait(self) -> bool:
        """Let the current stream wait."""
        self._future.wait()
        return True


@contextmanager
def emulated_link(rate: Rate, ranks: int, device: torch.device) -> Iterator[None]:
    """Within it, `torch.distributed.all_reduce` takes as long as between ``ranks`` ranks at ``rate``."""
    real = dist.all_reduce
    wire = torch.cuda.Stream(device, priority=-1)  # it must not queue behind kernels that fill the GPU
    times = [timed(lambda: torch.cuda._sleep(_CALIBRATION), device) for _ in range(5)]
    cycles_a_second = _CALIBRATION / median(times[1:])

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Carried | None:
        current = torch.cuda.current_stream(device)
        real(tensor, op, group)
        wire.wait_stream(current)
        with torch.cuda.stream(wire):
            torch.cuda._sleep(int(cycles_a_second * wire_seconds(tensor.nbytes, rate, ranks)))
            future: Future[list[Tensor]] = Future(devices=[device])
            future.set_result([tensor])
        if async_op:
            return Carried(future)
        current.wait_stream(wire)
        return None

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield
