"""`StreamExecutor`: bucket algorithms on two CUDA streams, one for kernels and one for collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.executor import MAX_TASKS_IN_FLIGHT, Executor, Task, Workspace
from gradwire.comm.plan import Plan
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward, profiler_range, queue_callback
from gradwire.comm.transport import CLOSED, Driver, GroupTransport

HIGH_PRIORITY = -1  # the few kernels of a hook must not queue after those of the backward


class StreamExecutor(Executor):
    """Runs tasks on two CUDA streams: kernels of one bucket overlap collectives of another. The host never waits.

    A task is enqueued up to its first collective; then the task before it is enqueued to its end. With kernels A, B and
    D before, between and after two collectives:

        kernels        A1     A2     B1     D1     A3     B2     D2     B3     D3
        collectives        C1     C2    C1'           C3     C2'           C3'

    So the order of the collectives depends on the order of the tasks only, as on a CPU. A task goes on when the next
    one is submitted, when its future is asked for the result, by `finish`, and at the end of the backward, because C++
    does not ask Python's futures.

    Once a task has failed, this rank issues no more collectives: the task before it fails too, and all later ones.
    """

    def __init__(self, transport: GroupTransport, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._device = device
        self.index = device.index  # `torch.cuda` takes 3 us to turn a device into its index
        self._kernels = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._collectives = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._latest: Result | Handle | None = None  # that of the latest task, unless it was enqueued to its end
        self._n_submitted = 0  # tasks since all were enqueued to their ends
        self._backward = NO_BACKWARD  # the backward at whose end `finish` will be called

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors until the tasks submitted so far are done, also if nobody refers to it before."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._kernels)

    @property
    def workspace_index(self) -> int:
        """Index of the workspace of the next task."""
        return self._n_submitted % MAX_TASKS_IN_FLIGHT

    def submit(self, task: Task, plan: Plan | None = None) -> Future[Any]:
        """Queue a task; its future gets the result or the exception. ``plan``, for this workspace, records the task."""
        future, workspace = Result(self, [self._device]), self.workspaces[self.workspace_index]
        begin, name, value, on_error = task
        future.recorded = plan
        if plan is not None:
            plan.name = f"{name}, replay"

        def prepare() -> None:
            future.driver = Driver(begin(workspace), self.transport, name, value, on_error)

        self._begin(future, prepare)
        return future

    def replay(
        self, plan: Plan, value: Tensor, refresh: Callable[[], None], takes_future: bool = False
    ) -> Result | Handle:
        """Repeat a recorded task in the workspace of its plan, which is complete.

        Args:
            plan: the plan.
            value: the result of the task.
            refresh: replaces the addresses and numbers in device memory that the task reads, in the current stream.
            takes_future: whether to return a future, which takes the host longer than a `Handle`.
        """
        flight = Result(self, [self._device]) if takes_future else Handle(self)
        flight.plan, flight.value_of_replay = plan, value
        self._begin(flight, refresh)
        return flight

    def _begin(self, flight: Result | Handle, prepare: Callable[[], None]) -> None:
        """Make a task the latest, and enqueue its first part. The end of the backward enqueues the rest."""
        if self._error is not None:
            flight.plan = None
            flight.set_exception(self._error)
            return
        self._n_submitted += 1
        before, self._latest = self._latest, flight
        backward = current_backward()
        if backward not in (NO_BACKWARD, self._backward):
            self._backward = backward
            queue_callback(self.finish)
        self._enqueue(flight, before, prepare)

    def finish(self) -> None:  # noqa: D102
        latest, self._latest = self._latest, None
        if latest is not None:
            self._enqueue(None, latest)
        self._n_submitted = 0  # a bucket usually gets the same workspace in each step, so cached views fit

    def close(self, timeout: float) -> None:  # noqa: D102
        self._error = self._error or RuntimeError(CLOSED.format("The executor"))
        self.finish()

    def abandon(self) -> None:  # noqa: D102
        self.close(0)
        self._kernels.wait_stream(self._collectives)  # no task will: so `keep` and `join` cover both streams

    def join(self) -> None:  # noqa: D102
        torch.cuda.current_stream(self.index).wait_stream(self._kernels)

    def _enqueue(
        self, flight: Result | Handle | None, before: Result | Handle | None, prepare: Callable[[], None] | None = None
    ) -> None:
        """Enqueue the first part of a task, after ``prepare`` in the stream of the kernels, and then the rest of the
        task before it. Afterwards, the caller's device and stream are current again.
        """
        device, current = torch.cuda._exchange_device(self.index), torch.cuda.current_stream(self.index)
        try:
            if flight is not None and flight.plan is not None:
                flight.plan.begin.record(current)
                flight.plan.begin.wait(self._kernels)
                with profiler_range(flight.plan.name):
                    self._replay_part(flight, prepare)
            elif isinstance(flight, Result):
                self._kernels.wait_stream(current)
                self._advance(flight, prepare)
            while before is not None and before.plan is not None:
                self._replay_part(before)
            while before is not None and before.driver is not None:
                self._advance(before)
        finally:
            torch.cuda.set_stream(current)  # `torch.cuda.stream` takes the host several times as long
            torch.cuda._maybe_exchange_device(device)

    def _replay_part(self, flight: Result | Handle, prepare: Callable[[], None] | None = None) -> None:
        """Enqueue the launches of a part, and its collective; or the last part, and complete ``flight``."""
        plan = flight.plan
        assert plan is not None
        try:
            if self._error is not None:
                raise self._error
            torch.cuda.set_stream(self._kernels)
            if prepare is not None:
                prepare()
            else:
                plan.done.wait(self._kernels)
            calls, collective = plan.parts[flight.part]
            for call in calls:
                call()
            flight.part += 1
            if collective is None:
                flight.plan = None
                flight.complete(plan.ended, self._kernels)
                return
            plan.sent.record(self._kernels)
            plan.sent.wait(self._collectives)
            torch.cuda.set_stream(self._collectives)
            self.transport.run(collective)
            plan.done.record(self._collectives)
        except Exception as error:
            self._error = self._error or error
            flight.plan = None
            flight.set_exception(error)

    @torch.no_grad()
    def _advance(self, flight: Result, prepare: Callable[[], None] | None = None) -> None:
        """Enqueue kernels up to the next collective, and the collective; or to the end, and complete the future."""
        try:
            if self._error is not None:
                if flight.driver is not None:
                    flight.driver.close()
                raise self._error
            torch.cuda.set_stream(self._kernels)
            if prepare is not None:
                prepare()
            else:
                self._kernels.wait_event(flight.collective_done)
            driver, plan = flight.driver, flight.recorded
            assert driver is not None
            collective = driver.advance() if plan is None else plan.advance(driver, self._kernels.cuda_stream)
            if collective is None:
                if plan is not None:
                    self.workspaces[plan.workspace_index].keep_buffer(plan)
                flight.driver = None
                if not isinstance(driver.result, Tensor):
                    flight.ended = self._kernels.record_event()
                flight.set_result(driver.result)
                return
            self._collectives.wait_stream(self._kernels)
            torch.cuda.set_stream(self._collectives)
            self.transport.run(collective)
            flight.collective_done = self._collectives.record_event()
        except Exception as error:
            self._error = self._error or error
            flight.driver = None
            flight.set_exception(error)


class Handle:
    """A lightweight `Result` of a replayed task, for gradwire's reducer: the same `done` and `wait`, but no future.

    Attributes:
        plan, part: the plan, until it is enqueued to its end, and the next part.
        value_of_replay: the result.
    """

    plan: Plan | None = None
    part = 0
    value_of_replay: Tensor | None = None
    driver: None = None  # it runs no coroutine
    _error: Exception | None = None
    _ended: torch.cuda.Event

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor

    def complete(self, ended: torch.cuda.Event, kernels: torch.cuda.Stream) -> None:
        """Note that all of the task is enqueued on the stream ``kernels``."""
        ended.record(kernels)
        self._ended = ended

    def set_exception(self, error: Exception) -> None:
        """Note that the task has failed."""
        self._error = error

    def done(self) -> bool:
        """Enqueue the rest of the task; returns True."""
        if self.plan is not None:
            self._executor.finish()
        return True

    def wait(self) -> Tensor | None:
        """The value, for which the current stream waits; raises the error of the task."""
        self.done()
        if self._error is not None:
            raise self._error
        self._ended.wait(torch.cuda.current_stream(self._executor.index))
        return self.value_of_replay


class Result(Future[Any]):
    """The future of a task. Asking for the result enqueues the rest of the task, also in the middle of a backward.

    Attributes:
        driver: runs the coroutine of the task; None before it has begun and once it has ended.
        recorded: records the task.
        plan, part: the plan that the task replays, until it is enqueued to its end, and the next part.
        value_of_replay: the result of a replayed task.
        collective_done: recorded after the collective that the task awaits.
        ended: recorded at the end of a task that returns no tensor. PyTorch's futures order only the tensors of their
            result; `wait` then orders the current stream after the task, and `then` does not.
    """

    driver: Driver[Any] | None = None
    recorded: Plan | None = None
    plan: Plan | None = None
    part = 0
    value_of_replay: Tensor | None = None
    collective_done: torch.cuda.Event
    ended: torch.cuda.Event | None = None

    def __init__(self, executor: StreamExecutor, devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self._executor = executor

    def complete(self, ended: torch.cuda.Event, kernels: torch.cuda.Stream) -> None:
        """Set the result of a replayed task, in its stream."""
        self.set_result(self.value_of_replay)

    def done(self) -> bool:  # noqa: D102
        if not super().done():
            self._executor.finish()
        return super().done()

    def wait(self) -> Any:  # noqa: D102
        self.done()
        result = super().wait()
        if self.ended is not None:
            torch.cuda.current_stream(self._executor.index).wait_event(self.ended)
        return result

    def value(self) -> Any:  # noqa: D102
        self.done()
        return super().value()
