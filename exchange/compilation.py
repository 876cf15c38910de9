"""`EarlyCompilation`: Triton compiles the kernels of an algorithm in plain steps, before the first compressed one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import torch

from gradwire.comm import Algorithm, Connections, IdleTransport, Workspace, run_algorithm
from gradwire.compress import Gradients, Step
from gradwire.compress.memory import BucketMemory
from gradwire.exchange.bucket import Bucket
from gradwire.kernels import dispatch, gradient_layout, is_capturing


class EarlyCompilation:
    """Runs an algorithm on zeros, once for every bucket of plain steps that stays.

    The buckets of the first step, of which one may hold the whole model, are left out: DDP rebuilds them.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None  # number of the first step since the state was made
        self._start = 0  # number of the first compressed step
        self._compiled: set[object] = set()  # names and dtypes of buckets

    def restart(self, start: int) -> None:
        """Compile all buckets anew, because options have changed; ``start`` is the first compressed step."""
        self._start = start
        self._compiled.clear()

    def compile(
        self,
        bucket: Bucket,
        names: tuple[str, ...],
        connections: Connections,
        algorithm: Callable[[Step], Algorithm[None]],
        make_bucket: Callable[..., BucketMemory | None],
        now: int,
    ) -> None:
        """In plain step ``now``: run two steps of ``algorithm``, without collectives, in memory of their own.

        Two steps: alternating PowerSGD launches different kernels in odd ones. `HookState.make_bucket` makes memory.
        """
        device, key = bucket.device, (names, bucket.dtype)
        if self._first_step is None:
            self._first_step = now
        if now == self._first_step < self._start - 1 or key in self._compiled:
            return
        if not dispatch.use_triton(device) or dispatch.is_interpreted() or is_capturing(device):
            return
        self._compiled.add(key)
        with suppress(torch.OutOfMemoryError):  # the first compressed step compiles, then
            transport = IdleTransport(connections.executor(device).transport)
            parameters = [gradient_layout(parameter) for parameter in bucket.parameters()]
            memory = make_bucket(parameters, bucket.dtype, names, transport, defaultdict(dict))
            if memory is None:
                return
            layout = memory.layout
            zeros = Gradients(layout.views(torch.zeros(layout.numel, dtype=layout.dtype, device=device)), layout)
            workspace = Workspace(device)
            for number in (now, now + 1):
                run_algorithm(algorithm(Step(zeros, zeros, memory, number, transport, workspace, names)), transport)
