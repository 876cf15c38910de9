"""`ShardedExchange`: the steps of a model sharded by FSDP2, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from gradwire.comm import connections_of
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward, queue_callback


def described(names: Sequence[str]) -> str:
    """Parameter names, for an error message."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def name_of(hook: object) -> str:
    """The name of a hook, for reports and error messages."""
    return str(getattr(hook, "__name__", "hook"))


class ShardedExchange:
    """Which backward of a model runs, and whether a compressed exchange has failed in it.

    A step ends with its backward. Errors are raised then, too: until the end of the backward, FSDP2 makes its own
    collectives, which the other ranks of a replica expect.

    Attributes:
        groups: the process groups over which the model reduces gradients, within a replica and between replicas. An
            error in one of them is announced in all, because the ranks of the others wait for this one.
        n_groups: number of parameter groups that are averaged between replicas in a whole step.
        averaged: the process groups of the parameter groups that a hook has averaged in this backward.
        step_ends: called at the end of every backward that has raised no error.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup]) -> None:
        self.groups = list(dict.fromkeys(groups))
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

    def attempt(self, group: dist.ProcessGroup, name: str, exchange: Callable[[], None]) -> bool:
        """Call ``exchange``, which exchanges gradients between the ranks of ``group``, unless this backward has failed.

        The error of a rank is raised on all ranks, with the name of the exchange. Returns whether the exchange has
        succeeded.
        """
        if self._error is not None:
            return False
        try:
            connections = connections_of(group)
            connections.check()
        except RuntimeError as error:  # the group was destroyed, or an earlier exchange failed
            self._error = error
            return False
        try:
            with torch.no_grad():
                exchange()
        except Exception as error:
            self._error, is_of_peer = error, type(error) is RuntimeError  # gloo's, if a rank has left
            elsewhere = connections.failure_elsewhere(wait=is_of_peer)
            own = f"The {name} failed on rank {dist.get_rank()}: {error}"
            if is_of_peer:
                self._error = RuntimeError(own if elsewhere is None else f"{elsewhere}\n{own}")
            for each in self.groups:
                connections_of(each).fail(elsewhere or own)
        return self._error is None

    def _end_backward(self) -> None:
        # Callbacks run in order, and FSDP2's own may still reduce the parameter groups that are left.
        queue_callback(self._check_peers)
        queue_callback(self._end_step)

    def _check_peers(self) -> None:
        """Fail if a rank has failed with which this one has exchanged gradients through PyTorch's collectives only."""
        for group in self.groups:
            self.attempt(group, "end of the backward", connections_of(group).check_peers)

    def _end_step(self) -> None:
        self._backward, self.averaged = NO_BACKWARD, []
        error, self._error = self._error, None
        if error is not None:
            raise error
        for step_ends in self.step_ends:
            step_ends()
