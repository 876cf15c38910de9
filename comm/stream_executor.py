"""`StreamExecutor`: bucket algorithms on a CUDA side stream."""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from gradwire.comm.executor import Executor, Task
from gradwire.comm.transport import GroupTransport, run_algorithm
from gradwire.comm.workspace import Workspace


class StreamExecutor(Executor):
    """Runs tasks on a CUDA side stream, which first waits for the work already in the current stream."""

    def __init__(self, transport: GroupTransport, device: torch.device) -> None:
        super().__init__(transport, [Workspace(device)])
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:  # noqa: D102
        return self._error is not None

    def submit(self, task: Task) -> Future[Any]:  # noqa: D102
        future: Future[Any] = Future(devices=[self._device])
        if self._error is not None:
            future.set_exception(self._error)
            return future
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            try:
                future.set_result(run_algorithm(task(*self.workspaces), self.transport))
            except Exception as error:
                self._error = error
                future.set_exception(error)
        return future
