"""`Gradients` of a bucket, and the `Step` that an algorithm gets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.kernels import SegmentTable, as_real, flatten_kernels, is_capturing


class Gradients(NamedTuple):
    """The gradients of a bucket: a list with one tensor per parameter, or one flat buffer that holds them all.

    Attributes:
        tensors: one per parameter, or one flat buffer; of one dtype. They must fit the table, and are not checked.
        table: layout of ``tensors`` in a wire buffer.
        layout: layout of the gradients, one per parameter, in the flat buffer; None: ``tensors`` are the gradients.
    """

    tensors: Sequence[Tensor]
    table: SegmentTable
    layout: SegmentTable | None = None

    @property
    def flat(self) -> Tensor | None:
        """The flat buffer, if ``tensors`` is one real 1-D tensor; else None."""
        if len(self.tensors) == 1 and self.tensors[0].dim() == 1 and not self.table.is_complex:
            return self.tensors[0]
        return None

    def each(self) -> list[Tensor]:
        """One real tensor per parameter: the gradient itself, or a view of the flat buffer."""
        if self.layout is None:
            return self.table.real(self.tensors) if self.table.is_complex else list(self.tensors)
        return self.layout.views(self.tensors[0])

    def flatten(
        self, wire: Tensor, *, scale: float | Tensor = 1.0, limit: float = inf, counters: Tensor | None = None
    ) -> Tensor:
        """Gather all gradients in ``wire``; see `gradwire.kernels.flatten_reference`."""
        self.table.check_wire(wire)
        flatten_kernels(self.table).flatten(self.tensors, self.table, wire, scale, limit, counters)
        return wire

    def unflatten(self, wire: Tensor, *, scale: float | Tensor = 1.0, absmax: Tensor | None = None) -> None:
        """Scatter ``wire`` to all gradients; see `gradwire.kernels.unflatten_reference`."""
        self.table.check_wire(wire)
        flatten_kernels(self.table).unflatten(wire, self.tensors, self.table, scale, absmax)


Marked = TypeVar("Marked", bound=Callable[..., Any])


def repeatable(algorithm: Marked) -> Marked:
    """Mark an algorithm whose steps of one variant differ only in addresses and in what the device counts.

    On a GPU, its launches are recorded and repeated; see `gradwire.exchange.plans`. An algorithm that decides on the
    host by anything else must not be marked.
    """
    algorithm.is_repeatable = True  # type: ignore[attr-defined]
    return algorithm


def is_repeatable(algorithm: Callable[..., Any]) -> bool:
    """Whether an algorithm, or the function of a partial one, is marked by `repeatable`."""
    return getattr(getattr(algorithm, "func", algorithm), "is_repeatable", False)


class Stamp(NamedTuple):
    """A number that the headers of a step's messages carry, so that the ranks can compare it.

    Attributes:
        number: positive; 0: it is not known; negative: messages do not carry it.
        explain: takes the numbers by rank if they are not all equal, and returns the error, or None if they may differ.
    """

    number: int = 0
    explain: Callable[[Mapping[int, int]], str | None] = lambda _: None

    def write(self, message: Tensor) -> None:
        """Write the number into the headers of all cells of a message: uint8, [..., cell bytes]."""
        if self.number >= 0:
            message.view(torch.int32)[..., 1] = self.number

    def check(self, received: Tensor, ranks: Sequence[int]) -> None:
        """Raise RuntimeError if the messages of these ranks, uint8 [pieces, n, cell bytes], are of another step."""
        if self.number > 0:
            numbers = received[0].view(torch.int32)[:, 1].tolist()
            is_equal = numbers.count(self.number) == len(numbers)
            if not is_equal and (problem := self.explain(dict(zip(ranks, numbers, strict=True)))) is not None:
                raise RuntimeError(problem)


UNKNOWN = Stamp(0)
NOT_CARRIED = Stamp(-1)


@dataclass(eq=False)
class Step:
    """A bucket in one step, as an algorithm gets it.

    Args:
        source: the gradients, as a list or as one flat buffer.
        target: the tensors that receive the mean; may be the same memory.
        memory: the memory of the bucket, which `HookState.prepare` returns.
        iteration: number of the step, equal on all ranks.
        transport: the collectives: ``await transport.all_reduce(tensor)`` sums a tensor over the ranks, in place. Every
            rank must await the same ones in the same order.
        workspace: provides wire buffers.
        names: parameter names.
        stamp: the number that messages with a header carry.
        scale: multiplies the sum over the ranks; 0: by 1 / world size, for the mean.
    """

    source: Gradients
    target: Gradients
    memory: Any
    iteration: int
    transport: Transport
    workspace: Workspace
    names: tuple[str, ...] = ()
    stamp: Stamp = UNKNOWN
    scale: float = 0.0

    @classmethod
    def of(
        cls,
        memory: Any,
        gradients: Sequence[Tensor],
        results: Sequence[Tensor],
        iteration: int,
        transport: Transport,
        workspace: Workspace,
    ) -> Step:
        """A step on lists of tensors, outside of a hook. ``results`` may be ``gradients``."""
        if (layout := getattr(memory, "layout", None)) is not None:
            layout.check_tensors(list(map(as_real, gradients)))
        table = SegmentTable(gradients)
        if results is not gradients:
            table.check_tensors(results)
        return cls(Gradients(gradients, table), Gradients(results, table), memory, iteration, transport, workspace)

    @property
    def factor(self) -> float:
        """The number by which the sum over the ranks is multiplied."""
        return self.scale or 1 / self.transport.world_size

    @cached_property
    def gradients(self) -> list[Tensor]:
        """One real tensor per parameter; a complex gradient is a tensor of pairs."""
        return self.source.each()

    @cached_property
    def results(self) -> list[Tensor]:
        """The tensors that receive the mean, like ``gradients``; the same list in a step that works in place."""
        return self.gradients if self.target.tensors is self.source.tensors else self.target.each()


def is_in_place(source: Sequence[Tensor], target: Sequence[Tensor]) -> bool:
    """Whether the results of a step are written over its gradients."""
    return source is target or all(map(operator.is_, source, target))


def set_counter(counter: Tensor, iteration: int) -> Tensor:
    """``counter``, on a device, set to ``iteration`` unless a CUDA graph is captured: each replay would set it."""
    return counter if is_capturing(counter.device) else counter.fill_(iteration)
