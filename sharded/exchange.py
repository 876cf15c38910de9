"""`ShardedExchange`: the steps of a model sharded by FSDP2, and its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from gradwire.comm import connections_of
from gradwire.comm.connections import has_streams
from gradwire.comm.torch_internals import NO_BACKWARD, EndCallback, current_backward, queue_callback
from gradwire.comm.transport import wait_for
from gradwire.exchange.handshake import compare_settings
from gradwire.exchange.session import Session
from gradwire.sharded.torch_internals import ParameterGroup

logger = logging.getLogger("gradwire.sharded")


class ShardedExchange:
    """Which backward of a model runs, and whether a compressed exchange has failed in it.

    A step ends with its backward. Errors are raised then, too: until the end of the backward, FSDP2 makes its own
    collectives, which the other ranks of a replica expect. An error on one rank is raised on all ranks of the model:
    a rank that fails leaves the exchange in all its process groups. At the end of the backward, all ranks meet, so that
    none goes on while another one raises. On NCCL they do not: the hosts would have to wait for their devices.

    A backward in which the user's own code has raised is no step: once the next one begins, its results return to the
    error memory.

    On a CPU, FSDP2 waits for the result of a collective. Exchanges that FSDP2 reads only after the backward are awaited
    at its end, and overlap it.

    Args:
        groups: the process groups of shards, of replicas and of tensor parallel ranks, in the same order on all ranks.
        device: device of the gradients. Parameters may be offloaded to another one.
        settings: settings that must be equal on all ranks, with the name of the ``hook``.

    Attributes:
        session: the exchange on the process groups.
        groups: the process groups.
        device: device of the gradients.
        n_averages: number of parameter groups that a hook averages between replicas in a whole step.
        n_steps: number of backwards that have raised no error.
        is_plain: whether gradients take PyTorch's collectives. Set it between two backwards, equally on all ranks.
        step_begins: functions that are called at the first collective of each backward.
        step_ends: functions that are called at the end of each backward that has raised no error.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup], device: torch.device, settings: Mapping[str, str]) -> None:
        self.session = Session(groups)
        self.groups = self.session.groups
        self.device = device
        self._settings = settings
        self.n_averages = self.n_steps = 0
        self.is_plain = False
        self.step_begins: list[Callable[[], None]] = []
        self.step_ends: list[Callable[[], None]] = []
        self._averaged: list[ParameterGroup] = []  # by a hook, in this backward
        # The exchanges in flight: process group, name, and the function that waits for the result.
        self._awaited: dict[ParameterGroup, tuple[dist.ProcessGroup, str, Callable[[], None]]] = {}
        # Functions that add the results of this step to the error memory, if it fails.
        self._unapplied: dict[ParameterGroup, list[Callable[[], None]]] = {}
        self._is_loaded = False  # whether a checkpoint was loaded since the ranks compared their settings
        self._agreed: dict[dist.ProcessGroup, int] = {}  # generation of the connections in the latest handshake
        self._backward = NO_BACKWARD
        self._end = EndCallback()  # `_end_backward`
        self._error: Exception | None = None  # of this backward

    def begin(self) -> None:
        """Begin a step at the first collective of a backward."""
        backward = current_backward()
        if backward in (NO_BACKWARD, self._backward):  # NO_BACKWARD: in a callback at the end of the backward
            return
        if self._backward != NO_BACKWARD:
            if self._end.is_queued:  # inside of a backward that still runs: reentrant checkpointing
                return
            self.wait()
            self.restart()
        self._backward, self._error = backward, None
        self._end.queue(self._end_backward)
        for callback in self.step_begins:
            callback()

    def has_averaged(self, parameters: ParameterGroup) -> bool:
        """Whether a hook has averaged the parameter group in this backward."""
        return parameters in self._averaged

    def begin_average(self, parameters: ParameterGroup) -> tuple[int, bool]:
        """Note that a hook averages the parameter group; returns its position in this backward, and if it is last."""
        self._averaged.append(parameters)
        return len(self._averaged) - 1, len(self._averaged) == self.n_averages

    def attempt(self, group: dist.ProcessGroup, name: str, exchange: Callable[[], None]) -> bool:
        """Call ``exchange``, which exchanges gradients between the ranks of ``group``, unless this backward has failed.

        The error of a rank is raised on all ranks of the model, with the name of the exchange. Returns whether the
        exchange has succeeded.
        """
        if self._error is not None:
            return False
        if group not in self.groups:  # FSDP2's own for the reduce-scatter, `set_separate_reduce_scatter_group`
            self.groups.append(group)
        try:
            self.session.check()
        except RuntimeError as error:  # the group was destroyed, or an earlier exchange failed
            self._error = error
            self.leave(str(error))
            return False
        try:
            with self.session.attempt(f"The {name}", group), torch.no_grad():
                self._compare_settings()
                exchange()
        except Exception as error:
            self._error = error
            self._keep_results()
        return self._error is None

    def finish_later(
        self, parameters: ParameterGroup, group: dist.ProcessGroup, name: str, finish: Callable[[], None]
    ) -> None:
        """Keep an exchange in flight; `wait` attempts ``finish``, which waits for its result."""
        self._awaited[parameters] = (group, name, finish)

    def is_in_flight(self, parameters: ParameterGroup) -> bool:
        """Whether an exchange of the parameter group is in flight."""
        return parameters in self._awaited

    def wait(self) -> None:
        """Wait for the exchanges in flight, in order."""
        while self._awaited:
            parameters, (group, name, _) = next(iter(self._awaited.items()))
            self.attempt(group, name, partial(self._finish, parameters))
            self._awaited.pop(parameters, None)  # `attempt` does nothing after an error

    def _finish(self, parameters: ParameterGroup) -> None:
        """Wait for the result of an exchange in flight, once: an exchange that has failed is not in flight any more."""
        _, _, finish = self._awaited.pop(parameters)
        finish()

    def keep_result(
        self, parameters: ParameterGroup, take_back: Callable[[], None], *, replaces_earlier: bool = False
    ) -> None:
        """Call ``take_back``, which adds a result to the error memory, if the step that applies the result fails.

        With ``replaces_earlier``, it also stands for the earlier results of the parameter group in this step.
        """
        earlier = [] if replaces_earlier else self._unapplied.get(parameters, [])
        self._unapplied[parameters] = [*earlier, take_back]

    def compare_again(self) -> None:
        """Let the ranks compare their settings at the next exchange, because this one has loaded a checkpoint."""
        self._is_loaded = True

    def leave(self, reason: str) -> None:
        """Leave the exchange in all process groups. Results that have arrived are kept."""
        self.session.leave(reason)
        self._keep_results()

    def _keep_results(self) -> None:
        for parameters, (_, name, _) in list(self._awaited.items()):
            try:
                with torch.no_grad():
                    self._finish(parameters)
            except Exception:
                logger.debug("The %s has also failed on this rank:", name, exc_info=True)

    def _compare_settings(self) -> None:
        """The handshake of all ranks, at the first exchange, after a load, and on new connections."""
        generations = {group: connections_of(group).generation for group in self.groups}
        again = generations == self._agreed
        if again and not self._is_loaded:
            return
        settings = {**self._settings, "checkpoint loaded since the last handshake": str(self._is_loaded)}
        for group in self.groups:
            compare_settings(group, settings, again)
        self._agreed, self._is_loaded = generations, False

    def _end_backward(self) -> None:
        # Callbacks run in order, and FSDP2's own may still reduce the parameter groups that are left.
        queue_callback(self._meet)

    def _meet(self) -> None:
        """Wait for the other ranks at the end of a backward, and end the step."""
        self.wait()
        for group in () if self.is_plain else self.groups:
            self.attempt(group, "end of the backward", partial(self._meet_in, group))
        self._end_step()

    def _meet_in(self, group: dist.ProcessGroup) -> None:
        connections = connections_of(group)
        if has_streams(self.device):
            connections.check_peers()
        else:
            transport = connections.transport("end of a backward", self.device)
            wait_for(transport.start_all_reduce(torch.zeros(1)), connections.check_peers)

    def _end_step(self) -> None:
        self._backward, self._averaged = NO_BACKWARD, []
        error, self._error = self._error, None
        if error is not None:
            self.take_back()
            raise error
        self.n_steps += 1
        for group in list(self._unapplied):
            if not group.holds_partial_sums():
                del self._unapplied[group]
        for callback in self.step_ends:
            callback()

    def restart(self) -> None:
        """Discard the step that an error has ended."""
        self._backward = NO_BACKWARD
        self._averaged = []
        self._error = None
        self.take_back()

    def take_back(self) -> None:
        """Add the results of a step that is not applied to the error memory."""
        unapplied, self._unapplied = self._unapplied, {}
        with torch.no_grad():
            for functions in unapplied.values():
                for function in functions:
                    function()
