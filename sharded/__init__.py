"""Compressed gradients for FSDP2: `attach` finds where a model exchanges gradients, and compresses there.

Each parameter group of FSDP2 reduce-scatters its gradients within a replica, through a function, and all-reduces the
shards between replicas (HSDP, `replicate`), through a process group. `attach` replaces the former by a
`QuantizedReduceScatter`, the latter by a `ReplicaGroup` that runs a hook. Meshes, training loops, mixed precision,
gradient accumulation and checkpoints of the model stay as they are.
"""

from gradwire.sharded.attachment import Attachment, attach
from gradwire.sharded.shards import ReduceScatterOptions

__all__ = ["Attachment", "ReduceScatterOptions", "attach"]


def __dir__() -> list[str]:
    return __all__
