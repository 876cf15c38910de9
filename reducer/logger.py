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
    """The logger that PyTorch's DDP calls. ``facts`` has PyTorch's keys, `_get_ddp_logging_data` returns more."""

    def __init__(self, reducer: Reducer, **facts: str | int) -> None:
        self._reducer = reducer
        group, parameters = reducer.exchange.process_group, reducer.parameters
        backend = dist.get_backend(group)
        variables = _VARIABLES + _BACKEND_VARIABLES.get(backend, ())
        self.facts: dict[str, Any] = facts | {name.lower(): os.environ.get(name, "N/A") for name in variables}
        if backend == "gloo":
            self.facts["gloo_num_threads"] = GLOO_THREADS
        self.facts |= {
            "find_unused_parameters": int(reducer.find_unused_parameters),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
            "dtypes": ", ".join(sorted({_CPP_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
            "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
            "backend_name": backend,
            "world_size": group.size(),
            "rank": group.rank(),
            "gradient_as_bucket_view": int(reducer.options.gradient_as_bucket_view),
            "bucket_sizes": _sizes(reducer.buckets),
        }

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: PyTorch's class calls it at the start of every synchronized forward."""

    def set_error_and_log(self, error: str) -> None:
        """Keep an error."""
        self.facts |= {"has_error": 1, "error": error}

    def _set_static_graph(self) -> None:
        self.facts["static_graph"] = 1

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        reducer = self._reducer
        data = self.facts | {"iteration": reducer.times.reported, "bucket_cap_bytes": reducer.bucket_limits[-1]}
        if reducer.error is not None:
            data |= {"has_error": 1, "error": reducer.error}
        if reducer.times.iterations:
            data |= reducer.times.summary() | {
                "unused_parameter_size": sum(reducer.parameters[i].nbytes for i in reducer.unused),
                "num_buckets_reduced": reducer.n_reduced,
                "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer._backward.ready_order)),
            }
        if reducer.has_rebuilt_buckets:
            members = ", ".join(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
            data |= {"rebuilt_bucket_sizes": _sizes(reducer.buckets), "rebuilt_per_bucket_param_indices": members}
        return data


def _sizes(buckets: Sequence[ReducerBucket]) -> str:
    return ", ".join(str(sum(parameter.nbytes for parameter in bucket.parameters())) for bucket in buckets)
