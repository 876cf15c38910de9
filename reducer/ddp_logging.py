"""DDP's logging data: facts of construction, and the times of a step's forward, backward and communication."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire.kernels import is_capturing
from gradwire.reducer import torch_internals

if TYPE_CHECKING:
    from gradwire.reducer.bucket import BucketBase
    from gradwire.reducer.ddp_interface import DDPReducer

__all__ = ["Logger", "StepTimes"]

TIMED_ITERATIONS = 10  # so many first iterations are all timed

# Environment variables that decide how ranks meet.
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_VARIABLES_OF = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


class Logger:
    """The logger that PyTorch's DDP calls: keeps the facts that ``_get_ddp_logging_data`` returns."""

    def __init__(self, reducer: DDPReducer) -> None:
        self._reducer = reducer
        self._data: dict[str, Any] = {}

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Keep facts of the construction, under PyTorch's keys."""
        reducer = self._reducer
        backend = dist.get_backend(reducer.process_group)
        variables = _VARIABLES + _VARIABLES_OF.get(backend, ())
        self._data |= {name.lower(): os.environ.get(name, "N/A") for name in variables}
        if backend == "gloo":
            self._data["gloo_num_threads"] = torch_internals.GLOO_THREADS
        self._data |= {
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "find_unused_parameters": int(reducer.find_unused_parameters),
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
            "dtypes": ", ".join(sorted({_dtype_name(p.dtype) for p in reducer.parameters})),
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "backend_name": backend,
            "world_size": reducer.process_group.size(),
            "rank": reducer.process_group.rank(),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "bucket_sizes": _sizes(reducer.buckets),
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Called at the start of every synchronised forward."""

    def set_error_and_log(self, error: str) -> None:
        """Keep an error."""
        self._data |= {"has_error": 1, "error": error}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        reducer = self._reducer
        data = self._data | {"iteration": reducer.times.reported, "bucket_cap_bytes": reducer.bucket_limits[-1]}
        if reducer.error is not None:
            data |= {"has_error": 1, "error": reducer.error}
        if reducer.times.iterations:
            data |= reducer.times.summary() | {
                "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.ready_order)),
            }
        if reducer.has_rebuilt_buckets:
            members = ", ".join(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
            data |= {"rebuilt_bucket_sizes": _sizes(reducer.buckets), "rebuilt_per_bucket_param_indices": members}
        return data


def _sizes(buckets: Sequence[BucketBase]) -> str:
    return ", ".join(str(sum(parameter.nbytes for parameter in bucket.parameters())) for bucket in buckets)


def _dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in C++."""
    return {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}.get(dtype, str(dtype))


class StepTimes:
    """Durations of the forward, of the backward and of its communication, in nanoseconds, and their averages.

    The first `TIMED_ITERATIONS` are timed, then one iteration in ``sample_rate``. On a GPU, times are those of the
    current stream. Nothing waits for the device: a step that has not ended when its times are read is not counted, nor
    is a step of which any part is captured in a CUDA graph.

    Attributes:
        sample_rate: number of iterations from one timed iteration to the next.
        iterations: synchronised forwards so far.
        reported: index of the last timed iteration from 0, which PyTorch reports as the iteration.
        unused_bytes: size of the parameters that the last backward left out on this rank.
        n_reduced: number of buckets that the last backward reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = 100
        self.iterations = 0
        self.reported = 0
        self.unused_bytes = 0
        self.n_reduced = 0
        self._clock = _HostClock() if device.type == "cpu" else _StreamClock(device)
        self._is_timed = False
        self._events: dict[str, Any] = {}
        self._unix_times: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._n_timed = 0

    def begin_forward(self) -> None:
        """Count a synchronised forward; add the previous step's times to the averages."""
        self._settle()
        is_due = self.iterations <= TIMED_ITERATIONS or self.iterations % self.sample_rate == 0
        self._is_timed = is_due and not self._clock.is_stopped()
        if self._is_timed:
            self.reported = self.iterations
            self._events = {}
            self._unix_times = {}
        self.iterations += 1
        self.record("forward_compute_time_start")

    def record(self, event: str) -> None:
        """Record the time of an event: the first of its name in an iteration that is timed.

        The events are ``forward_compute_time_start``, and ``_start`` and ``_end`` of ``backward_compute_time`` and
        ``backward_comm_time``.
        """
        if not self._is_timed or event in self._events:
            return
        if self._clock.is_stopped():
            self._is_timed = False
            self._events = {}
            self._unix_times = {}
        else:
            self._events[event] = self._clock.now()
            self._unix_times[event] = time.time_ns()

    def _settle(self) -> None:
        """Compute the durations of a timed iteration once it has ended."""
        events = self._events
        if "backward_comm_time_end" not in events or self._clock.is_stopped():
            return
        if not self._clock.has_passed(events["backward_comm_time_end"]):
            return
        durations = {
            "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
            "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
            "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
            "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
        }
        self._last = {name: self._clock.between(events[start], events[end]) for name, (start, end) in durations.items()}
        self._sums = {name: self._sums.get(name, 0) + duration for name, duration in self._last.items()}
        self._n_timed += 1
        self._is_timed = False
        self._events = {}

    def summary(self) -> dict[str, int]:
        """The last durations, the Unix times of their events, and the averages, under PyTorch's names."""
        self._settle()
        averages = {f"avg_{name}": total // self._n_timed for name, total in self._sums.items()}
        counts = {"unused_parameter_size": self.unused_bytes, "num_buckets_reduced": self.n_reduced}
        return self._last | self._unix_times | averages | counts


class _HostClock:
    def is_stopped(self) -> bool:
        return False

    def now(self) -> int:
        return time.perf_counter_ns()

    def has_passed(self, event: int) -> bool:
        return True

    def between(self, start: int, end: int) -> int:
        return max(0, end - start)


class _StreamClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def is_stopped(self) -> bool:
        """Whether a CUDA graph is being captured: recording or querying a timing event would end the capture."""
        return is_capturing(self._device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        return max(0, int(start.elapsed_time(end) * 1e6))
