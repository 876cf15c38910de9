"""The logger that PyTorch's DDP talks to: construction facts and statistics, as one dictionary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.reducer import torch_internals
from gradwire.reducer.reducer import Bucket, Reducer

# Of the environment, what decides how ranks meet.
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
    """Keeps what PyTorch's DDP reports about itself, and answers ``_get_ddp_logging_data``."""

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
        """Remember facts of construction, under PyTorch's keys."""
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
            "bucket_cap_bytes": reducer.rebuilt_limits[-1],
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "backend_name": backend,
            "world_size": reducer.process_group.size(),
            "rank": reducer.process_group.rank(),
            "gradient_as_bucket_view": int(reducer.gradient_as_bucket_view),
            "bucket_sizes": _sizes(reducer.buckets),
        }
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """Called at the start of every synchronised forward."""

    def set_error_and_log(self, error: str) -> None:
        """Remember an error."""
        self._data |= {"has_error": 1, "error": error}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data["comm_hook"] = name

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        reducer = self._reducer
        data = self._data | {"iteration": reducer.statistics.reported}
        if reducer.error is not None:
            data |= {"has_error": 1, "error": reducer.error}
        if reducer.statistics.iterations:
            data |= reducer.statistics.summary() | {
                "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.ready_order)),
            }
        if reducer.has_rebuilt_buckets:
            members = ", ".join(" ".join(map(str, of_one)) for of_one in reducer.members)
            data |= {"rebuilt_bucket_sizes": _sizes(reducer.buckets), "rebuilt_per_bucket_param_indices": members}
        return data


def _sizes(buckets: Sequence[Bucket]) -> str:
    return ", ".join(str(sum(parameter.nbytes for parameter in bucket.parameters())) for bucket in buckets)


def _dtype_name(dtype: torch.dtype) -> str:
    """The name that C++ has for it."""
    return {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}.get(dtype, str(dtype))
