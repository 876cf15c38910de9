"""`ShardedExchange`: the steps of a model sharded by FSDP2, and its errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.comm import connections_of
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward, queue_callback


class ShardedExchange:
    """Which backward of a model runs, and whether a compressed exchange has failed in it.

    A step ends with its backward. Errors are raised then, too: until the end of the backward, FSDP2 makes its own
    collectives, which the other ranks of a replica expect.

    Attributes:
        n_groups: number of parameter groups that are averaged between replicas in a whole step.
        averaged: the process groups of the parameter groups that a hook has averaged in this backward.
        step_ends: called at the end of every backward that has raised no error.
    """

    def __init__(self) -> None:
        self.n_groups = 0
        self.averaged: list[object] = []
        self.step_ends: list[Callable[[], None]] = []
        self._backward = NO_BACKWARD
        self._error: Exception | None = None  # of this backward

    def begin(self) -> None:
        """Begin a step at the first collective of a backward."""
        backward = current_backward()
        if backward not in (NO_BACKWARD, self._backward):  # NO_BACKWARD: in a callback at the end of the backward
            self._error = None
            if self._backward != NO_BACKWARD:  # an earlier backward has raised an error of the user's
                self._end_step()
            self._backward = backward
            queue_callback(self._end_backward)

    def attempt(self, group: dist.ProcessGroup, exchange: Callable[[], None]) -> None:
        """Call ``exchange``, which exchanges gradients between the ranks of ``group``, unless this backward has failed.

        The error of a rank is raised on all ranks of the group.
        """
        if self._error is not None:
            return
        try:
            connections = connections_of(group)
            connections.check()
        except RuntimeError as error:  # the group was destroyed, or an earlier exchange failed
            self._error = error
            return
        try:
            with torch.no_grad():
                exchange()
        except Exception as error:
            elsewhere = connections.failure_elsewhere(wait=type(error) is RuntimeError)  # gloo's, if a rank has left
            self._error = error if elsewhere is None else RuntimeError(f"{elsewhere}\nOn this rank: {error}")
            connections.fail(elsewhere or f"The gradient exchange failed on rank {dist.get_rank()}: {error}")

    def _end_backward(self) -> None:
        # Callbacks run in order, and FSDP2's own may still reduce the parameter groups that are left.
        queue_callback(self._end_step)

    def _end_step(self) -> None:
        self._backward, self.averaged = NO_BACKWARD, []
        error, self._error = self._error, None
        if error is not None:
            raise error
        for step_ends in self.step_ends:
            step_ends()
