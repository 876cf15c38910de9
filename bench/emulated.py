"""An emulated link for a machine with a single GPU: collectives of one rank that take as long as a link would.

A collective of the only rank runs over NCCL. After it a separate stream, the wire, spins for

    latency + 2 (n - 1) / n * bytes / rate            a ring all-reduce over n ranks (Patarasuk, Yuan, 2009)
    latency + (n - 1) / n * bytes / rate              each shot of a two-shot all-reduce

and the collective is done when the wire is. Messages on the wire are serialized. The model covers time only: no
congestion, no imbalance between ranks, and n equal gradients. Every tensor of a coalesced collective is charged the
latency. PyTorch's DDP without a hook issues its collectives in C++, out of reach of the model; its `allreduce_hook`
stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.bench.namespaces import Rate
from gradwire.bench.timing import timed
from gradwire.comm import transport

LATENCY = 20e-6  # seconds per message
_CALIBRATION = 100_000_000  # cycles: tens of milliseconds


def wire_seconds(nbytes: int, rate: Rate, ranks: int) -> float:
    if rate.mbit is None:
        return 0.0
    return LATENCY + 2 * (ranks - 1) / ranks * 8e-6 * nbytes / rate.mbit


@contextmanager
def emulated_link(rate: Rate, ranks: int, device: torch.device) -> Iterator[None]:
    """A context in which all-reduces and the shots of `gradwire.comm` take as long as between ``ranks`` ranks."""
    wire = torch.cuda.Stream(device, priority=-1)  # it must not queue after kernels that fill the GPU
    times = [timed(lambda: torch.cuda._sleep(_CALIBRATION), device).seconds for _ in range(5)]
    cycles_a_second = _CALIBRATION / median(times[1:])

    def spin(nbytes: int) -> None:
        wire.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(wire):
            torch.cuda._sleep(int(cycles_a_second * wire_seconds(nbytes, rate, ranks)))

    real_all_reduce = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> SimpleNamespace | None:
        real_all_reduce(tensor, op, group)
        spin(tensor.nbytes)
        if async_op:
            with torch.cuda.stream(wire):
                future: Future[list[Tensor]] = Future(devices=[device])
                future.set_result([tensor])
            return SimpleNamespace(get_future=lambda: future, wait=future.wait)  # like dist.Work
        torch.cuda.current_stream(device).wait_stream(wire)
        return None

    def delayed(real: Callable[..., dist.Work | None], share: int) -> Callable[..., None]:
        def launch(target: Tensor, *arguments: Any, is_async: bool, **options: Any) -> None:
            assert not is_async  # on a GPU, executors enqueue collectives on their own stream
            work = real(target, *arguments, is_async=False, **options)
            if work is not None:  # in a rehearsal, over gloo
                work.wait()
            spin(target.nbytes // share)
            torch.cuda.current_stream(device).wait_stream(wire)

        return launch

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        for name, share in (("all_reduce", 1), ("all_to_all", 2), ("all_gather", 2)):  # a shot is half of an all-reduce
            patches.enter_context(mock.patch.object(transport, name, delayed(getattr(transport, name), share)))
        yield
