"""``gradwire doctor``: what is installed, which kernels and backends are usable, and a self-test of a few seconds.

The exit status is 1 if a check failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench.launch import LaunchError
from gradwire.bench.record import cpu_name
from gradwire.cli import self_test
from gradwire.cli.options import missing_packages
from gradwire.comm.torch_internals import TESTED_TORCH
from gradwire.hooks.by_name import VARIABLE, name_from_environment
from gradwire.kernels.dispatch import has_tf32, is_interpreted, use_triton

# Variables that change what gradwire, its collectives and its kernels do, by the start of their names.
PREFIXES = ("GRADWIRE_", "GLOO_", "NCCL_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "TORCH_NCCL_", "TRITON_")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS")
DRIVER_TIMEOUT_S = 30
FSDP_REDUCES_IN_FP32 = (2, 15)  # the first such release of torch
FSDP_REMEDY = (
    "since torch 2.15, a MixedPrecisionPolicy with param_dtype and without reduce_dtype reduces the gradients of fp32 "
    "parameters in fp32: twice the bytes. Pass reduce_dtype=torch.bfloat16"
)
TESTED_TRITON = {(2, 11): (3, 6), (2, 13): (3, 7), (2, 15): (3, 9)}  # of docs/compatibility.md, by release of torch
_TEXT_COLUMN, _WIDTH = 22, 100


class Check(NamedTuple):
    name: str  # the checked item
    text: str  # the finding; for a warning or a failure also the remedy
    status: Literal["ok", "warning", "failed"] = "ok"  # "failed": it cannot work


def versions() -> Iterator[Check]:
    """Versions of gradwire, torch and what they build on."""
    yield Check("gradwire", gradwire.__version__)
    oldest, newest = TESTED_TORCH
    release = _minor(torch.__version__)
    text = f"{torch.__version__} (gradwire is tested with {oldest} to {newest})"
    yield Check("torch", text, "ok" if _minor(oldest) <= release <= _minor(newest) else "warning")
    if release >= FSDP_REDUCES_IN_FP32:
        yield Check("FSDP2", FSDP_REMEDY, "warning")
    yield _triton(release)
    yield Check("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    if torch.version.hip is not None:
        yield Check("ROCm", torch.version.hip)
    yield Check("CUDA", torch.version.cuda or "torch is built without CUDA")
    if torch.version.cuda is not None:
        yield _driver()
    if dist.is_nccl_available() and torch.cuda.is_available():
        yield Check("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _triton(release: tuple[int, ...]) -> Check:
    """The release of Triton, with a warning if this torch was made or tested with another one."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return Check("triton", "not installed; all kernels run as plain PyTorch")
    if not (fitting := _fitting_triton(release)):
        return Check("triton", installed)
    oldest, newest = min(fitting), max(fitting)
    if oldest <= _minor(installed) <= newest:
        return Check("triton", installed)
    names = " to ".join(".".join(map(str, each)) for each in sorted({oldest, newest}))
    remedy = f'pip install "triton=={".".join(map(str, newest))}.*"'
    text = f"{installed} does not fit torch {torch.__version__}, which needs Triton {names}: kernels may fail. Run: "
    return Check("triton", text + remedy, "warning")


def _fitting_triton(release: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The oldest and the newest fitting release of Triton: those that torch requires, else those of the tests.

    torch's builds for CPUs require none. Empty if nothing is known.
    """
    try:
        required = " ".join(requires("torch") or ())
    except PackageNotFoundError:  # built from source
        required = ""
    if found := re.findall(r"\btriton\s*\(?==\s*(\d[\d.]*)", required):
        return [_minor(each) for each in found]
    older = [TESTED_TRITON[each] for each in TESTED_TRITON if each <= release]
    newer = [TESTED_TRITON[each] for each in TESTED_TRITON if each >= release]
    return [older[-1], newer[0]] if older and newer else []


def _minor(release: str) -> tuple[int, ...]:
    """(3, 7) of 3.7.1."""
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def _driver() -> Check:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True)
    except FileNotFoundError:
        return Check("NVIDIA driver", "no nvidia-smi on this machine")
    except subprocess.TimeoutExpired:
        text = f"nvidia-smi does not answer within {DRIVER_TIMEOUT_S} s. Restart the driver or the machine"
        return Check("NVIDIA driver", text, "warning")
    except (OSError, subprocess.CalledProcessError) as error:
        return Check("NVIDIA driver", f"nvidia-smi fails: {error}", "warning")
    return Check("NVIDIA driver", next(iter(done.stdout.splitlines()), "nvidia-smi finds no GPU"))


def devices() -> Iterator[Check]:
    yield Check("cpu", f"{cpu_name()}, cores: {os.cpu_count()}, threads: {torch.get_num_threads()}")
    for device in _gpus():
        facts = torch.cuda.get_device_properties(device)
        kind = facts.gcnArchName if torch.version.hip is not None else f"sm_{facts.major}{facts.minor}"
        yield Check(str(device), f"{facts.name}, {kind}, {facts.total_memory / 2**30:.0f} GiB")
    if not _gpus():
        yield Check("cuda", "no GPU found")


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def kernels() -> Iterator[Check]:
    """The implementation that gradwire's kernels use on each device."""
    for device in (torch.device("cpu"), *_gpus()):
        try:
            is_triton = use_triton(device)
        except (RuntimeError, ValueError) as error:
            yield Check(str(device), str(error), "failed")
            continue
        if is_triton and is_interpreted():
            yield Check(str(device), "Triton's interpreter, for tests: slow. Unset TRITON_INTERPRET", "warning")
        elif is_triton:
            precision = "" if has_tf32(device) else "; no TF32 here: PowerSGD above rank 8 computes in fp32"
            yield Check(str(device), f"Triton kernels{precision}")
        elif device.type == "cpu":
            yield Check(str(device), "plain PyTorch; Triton kernels need a GPU")
        elif importlib.util.find_spec("triton") is None:
            yield Check(str(device), "plain PyTorch, slow: Triton is not installed. Run: pip install triton", "warning")
        else:
            yield Check(str(device), "plain PyTorch, as GRADWIRE_KERNELS=torch asks", "warning")


def backends() -> Iterator[Check]:
    """The backends of collectives that this build of torch has."""
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield Check("gloo", "available" if gloo else "not in this build of torch", "ok" if gloo else "warning")
    if _gpus():
        yield Check("nccl", "available" if nccl else "not in this build of torch", "ok" if nccl else "warning")
    else:
        yield Check("nccl", "no GPU to use it on" if nccl else "not in this build of torch")


def environment() -> Iterator[Check]:
    """The variables that gradwire reads, and the other ones of `PREFIXES` and `VARIABLES` that are set."""
    kernels = "GRADWIRE_KERNELS"
    yield Check(kernels, os.environ.get(kernels, "not set: auto, Triton kernels on GPUs and plain PyTorch on CPUs"))
    try:
        yield Check(VARIABLE, name_from_environment() or "not set: the script or the command line names the hook")
    except ValueError as error:
        yield Check(VARIABLE, str(error), "failed")
    for name, value in sorted(os.environ.items()):
        if name in (kernels, VARIABLE) or not (name.startswith(PREFIXES) or name in VARIABLES):
            continue
        if name.startswith("GRADWIRE_"):
            yield Check(name, f"{value} (gradwire reads {kernels} and {VARIABLE} only)", "warning")
        elif name == "GLOO_SOCKET_IFNAME" and hasattr(socket, "if_nameindex"):
            here = [interface for _, interface in socket.if_nameindex()]
            absent = [interface for interface in value.split(",") if interface not in here]
            remedy = f": no interface {', '.join(absent)} on this machine. Set it to one of {', '.join(here)}"
            yield Check(name, f"{value}{remedy if absent else ''}", "failed" if absent else "ok")
        else:
            yield Check(name, value)


def packages() -> Iterator[Check]:
    """The optional packages of the demo and the benchmarks."""
    missing = missing_packages()
    remedy = f'missing {", ".join(missing)}: in a checkout of gradwire, run pip install ".[bench]"'
    yield Check("demo, bench", remedy if missing else "complete")


def self_tests() -> Iterator[Check]:
    """Every hook on two processes over gloo, and on a GPU every family of kernels against its reference."""
    start = time.monotonic()
    try:
        records = self_test.check_hooks()
    except LaunchError as error:
        print(error.log, file=sys.stderr)
        reason = error.log.strip().splitlines() or [str(error)]
        yield Check("hooks", reason[-1], "failed")
    else:
        seconds = time.monotonic() - start
        proven = "equal bits on both ranks, no gradient lost"
        yield Check("hooks", f"{len(records)} hooks, {self_test.RANKS} processes over gloo: {proven} ({seconds:.1f} s)")
    for device in _gpus()[:1]:
        for family in self_test.KERNELS:
            try:
                if use_triton(device):
                    self_test.check_kernels(family, device)
                    yield Check(family, f"equal to the reference on {device}")
            except Exception as error:
                yield Check(family, f"{type(error).__name__}: {error}", "failed")
    if not _gpus():
        yield Check("kernels", "not tested: no GPU")


SECTIONS: dict[str, Callable[[], Iterator[Check]]] = {
    "Versions": versions,
    "Devices": devices,
    "Kernels": kernels,
    "Backends": backends,
    "Environment": environment,
    "Packages": packages,
    "Self-test": self_tests,
}


def main(as_json: bool) -> int:
    """Print the report; returns the exit status."""
    report: dict[str, list[Check]] = {}
    for title, section in SECTIONS.items():
        if not as_json:
            print(title, flush=True)
        report[title] = []
        for check in section():
            report[title].append(check)
            if not as_json:
                print(_line(check), flush=True)
    counts = {status: sum(c.status == status for part in report.values() for c in part) for status in _COLORS}
    if as_json:
        sections = {title: [check._asdict() for check in checks] for title, checks in report.items()}
        print(json.dumps({"ok": counts["failed"] == 0, "sections": sections}, indent=2))
    else:
        found = f"Failed: {counts['failed']}, warnings: {counts['warning']}."
        print(f"\n{found if any(counts.values()) else 'No problems found.'}")
    return 1 if counts["failed"] else 0


_COLORS = {"failed": 31, "warning": 33}  # terminal codes


def _line(check: Check) -> str:
    text = check.text if check.status == "ok" else f"{check.status.upper()}: {check.text}"
    indent = " " * _TEXT_COLUMN
    lines = textwrap.fill(f"  {check.name:<{_TEXT_COLUMN - 4}}  {text}", _WIDTH, subsequent_indent=indent)
    has_color = check.status in _COLORS and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{_COLORS[check.status]}m{lines}\033[0m" if has_color else lines
