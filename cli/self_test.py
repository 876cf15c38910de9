"""Self-test of ``gradwire doctor``: every hook on two ranks, and every family of kernels on a GPU.

`check_hooks` starts two processes that train a small model with each hook over gloo on the CPU. Each hook's gradients
are compared with their plain mean over the ranks, as before a benchmark. `check_kernels` runs the Triton kernels of
each family against their references in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.bench import launch
from gradwire.bench.implementations import GRADWIRE, check_hook
from gradwire.bench.record import Metric, Record, percentiles_ms, records_of
from gradwire.planner.hook_registry import HOOKS

RANKS = 2
TIMEOUT_S = 60

# The case of each family of kernels, by its name in the GPU lane.
KERNELS = {
    "flattening": "flatten and unflatten float32, aligned",
    "delayed scaling": "delayed scaling",
    "low-rank passes": "low-rank passes, float32, rank 4, aligned",
    "orthogonalization": "orthogonalize, rank 4",
    "column norms": "warm start, rank 4",
    "quantization": "quantize float32 to int4, errors in float32",
}


def check_hooks() -> list[Record]:
    """Train with each hook on two processes; returns a record with the step time of each hook."""
    return launch.run(__name__, {"threads": 1, "timeout_s": TIMEOUT_S}, RANKS)


def main(settings: dict[str, Any], device: torch.device) -> list[Record]:
    """One rank of `check_hooks`. Raises RuntimeError if a hook's gradients are wrong."""
    records = []
    for hook in HOOKS:
        seconds = check_hook(hook, device)
        records += records_of(
            "self_test", {"hook": hook}, GRADWIRE, RANKS, {Metric.STEP_MS: percentiles_ms(seconds[1:])}
        )
    return records


def check_kernels(family: str, device: torch.device) -> None:
    """Run a family's Triton kernels on ``device`` twice, and compare the results with each other and the reference.
    Raises AssertionError if a result is wrong. Raises RuntimeError if a kernel cannot be compiled or launched.
    """
    from gradwire.bench.gpu.kernel_checks import KERNEL_CHECKS

    KERNEL_CHECKS[KERNELS[family]](device)
