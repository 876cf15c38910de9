"""Compressed gradients for FSDP2: `attach` finds where a model averages gradients, and compresses there.

How the gradients of one parameter group travel from FSDP2's hook to the hook's state and back:

1. FSDP2 copies them into a flat tensor, one shard after the other, and calls the group's reduce-scatter, which sums
   them over the ranks of a replica. With ``attach(within=...)`` this is a `QuantizedReduceScatter`
   (``reduce_scatter.py``), which has its own error memory.
2. With several replicas (HSDP, `replicate`), FSDP2 all-reduces this rank's shard through a process group. With
   ``attach(state=...)`` this is a `CompressedGroup`, whose `ReplicaAverage` lays the shard out as a `ShardBucket`, with
   one tensor per parameter, and passes it to the hook like a bucket of DDP (both in ``all_reduce.py``).
   `HookState.run` averages it.
3. The mean is written into FSDP2's flat tensor, whose parts become the parameters' ``.grad``.
4. At the end of the backward, `ShardedExchange` (``exchange.py``) waits for the other ranks. If one has failed, it
   returns the results of the step to the error memory (`take_back`), and raises the error on all.

`attach` and its handle, `Attachment`, are in ``attachment.py``, sharded checkpoints of the state in ``checkpoint.py``,
and `Attachment.resynchronize` in ``recovery.py``. All private names of FSDP2 are in ``torch_internals.py``, behind
`ParameterGroup`. Meshes, training loops, mixed precision, gradient accumulation and checkpoints of the model stay as
they are.
"""

from gradwire.sharded.attachment import Attachment, attach
from gradwire.sharded.reduce_scatter import ReduceScatterOptions

__all__ = ["Attachment", "ReduceScatterOptions", "attach"]


def __dir__() -> list[str]:
    return __all__
