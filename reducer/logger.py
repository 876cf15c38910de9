"""`Logger`: the facts that PyTorch's DistributedDataParallel reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comm.torch_internals import GLOO_THREADS
from gradwire.reducer.bucket import ReducerBucket
from gradwire.reducer.reducer import Reducer

# Environment variables that decide how ranks meet.
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_NCCL_VARIABLES = ("SOCKET_IFNAME", "BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "DEBUG", "NTHREADS", "IB_TIMEOUT")
_BACKEND_VARIABLES = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": tuple(f"NCCL_{name}" for name in _NCCL_VARIABLES),
}


_CPP_DTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}


class Logger:
    """The logger that PyTorch's DDP calls: keeps the facts that ``_get_ddp_logging_data`` returns."""

    def __init__(self, reducer: Reducer) -> None:
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
        backend = dist.get_backend(reducer.exchange.process_group)
        variables = _VARIABLES + _BACKEND_VARIABLES.get(backend, ())
        self._data |= {name.lower(): os.environ.get(name, "N/A") for name in variables}
        if backend == "gloo":
            self._data["gloo_num_threads"] = GLOO_THREADS
        self._data |= {
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "find_unused_parameters": int(reducer.find_unused_parameters),
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
            "dtypes": ", ".join(sorted({_CPP_DTYPES.get(p.dtype, str(p.dtype)) for p in reducer.parameters})),
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "backend_name": backend,
            "world_size": reducer.exchange.process_group.size(),
            "rank": reducer.exchange.process_group.rank(),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "bucket_sizes": _sizes(reducer.buckets),
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: PyTorch's class calls it at the start of every synchronized forward."""

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
        data = self._data | {
            "iteration": reducer.times.reported,
            "bucket_cap_bytes": (reducer.bucket_limits or reducer.options.rebuilt_limits)[-1],
        }
        if reducer.error is not None:
            data |= {"has_error": 1, "error": reducer.error}
        if reducer.times.iterations:
            data |= reducer.times.summary() | {
                "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer._backward.ready_order)),
            }
        if reducer.has_rebuilt_buckets:
            members = ", ".join(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
            data |= {"rebuilt_bucket_sizes": _sizes(reducer.buckets), "rebuilt_per_bucket_param_indices": members}
        return data


def _sizes(buckets: Sequence[ReducerBucket]) -> str:
    return ", ".join(str(sum(parameter.nbytes for parameter in bucket.parameters())) for bucket in buckets)
