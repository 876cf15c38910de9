"""Which parameters a backward reaches: found by a walk of the graph before it, told by its hooks, agreed on by all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from gradwire.compress import Transport
from gradwire.kernels import upload
from gradwire.reducer import errors, torch_internals


def unreachable(outputs: Sequence[Tensor], accumulators: Sequence[Node]) -> list[int]:
    """The indices of the gradient accumulators that a backward from ``outputs`` cannot reach."""
    with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):  # PyTorch's name in a profile
        stack = [torch_internals.gradient_node(output) for output in outputs if output.requires_grad]
        seen = set(stack)  # holds the nodes: one that is let go of may come back as another object
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


class UsedMap:
    """Which parameters got a gradient since the last reduction, on this rank and on any.

    Args:
        n_parameters: how many there are.
        device: of the exchange.

    Attributes:
        local: 1 for each parameter that got a gradient on this rank.
        last: on how many ranks each did, of the last exchange: int32.
    """

    def __init__(self, n_parameters: int, device: torch.device) -> None:
        self.local = bytearray(n_parameters)
        self._device = device
        self._exchange: Callable[[], None] | None = None
        self._anywhere: list[int] | None = None
        self.last = torch.zeros(n_parameters, dtype=torch.int32, device=device)

    def exchange(self, transport: Transport) -> None:
        """Start to add up the maps of all ranks. A collective call; `used_anywhere` waits for it."""
        self.last = upload(list(self.local), self._device).to(torch.int32)
        (work,) = transport.start(transport.all_reduce(self.last))
        self._exchange = partial(transport.wait, work)
        self._anywhere = None

    def used_anywhere(self, index: int) -> bool:
        """Whether some rank has a gradient for a parameter. Waits for the other ranks only where this one has none."""
        if self.local[index]:
            return True
        if self._anywhere is None:
            assert self._exchange is not None
            self._exchange()
            self._anywhere = self.last.tolist()
        return self._anywhere[index] > 0

    def clear(self) -> None:
        """Forget all of it, once an exchange has come to its end."""
        if self._exchange is not None and self._anywhere is None:
            self._exchange()
        self.local = bytearray(len(self.local))
        self._exchange = self._anywhere = None

    def abandon(self, keep_local: bool) -> None:
        """Forget an exchange that may not come to its end, and what was used on this rank unless ``keep_local``."""
        if not keep_local:
            self.local = bytearray(len(self.local))
        self._exchange = self._anywhere = None
