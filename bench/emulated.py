"""An emulated link for a machine with a single GPU: collectives of one rank that take as long as a link would.

The all-reduce of the only rank runs over NCCL. After it a separate stream, the wire, spins for

    latency + 2 (n - 1) / n * bytes / rate            a ring all-reduce over n ranks (Patarasuk, Yuan, 2009)

and the collective is done when the wire is. Messages on the wire are serialised. The model covers time only: no
congestion, no imbalance between ranks, and n equal gradients. Every tensor of a coalesced collective is charged the
latency. PyTorch's DDP without a hook issues its collectives in C++, out of reach of the model; its `allreduce_hook`
stands for it.
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

from gradwire.bench.namespaces import Rate
from gradwire.bench.timing import timed

LATENCY = 20e-6  # seconds per message
_CALIBRATION = 100_000_000  # cycles: tens of milliseconds


def wire_seconds(nbytes: int, rate: Rate, ranks: int) -> float:
    """Duration of an all-reduce on the emulated link."""
    if rate.mbit is None:
        return 0.0
    return LATENCY + 2 * (ranks - 1) / ranks * 8e-6 * nbytes / rate.mbit


class WireWork:
    """Stands in for ``dist.Work``: a collective that is done when the wire is."""

    def __init__(self, future: Future[list[Tensor]]) -> None:
        self._future = future

    def get_future(self) -> Future[list[Tensor]]:
        """The future of a list with the reduced tensor."""
        return self._future

    def wait(self) -> bool:
        """Make the current stream wait."""
        self._future.wait()
        return True


@contextmanager
def emulated_link(rate: Rate, ranks: int, device: torch.device) -> Iterator[None]:
    """A context in which `torch.distributed.all_reduce` takes as long as between ``ranks`` ranks at ``rate``."""
    real = dist.all_reduce
    wire = torch.cuda.Stream(device, priority=-1)  # it must not queue behind kernels that fill the GPU
    times = [timed(lambda: torch.cuda._sleep(_CALIBRATION), device) for _ in range(5)]
    cycles_a_second = _CALIBRATION / median(times[1:])

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> WireWork | None:
        current = torch.cuda.current_stream(device)
        real(tensor, op, group)
        wire.wait_stream(current)
        with torch.cuda.stream(wire):
            torch.cuda._sleep(int(cycles_a_second * wire_seconds(tensor.nbytes, rate, ranks)))
            future: Future[list[Tensor]] = Future(devices=[device])
            future.set_result([tensor])
        if async_op:
            return WireWork(future)
        current.wait_stream(wire)
        return None

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield
