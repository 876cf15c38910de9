"""gradwire's reducer: a subclass of PyTorch's DistributedDataParallel with zero-copy buckets."""

from gradwire.reducer.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
