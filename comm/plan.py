"""`Plan`: one bucket's step as bound calls, recorded in a step that ran as an algorithm, and repeated in later ones.

A steady step repeats the launches and collectives of the step before: recomputing them costs the host ten times as long
as issuing them. A plan holds them with all arguments. Addresses that move and numbers that change lie in device memory,
where the owner of the plan replaces them before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.comm.transport import Collective, Driver


class RecordedPart(Protocol):
    """What `gradwire.kernels.launch.Recording` notes of a part of an algorithm."""

    calls: list[Callable[[], object]]
    kept: list[Tensor]
    operator: str | None


class Plan:
    """The recorded step of one bucket.

    Args:
        record: records the launches in its context, given the handle of their stream.
        workspace_index: index of the workspace of the recorded step, whose buffer the plan uses.
        gradients: the tensors that the recorded step reads and writes, whose addresses may differ in later steps.
        refresh: replaces the addresses and numbers in device memory that the recorded step reads.

    Attributes:
        name: name of its profiler range.
        parts: bound launches up to each collective, and the collective; the last part has none.
        is_complete: whether all parts are recorded, and nothing of them is missing.
        buffer: that of the workspace, whose addresses the calls hold.
        operator: an operator of PyTorch for which the step cannot be replayed; None: there is none.
        begin, sent, done, ended: events of the latest replay: the gradients are ready; the kernels before a collective
            are enqueued; the collective; all kernels.
    """

    name = "gradwire::replay"

    def __init__(
        self,
        record: Callable[[int], AbstractContextManager[RecordedPart]],
        workspace_index: int,
        gradients: Sequence[Tensor],
        refresh: Callable[[], None],
    ) -> None:
        self.workspace_index = workspace_index
        self.parts: list[tuple[Sequence[Callable[[], object]], Collective | None]] = []
        self.is_complete = False
        self.operator: str | None = None
        self._record = record
        self._refresh = refresh
        self._gradients = gradients
        self.buffer: Tensor | None = None
        self._held: list[tuple[int, int]] = []  # index and address of each gradient that calls or collectives hold
        self._kept: list[Tensor] = []  # whose addresses the calls hold
        self.begin, self.sent, self.done, self.ended = (torch.cuda.Event() for _ in range(4))

    def advance(self, driver: Driver[Any], stream: int) -> Collective | None:
        """`Driver.advance`, recorded."""
        if not self.parts:
            self._refresh()
        with self._record(stream) as part:
            collective = driver.advance()
        self.parts.append((part.calls, collective))
        self._kept += [*part.kept, *(() if collective is None else collective.tensors)]
        self.operator = self.operator or part.operator
        if collective is None:
            kept = {tensor.untyped_storage().data_ptr() for tensor in self._kept if tensor.numel() > 0}
            for index, tensor in enumerate(self._gradients):
                if tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in kept:
                    self._held.append((index, tensor.data_ptr()))
            self.is_complete = self.operator is None
            if not self.is_complete:
                self.parts, self._kept = [], []
            self._gradients = ()
            del self._refresh  # it holds gradients, too
        return collective

    def fits(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> bool:
        """Whether the plan serves a step on these tensors, in the layouts of the recorded ones.

        Their addresses may differ, except of those that calls or collectives hold.
        """
        if not self._held:
            return True
        gradients = [*source, *target]
        return all(gradients[index].data_ptr() == address for index, address in self._held)
