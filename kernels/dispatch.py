"""The choice between Triton kernels, CPU paths and references.

Triton kernels run on a GPU or in Triton's interpreter. The environment variable ``GRADWIRE_KERNELS`` overrides the
choice: ``auto`` (the default), ``triton``, or ``torch``. Triton, and the files ``*_triton`` with the kernels, are
imported at the first launch: they take longer to import than all other files together.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
CHOICES = ("auto", "triton", "torch")


@cache
def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which takes CPU tensors (``TRITON_INTERPRET=1``)."""
    if not HAS_TRITON or "TRITON_INTERPRET" not in os.environ:
        return False
    return bool(import_module("triton").knobs.runtime.interpret)


@cache
def has_tf32(device: torch.device) -> bool:
    """Whether `tl.dot` in TF32 compiles for ``device``. Triton's interpreter accepts it, and computes in fp32."""
    if device.type != "cuda":
        return True
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942")
    return torch.cuda.get_device_capability(device) >= (8, 0)


def use_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of ``device`` run as Triton kernels.

    Raises:
        ValueError: ``GRADWIRE_KERNELS`` is none of auto, triton, torch.
        RuntimeError: ``GRADWIRE_KERNELS=triton``, and Triton cannot run on ``device``.
    """
    choice = os.environ.get("GRADWIRE_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"GRADWIRE_KERNELS is {choice!r}; expected one of {', '.join(CHOICES)}. Unset it for auto.")
    possible = HAS_TRITON and (device.type == "cuda" or is_interpreted())
    if choice == "triton" and not possible:
        reason = f"the tensors are on {device}" if HAS_TRITON else "Triton is not installed"
        raise RuntimeError(
            f"GRADWIRE_KERNELS=triton, but {reason}: Triton kernels need a CUDA or ROCm tensor, "
            "or TRITON_INTERPRET=1 set before the first launch. Set GRADWIRE_KERNELS=auto to choose by device."
        )
    return possible and choice != "torch"
