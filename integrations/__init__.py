"""Communication hooks in trainers: Lightning, Fabric, Accelerate, Hugging Face Trainer, Ray Train.

`attach` finds the DistributedDataParallel or FSDP2 model that a trainer has created. The modules `lightning`, `fabric`,
`accelerate` and `transformers` need the trainer's package, so they are not imported here. See docs/trainers.md.
"""

from gradwire.integrations._attach import HookNotUsedWarning, attach

__all__ = ["HookNotUsedWarning", "attach"]
