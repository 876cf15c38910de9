"""Cases of the lane's stage *sanitize*: small kernel cases under compute-sanitizer.

memcheck finds accesses out of bounds, racecheck races in shared memory. Each case is a process of its own,
``python -m gradwire.bench.gpu.sanitizer NAME``, without PyTorch's caching allocator, whose large blocks hide an access
beyond the end of a tensor. A rehearsal runs the same processes without compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from gradwire.bench.gpu.case import LaneCase, Skipped
from gradwire.bench.gpu.kernel_checks import KERNEL_CHECKS
from gradwire.bench.launch import exit_with_launcher
from gradwire.planner.device_sync import synchronize

TOOLS = ("memcheck", "racecheck")
SANITIZED = (
    "flatten and unflatten float32, aligned",
    "flatten and unflatten float16, off by one",
    "flatten and unflatten bfloat16, odd",
    "delayed scaling",
    "low-rank passes, float32, rank 4, aligned",
    "low-rank passes, float32, rank 32, unaligned",
    "low-rank passes, float16, rank 4, unaligned",
    "orthogonalize, rank 4",
    "warm start, rank 4",
    "quantize float32 to int8, errors in float32",
    "quantize float32 to int4, errors in float32, unaligned",
    "quantize NaN to int4",
)
LIMIT = 240.0  # seconds of a process
ERROR_STATUS = 86


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer: on PATH, in a CUDA toolkit, or in a Python package; None if there is none."""
    if (found := shutil.which("compute-sanitizer")) is not None:
        return found
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    candidates = [root / folder / "compute-sanitizer" for root in roots for folder in ("bin", "compute-sanitizer")]
    for package in ("nvidia", "triton", "torch"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            candidates += sorted(Path(folder).rglob("compute-sanitizer"))
    return next((str(path) for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def sanitized(tool: str, name: str, device: torch.device) -> None:
    """Run a case in a process under compute-sanitizer. Raises Skipped without one, AssertionError if it fails."""
    sanitizer = find_sanitizer() if device.type == "cuda" else None
    if device.type == "cuda" and sanitizer is None:
        raise Skipped("compute-sanitizer is neither on PATH, nor in a CUDA toolkit, nor in a Python package")
    command = [sys.executable, "-m", "gradwire.bench.gpu.sanitizer", name]
    if sanitizer is not None:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    read_end, write_end = os.pipe()  # it closes with this process, and the case ends
    try:
        done = subprocess.run(
            command, env=environment, stdin=read_end, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    finally:
        os.close(read_end)
        os.close(write_end)
    if done.returncode != 0:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}")
    if sanitizer is None:
        raise Skipped("right without compute-sanitizer, which takes a GPU")


SANITIZER_CASES: dict[str, LaneCase] = {
    f"{tool}: {name}": partial(sanitized, tool, name) for name in SANITIZED for tool in TOOLS
}


def main() -> None:
    """Run one case on the GPU, or on the CPU if there is none, until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m gradwire.bench.gpu.sanitizer")
    parser.add_argument("name", choices=SANITIZED)
    name = parser.parse_args().name
    exit_with_launcher()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    KERNEL_CHECKS[name](device)
    synchronize(device)


if __name__ == "__main__":
    main()
