"""The bundled reducer: PyTorch's DistributedDataParallel with gradwire's buckets behind it."""

from gradwire.reducer.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
