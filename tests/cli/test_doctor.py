"""``gradwire doctor``: what it reports, and that it fails where something cannot work."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire.bench.gpu import kernel_checks
from gradwire.bench.launch import LaunchError
from gradwire.cli import doctor, self_test
from gradwire.comm.torch_internals import TESTED_TORCH
from gradwire.kernels.dispatch import is_interpreted
from gradwire.planner.hook_registry import HOOKS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_self_test(monkeypatch):
    monkeypatch.setattr(self_test, "check_hooks", list)


def status_of(checks):
    return {check.name: check.status for check in checks}


@pytest.mark.slow
def test_doctor_finds_this_installation_in_order():
    command = [sys.executable, "-m", "gradwire.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    found = {check["name"]: check["text"] for section in report["sections"].values() for check in section}
    assert found["gradwire"] == gradwire.__version__
    assert found["torch"].startswith(torch.__version__)
    assert found["hooks"].startswith(f"{len(HOOKS)} hooks, 2 processes over gloo")
    assert {"python", "CUDA", "cpu", "gloo", "nccl", "GRADWIRE_KERNELS"} <= found.keys()


def test_self_test_covers_a_case_of_every_kernel_family():
    cases = kernel_checks.KERNEL_CHECKS
    assert set(self_test.KERNELS.values()) <= cases.keys()
    for family in self_test.KERNELS:
        self_test.check_kernels(family, torch.device("cpu"))


def test_failed_self_test_fails_the_report(monkeypatch, capsys):
    def fail():
        raise LaunchError(
            "a worker failed", "Traceback\nRuntimeError: int8, gradwire: gradient 0 differs between ranks"
        )

    monkeypatch.setattr(self_test, "check_hooks", fail)
    assert doctor.main(as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    (failed,) = [c for section in report["sections"].values() for c in section if c["status"] == "failed"]
    assert failed["name"] == "hooks" and "gradient 0 differs between ranks" in failed["text"]
    assert doctor.main(as_json=False) == 1
    output = capsys.readouterr()
    assert all(title in output.out.splitlines() for title in doctor.SECTIONS)
    assert "FAILED: RuntimeError: int8" in output.out and "Failed: 1" in output.out
    assert "Traceback" in output.err


@pytest.mark.skipif(is_interpreted(), reason="the interpreter takes CPU tensors")
def test_kernels_that_cannot_run_are_reported_with_remedy(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    cpu = next(doctor.kernels())
    assert cpu.status == "failed" and "Set GRADWIRE_KERNELS=auto" in cpu.text
    monkeypatch.setenv("GRADWIRE_KERNELS", "auto")
    assert next(doctor.kernels()) == ("cpu", "plain PyTorch; Triton kernels need a GPU", "ok")


def test_environment_reports_set_variables_and_unknown_interfaces(monkeypatch):
    given = {"GLOO_SOCKET_IFNAME": "none7", "NCCL_DEBUG": "INFO", "GRADWIRE_KERNEL": "torch", "GRADWIRE_HOOK": "int5"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    checks = list(doctor.environment())
    assert status_of(checks) | {
        "GRADWIRE_KERNELS": "ok",
        "GLOO_SOCKET_IFNAME": "failed",
        "NCCL_DEBUG": "ok",
        "GRADWIRE_KERNEL": "warning",
        "GRADWIRE_HOOK": "failed",
    } == status_of(checks)
    assert "GRADWIRE_HOOK is 'int5'. There is no hook 'int5'" in next(c.text for c in checks if c.status == "failed")
    assert "no interface none7 on this machine" in next(c.text for c in checks if c.name == "GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("release", "torch_status", "fsdp"),
    [
        ("2.10.1", "warning", []),
        ("2.14.1", "ok", []),
        ("2.15.0+cu130", "ok", ["warning"]),
        ("3.0.0a0+git", "warning", ["warning"]),
    ],
)
def test_untested_torch_and_fsdp2_reductions_are_warnings(monkeypatch, release, torch_status, fsdp):
    monkeypatch.setattr(torch, "__version__", release)
    checks = list(doctor.versions())
    assert status_of(checks)["torch"] == torch_status
    found = [check for check in checks if check.name == "FSDP2"]
    assert [check.status for check in found] == fsdp
    assert all("reduce_dtype=torch.bfloat16" in check.text for check in found)


FOR_GPUS = ["filelock", 'triton==3.7.1; platform_system == "Linux"', "nvidia-cudnn==9"]
FITS, MISFITS = ("ok", ""), ("warning", "needs Triton")


@pytest.mark.parametrize(
    ("release", "required", "triton", "status", "text"),
    [
        ("2.13.0", FOR_GPUS, "3.7.1", *FITS),
        ("2.13.0", FOR_GPUS, "3.7.4+git1", *FITS),
        (
            "2.13.0",
            FOR_GPUS,
            "3.9.0",
            "warning",
            'needs Triton 3.7: kernels may fail. Run: pip install "triton==3.7.*"',
        ),
        ("2.14.0", ["triton==3.8.0"], "3.9.0", "warning", "needs Triton 3.8:"),  # torch knows better than the table
        ("2.13.0+cpu", ["filelock"], "3.9.0", *MISFITS),  # builds for CPUs require no Triton
        ("2.13.0+cpu", None, "3.6.0", *MISFITS),
        ("2.13.0+cpu", PackageNotFoundError("torch"), "3.7.0", *FITS),
        ("2.14.0+cpu", None, "3.8.0", *FITS),
        ("2.14.0+cpu", None, "3.10.0", "warning", "needs Triton 3.7 to 3.9"),
        ("2.16.0+cpu", None, "3.9.0", *FITS),  # nothing is known
    ],
)
def test_triton_that_does_not_fit_torch_is_a_warning_with_remedy(monkeypatch, release, required, triton, status, text):
    def requires(name):
        if isinstance(required, Exception):
            raise required
        return required

    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(doctor, "requires", requires)
    monkeypatch.setattr(doctor, "version", {"triton": triton}.__getitem__)
    check = next(check for check in doctor.versions() if check.name == "triton")
    assert check.status == status
    assert triton in check.text and text in check.text


def test_tested_triton_is_that_of_the_compatibility_page():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| [\d.]+ \| (\d+)\.(\d+)\.\d+ \| (\d+)\.(\d+)\.\d+ \|", page, re.MULTILINE)
    assert {(int(a), int(b)): (int(c), int(d)) for a, b, c, d in rows} == doctor.TESTED_TRITON


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (FileNotFoundError(), "ok", "no nvidia-smi"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "warning", "does not answer within 30 s. Restart the driver"),
        (subprocess.CalledProcessError(9, "nvidia-smi"), "warning", "nvidia-smi fails"),
        ("", "ok", "finds no GPU"),
        ("580.95.05\n580.95.05\n", "ok", "580.95.05"),
    ],
)
def test_driver_is_reported_whatever_nvidia_smi_does(monkeypatch, outcome, status, text):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess("nvidia-smi", 0, stdout=outcome)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(subprocess, "run", run)
    driver = next(check for check in doctor.versions() if check.name == "NVIDIA driver")
    assert driver.status == status and text in driver.text


def test_doctor_names_missing_packages_of_the_benchmarks(without_self_test, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert doctor.main(as_json=False) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert 'missing matplotlib: in a checkout of gradwire, run pip install ".[bench]"' in printed


WITHOUT_NAMES = """
import sys, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed

for owner, name in [
    (dist.distributed_c10d, "_world"),
    (distributed, "_find_tensors"),
    (dist.ProcessGroupGloo, "_Options"),
    (DistributedDataParallel, "_pre_forward"),
]:
    removed = getattr(owner, name)
    delattr(owner, name)
    try:
        import gradwire
    except ImportError as error:
        print(name, "removed:", error)
    setattr(owner, name, removed)
    for module in [module for module in sys.modules if module.startswith("gradwire")]:
        del sys.modules[module]

del dist.ProcessGroupGloo  # as in builds without gloo
import gradwire.reducer, gradwire.testing
"""


def test_missing_private_name_of_torch_is_named_with_remedy_and_gloo_may_be_missing():
    command = [sys.executable, "-c", WITHOUT_NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    errors = dict(line.split(" removed: ") for line in done.stdout.splitlines())
    assert list(errors) == ["_world", "_find_tensors", "_Options", "_pre_forward"]
    remedy = f"tested with torch {' to '.join(TESTED_TORCH)}: install one of these, or a newer gradwire"
    for name, error in errors.items():
        assert f"torch {torch.__version__} lacks one" in error
        assert name in error and remedy in error
