"""The bundled reducer: a subclass of PyTorch's DistributedDataParallel with gradwire's buckets."""

from gradwire.reducer.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
