"""Stages *preflight* and *first* of the GPU lane: they tell in four minutes whether machine and gradwire work.

Preflight tries what every kernel and hook needs. *first* has one or two cases of every kind: kernels, hooks on both
DDPs, CUDA graphs, recorded steps, GradScaler, two ranks, and the times of hooks compared with PyTorch's.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import kernels
from gradwire.bench.gpu.case import LaneCase, Skipped, require
from gradwire.bench.gpu.hook_checks import HOOK_CHECKS
from gradwire.bench.gpu.kernel_checks import KERNEL_CHECKS
from gradwire.bench.gpu.timings import HOOK_TIMINGS, KERNEL_TIMINGS
from gradwire.bench.host_double import c_compilers


def driver(device: torch.device) -> None:
    """The driver supports the CUDA version of this PyTorch."""
    if device.type != "cuda":
        raise Skipped("only a machine with a GPU has a driver")
    torch.ones(1, device=device).item()


def c_compiler(device: torch.device) -> None:
    """Triton compiles a launcher for each kernel."""
    require(c_compilers(), f"no {os.environ.get('CC', 'gcc or clang')} on the path. Install gcc, or set CC.")


def python_headers(device: torch.device) -> None:
    """The launchers include Python.h."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    require(header.exists(), f"no {header}. Install the headers of this Python, such as python3-dev.")


def kernel_launch(device: torch.device) -> None:
    """A kernel compiles and runs."""
    gradients, wire = [torch.ones(5000, device=device)], torch.zeros(5000, dtype=torch.float16, device=device)
    table = kernels.SegmentTable(gradients)
    kernels.flatten_kernels(table).flatten(gradients, table, wire, 0.5)
    require(bool((wire == 0.5).all()), "flatten, scaled by 0.5, does not give 0.5")


def all_reduce(device: torch.device) -> None:
    """NCCL sums."""
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    require(bool((tensor == dist.get_world_size()).all()), "the sum of ones is not the number of ranks")


def all_to_all_of_bytes(device: torch.device) -> None:
    """NCCL exchanges messages of uint8, as quantization hooks send them."""
    sent = torch.arange(256 * dist.get_world_size(), device=device).to(torch.uint8)
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent)
    first = torch.arange(256, device=device).to(torch.uint8)
    require(torch.equal(received[:256], first), "the bytes of rank 0 did not arrive")


PREFLIGHT: dict[str, LaneCase] = {
    "driver": driver,
    "C compiler": c_compiler,
    "Python.h": python_headers,
    "kernel launch": kernel_launch,
    "NCCL all-reduce": all_reduce,
    "NCCL all-to-all of bytes": all_to_all_of_bytes,
}
_ALL = {**KERNEL_CHECKS, **HOOK_CHECKS, **KERNEL_TIMINGS, **HOOK_TIMINGS}
FIRST: dict[str, LaneCase] = {
    name: _ALL[name]
    for name in (
        "flatten and unflatten float32, off by one",
        "flatten and unflatten bfloat16, odd",
        "delayed scaling",
        "low-rank passes, float32, rank 4, unaligned",
        "low-rank passes, bfloat16, rank 32, aligned",
        "orthogonalize, rank 4",
        "orthogonalize, rank 32",
        "warm start, rank 4",
        "quantize float32 to int4, errors in float32, unaligned",
        "quantize float32 to int8, errors in bfloat16",
        "reduce messages of 64 ranks, int4",
        "no hook: PyTorch's gradients",
        "scaled-fp16: equal bits on both DDPs",
        "powersgd: equal bits on both DDPs",
        "int4: no host synchronization",
        "fp16: replays from a CUDA graph",
        "powersgd, dropout: replays give the bits of eager steps",
        "gradscaler skips the step of an overflow",
        "copy",
        "hook fp16, gpt2-124m",
        "hook powersgd-r4, gpt2-124m",
        "hook int4, gpt2-124m",
    )
}
FIRST_RANKS: dict[str, LaneCase] = {
    name: HOOK_CHECKS[name]
    for name in (
        "fp16: equal bits on both DDPs",
        "powersgd: equal bits on both DDPs",
        "int4: equal bits on both DDPs",
    )
}
