"""Parameters without a gradient in a backward: found in its graph, and compared between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from gradwire.comm import GroupTransport
from gradwire.comm.rank_differences import out_of_step
from gradwire.kernels import upload
from gradwire.reducer import errors, torch_internals


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
    """The parameters that have a gradient since the last reduction, on this rank and on any rank."""

    def __init__(self, n_parameters: int, device: torch.device) -> None:
        self.local = bytearray(n_parameters)  # 1 for each parameter that has a gradient on this rank
        # Number of ranks that have a gradient for each parameter, as last exchanged.
        self.counts = torch.zeros(n_parameters, dtype=torch.int32, device=device)
        self._passes = self.counts[:0]  # `Exchange.n_passes` of each rank, as last exchanged; 0: it has joined
        self._device = device
        self._wait: Callable[[], None] | None = None  # waits for the exchange in flight
        self._counts_on_host: list[int] | None = None  # `counts` after the exchange

    def exchange(self, transport: GroupTransport, n_passes: int) -> None:
        """Start to sum `local` over the ranks, and to share `Exchange.n_passes`. A collective call."""
        passes = [n_passes if rank == transport.rank else 0 for rank in range(transport.world_size)]
        message = upload([*self.local, *passes], self._device).to(torch.int32)
        self.counts, self._passes = message.split([len(self.local), len(passes)])
        self._wait = transport.launch(transport.all_reduce(message))
        self._counts_on_host = None

    def check_passes(self) -> None:
        """Wait for the exchange; RuntimeError if the ranks have made different numbers of passes."""
        assert self._wait is not None
        self._wait()
        if (problem := out_of_step(self._passes.tolist())) is not None:
            raise RuntimeError(problem)

    def used_anywhere(self, index: int) -> bool:
        """Whether any rank has a gradient for a parameter. Waits for the exchange only if this rank has none."""
        if self.local[index]:
            return True
        if self._counts_on_host is None:
            self.check_passes()
            self._counts_on_host = self.counts.tolist()
        return self._counts_on_host[index] > 0

    def exchange_none(self, transport: GroupTransport) -> list[int]:
        """Take part in an exchange on a rank that uses no parameter. Returns the number of ranks that use each one."""
        message = torch.zeros(len(self.local) + transport.world_size, dtype=torch.int32, device=self._device)
        transport.launch(transport.all_reduce(message))()
        return message[: len(self.local)].tolist()

    def clear(self) -> None:
        """Start over for the next reduction, once the exchange is done."""
        if self._wait is not None and self._counts_on_host is None:
            self._wait()
        self.local = bytearray(len(self.local))
        self._wait = self._counts_on_host = None
