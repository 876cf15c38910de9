"""`StreamExecutor`: bucket algorithms on two CUDA streams, one for kernels and one for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.comm.executor import CLOSED, MAX_TASKS_IN_FLIGHT, Executor, Task, Workspace
from gradwire.comm.graphs import PiecewiseGraphs
from gradwire.comm.torch_internals import NO_BACKWARD, current_backward, queue_callback
from gradwire.comm.transport import Driver, GroupTransport

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
        super().__init__(transport, [Workspace(device, PiecewiseGraphs()) for _ in range(MAX_TASKS_IN_FLIGHT)])
        self._device = device
        self.index = device.index  # `torch.cuda` takes 3 us to turn a device into its index
        self._kernels = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._collectives = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._latest: Result | None = None  # that of the latest task, unless it was enqueued to its end
        self._n_submitted = 0  # tasks since all were enqueued to their ends
        self._backward = NO_BACKWARD  # the backward at whose end `finish` will be called
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future = Result(self, [self._device])
        if self._error is not None:
            future.set_exception(self._error)
            return future
        self._kernels.wait_stream(torch.cuda.current_stream(self.index))
        workspace = self.workspaces[self._n_submitted % MAX_TASKS_IN_FLIGHT]
        self._n_submitted += 1
        before, self._latest = self._latest, future
        begin, name, value, on_error = task
        self._advance(future, lambda: Driver(begin(workspace), self.transport, name, value, on_error))
        self._run_to_end(before)
        backward = current_backward()
        if backward not in (NO_BACKWARD, self._backward):
            self._backward = backward
            queue_callback(self.finish)
        return future

    def finish(self) -> None:  # noqa: D102
        latest, self._latest = self._latest, None
        self._run_to_end(latest)
        self._n_submitted = 0  # a bucket usually gets the same workspace in each step, so cached views fit

    def close(self, timeout: float) -> None:  # noqa: D102
        self.abandon()

    def abandon(self) -> None:  # noqa: D102
        self._error = self._error or RuntimeError(CLOSED)
        self.finish()
        for workspace in self.workspaces:
            if workspace.graphs is not None:
                workspace.graphs.reset()

    def _run_to_end(self, result: Result | None) -> None:
        while result is not None and result.driver is not None:
            self._advance(result)

    def _advance(self, result: Result, begin: Callable[[], Driver[Any]] | None = None) -> None:
        """Enqueue kernels up to the next collective, and the collective; or to the end, and complete the future.

        ``begin`` creates the driver, in the stream of the kernels.
        """
        with torch.cuda.device(self.index), torch.no_grad():
            before = torch.cuda.current_stream(self.index)
            torch.cuda.set_stream(self._kernels)  # `torch.cuda.stream` takes the host several times as long
            try:
                if self._error is not None:
                    if result.driver is not None:
                        result.driver.close()
                    raise self._error
                if begin is not None:
                    result.driver = begin()
                driver = result.driver
                assert driver is not None
                if result.collective_done is not None:
                    self._kernels.wait_event(result.collective_done)
                collective = driver.advance()
                if collective is None:
                    result.driver = None
                    if not isinstance(driver.result, Tensor):
                        result.ended = self._kernels.record_event()
                    result.set_result(driver.result)
                    return
                self._collectives.wait_stream(self._kernels)
                torch.cuda.set_stream(self._collectives)
                try:
                    self.transport.run(collective)
                finally:
                    torch.cuda.set_stream(self._kernels)
                result.collective_done = self._collectives.record_event()
            except Exception as error:
                self._error = self._error or error
                result.driver = None
                result.set_exception(error)
            finally:
                torch.cuda.set_stream(before)


class Result(Future[Any]):
    """The future of a task. Asking for the result enqueues the rest of the task, also in the middle of a backward.

    Attributes:
        driver: runs the coroutine of the task; None before it has begun and once it has ended.
        collective_done: recorded after the collective that the task awaits; None before the first one.
        ended: recorded at the end of a task that returns no tensor. PyTorch's futures order only the tensors of their
            result; `wait` then orders the current stream after the task, and `then` does not.
    """

    driver: Driver[Any] | None = None
    collective_done: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None

    def __init__(self, executor: StreamExecutor, devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self._executor = executor

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
