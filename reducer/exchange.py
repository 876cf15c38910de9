"""`Exchange`: gradwire's connections on a process group, and how a rank leaves them after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire.comm import GroupTransport
from gradwire.comm.connections import ADVICE, Connections, connections_of
from gradwire.comm.transport import let_go_of_locals
from gradwire.reducer.ddp_logging import StepTimes

__all__ = ["Exchange"]


class Exchange:
    """The exchange of gradients on a process group.

    After an error the rank *leaves* the exchange (`leaving`, `_fail`), whether its forward, its backward, a hook or
    the end of its backward raised: its connections are closed with a notice to its peers, which
    raise and leave too, and this step is discarded (`_discard_step`). `Reducer.prepare_for_forward`
    raises from then on, until `resynchronize` has brought all ranks together and
    `DDPReducer.restart` has restored the state after construction. If a backward raised, the next
    forward finds it unfinished. If it raised before its first gradient was ready, it has exchanged
    nothing, and training continues with the next batch. See `gradwire.comm.connections` and
    docs/fault-handling.md.

    Args:
        process_group: the ranks.
        device: of the gradients.

    Attributes:
        process_group: as given; `_update_process_group` replaces it.
        device: as given.
        error: the last error, for the logging data.
        times: durations and number of the steps.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.process_group = process_group
        self.device = device
        self.error: str | None = None
        self.times = StepTimes(device)

    @property
    def connections(self) -> Connections:
        """gradwire's connections on the process group.

        Raises:
            RuntimeError: the process group was destroyed.
        """
        return connections_of(self.process_group)

    @property
    def transport(self) -> GroupTransport:
        """The collectives of the reducer itself, and of the default reduction on CPUs."""
        return self.connections.transport("backward", self.device)

    @contextmanager
    def leaving(self, during: str) -> Iterator[None]:
        """Leave the exchange if the body raises.

        Raises:
            RuntimeError: the body raised because another rank left; includes that rank's error.
        """
        try:
            yield
        except BaseException as error:
            let_go_of_locals(error)
            message = f"{type(error).__name__} in {during}: {error}"
            elsewhere = self._fail(message)
            is_consequence = type(error) in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
            is_told = elsewhere is None or str(error) in elsewhere or elsewhere in str(error)
            if is_consequence and not is_told:
                raise RuntimeError(f"{elsewhere}\n{ADVICE}\nOn this rank: {message}") from error
            raise

    def leave(self, cause: str) -> None:
        """Leave the exchange unless this rank has left it. Nothing of this rank is in flight afterwards."""
        if self.connections.failure is None:
            self._fail(cause)

    def _fail(self, cause: str) -> str | None:
        """Leave the exchange and discard this step. Returns the error of another rank that left before this one."""
        self.error = cause
        connections = self.connections
        elsewhere = connections.failure_elsewhere()
        rank = dist.get_rank(self.process_group)
        connections.fail(elsewhere or f"Step {self.times.iterations} failed on rank {rank}: {cause}")
        self.connections.leave(self)
        self._discard_step()
        return elsewhere

    def _discard_step(self) -> None:
        """Drop the state of the step that failed."""
        raise NotImplementedError

    def _raise(self, message: str) -> NoReturn:
        self.error = message
        raise RuntimeError(message)

    def _fail_and_raise(self, message: str) -> NoReturn:
        self._fail(message)
        self._raise(f"{message}\n{ADVICE}")
