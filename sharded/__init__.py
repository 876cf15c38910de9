"""Compressed gradients for HSDP and `replicate`: `attach` finds where a model averages gradients, and compresses there.

In both, FSDP2 all-reduces each group of parameters between replicas, through a process group. `attach` puts a
`ReplicaGroup` in its place, which runs a hook. Meshes, training loops, mixed precision, gradient accumulation and
checkpoints of the model stay as they are.
"""

from gradwire.sharded.attach import Attachment, attach

__all__ = ["Attachment", "attach"]
