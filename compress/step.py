"""`Gradients` of a bucket, and the `Step` that an algorithm gets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from gradwire.comm.executor import Workspace
from gradwire.comm.transport import Transport
from gradwire.kernels import SegmentTable, as_real, is_capturing


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
        self.table.kernels.flatten(self.tensors, self.table, wire, scale, limit, counters)
        return wire

    def unflatten(self, wire: Tensor, *, scale: float | Tensor = 1.0, absmax: Tensor | None = None) -> None:
        """Scatter ``wire`` to all gradients; see `gradwire.kernels.unflatten_reference`."""
        self.table.check_wire(wire)
        self.table.kernels.unflatten(wire, self.tensors, self.table, scale, absmax)


Marked = TypeVar("Marked", bound=Callable[..., Any])


def repeatable(algorithm: Marked) -> Marked:
    """Mark an algorithm whose steps of one variant differ only in addresses and in what the device counts.

    On a GPU, its launches are recorded and repeated; see `gradwire.hooks._plans`. An algorithm that decides on the host
    by anything else must not be marked.
    """
    algorithm.is_repeatable = True  # type: ignore[attr-defined]
    return algorithm


def is_repeatable(algorithm: Callable[..., Any]) -> bool:
    """Whether an algorithm, or the function of a partial one, is marked by `repeatable`."""
    return getattr(getattr(algorithm, "func", algorithm), "is_repeatable", False)


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
        n_passes: number of forward passes of the model so far, which messages with a header carry, so that the ranks
            can compare it; 0 if it is not known, -1 if messages do not carry it.
    """

    source: Gradients
    target: Gradients
    memory: Any
    iteration: int
    transport: Transport
    workspace: Workspace
    names: tuple[str, ...] = ()
    n_passes: int = 0

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
