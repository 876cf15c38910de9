"""Unused parameters: found before a backward by a walk of the graph, recorded during it, exchanged between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from gradwire.comm import GroupTransport
from gradwire.kernels import upload
from gradwire.reducer import errors, torch_internals

__all__ = ["UsedParameters", "find_unused"]


def find_unused(outputs: Sequence[Tensor], accumulators: Sequence[Node]) -> list[int]:
    """The indices of the gradient accumulators that a backward from ``outputs`` cannot reach."""
    with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):  # PyTorch's name in a profile
        stack = [torch_internals.gradient_node(output) for output in outputs if output.requires_grad]
        seen = set(stack)  # keeps the nodes alive: a new node may get the address of a freed one
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    stack.append(node)
        unused = [i for i, accumulator in enumerate(accumulators) if accumulator not in seen]
    if not unused:
        _warn_once_that_all_are_used()
    return unused


@cache
def _warn_once_that_all_are_used() -> None:
    warnings.warn(errors.NOTHING_UNUSED, stacklevel=3)


class UsedParameters:
    """Which parameters have got a gradient since the last reduction, on this rank and on any rank.

    Args:
        n_parameters: number of parameters.
        device: of the exchange.

    Attributes:
        local: 1 for each parameter that has got a gradient on this rank.
        counts: number of ranks that have a gradient for each parameter, as last exchanged: int32.
    """

    def __init__(self, n_parameters: int, device: torch.device) -> None:
        self.local = bytearray(n_parameters)
        self.counts = torch.zeros(n_parameters, dtype=torch.int32, device=device)
        self._device = device
        self._wait: Callable[[], None] | None = None  # waits for the exchange in flight
        self._counts_on_host: list[int] | None = None  # `counts`, once the exchange is done

    def exchange(self, transport: GroupTransport) -> None:
        """Start to sum `local` over the ranks. A collective call; `used_anywhere` waits for it."""
        self.counts = upload(list(self.local), self._device).to(torch.int32)
        (work,) = transport.start(transport.all_reduce(self.counts))
        self._wait = partial(transport.wait, work)
        self._counts_on_host = None

    def used_anywhere(self, index: int) -> bool:
        """Whether any rank has a gradient for a parameter. Waits for the exchange only if this rank has none."""
        if self.local[index]:
            return True
        if self._counts_on_host is None:
            assert self._wait is not None
            self._wait()
            self._counts_on_host = self.counts.tolist()
        return self._counts_on_host[index] > 0

    def clear(self) -> None:
        """Start over for the next reduction, once the exchange is done."""
        if self._wait is not None and self._counts_on_host is None:
            self._wait()
        self.local = bytearray(len(self.local))
        self._wait = self._counts_on_host = None

    def abandon(self, keep_local: bool) -> None:
        """Drop an exchange that may never be done, and `local` unless ``keep_local``."""
        if not keep_local:
            self.local = bytearray(len(self.local))
        self._wait = self._counts_on_host = None
