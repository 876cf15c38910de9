"""The logger that PyTorch's DDP talks to: construction facts and statistics, as one dictionary."""

from __future__ import annotations

from typing import Any

from gradwire.reducer.reducer import Reducer


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
        parameters = self._reducer.parameters
        self._data |= {
            "module_name": module_name,
            "device_ids": ", ".join(map(str, device_ids)),
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "static_graph": int(static_graph),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
            "world_size": self._reducer.process_group.size(),
            "rank": self._reducer.process_group.rank(),
            "gradient_as_bucket_view": int(self._reducer.gradient_as_bucket_view),
        }

    def set_runtime_stats_and_log(self) -> None:
        """Called at the start of every synchronised forward."""

    def set_error_and_log(self, error: str) -> None:
        """Remember an error."""
        self._data |= {"has_error": 1, "error": error}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data["comm_hook"] = name

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        sizes = ", ".join(str(sum(p.nbytes for p in bucket.parameters())) for bucket in self._reducer.buckets)
        rebuilt = self._reducer.has_rebuilt_buckets
        return self._data | {
            "iteration": self._reducer.iterations,
            "has_rebuilt_buckets": int(rebuilt),
            "rebuilt_bucket_sizes" if rebuilt else "bucket_sizes": sizes,
        }
