"""Communication hooks in trainers: Lightning, Fabric, Accelerate, Hugging Face Trainer, Ray Train.

`register_comm_hook` finds the DistributedDataParallel that a trainer has created. The modules `lightning`, `fabric`,
`accelerate` and `transformers` need the trainer's package, so they are not imported here. See docs/trainers.md.
"""

from gradwire.integrations._comm_hook import HookNotUsedWarning, register_comm_hook

__all__ = ["HookNotUsedWarning", "register_comm_hook"]
