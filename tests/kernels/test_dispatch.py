"""Which code runs: Triton or PyTorch, by device and GRADWIRE_KERNELS; TF32 by GPU; and imports without Triton."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gradwire.kernels import lowrank_triton
from gradwire.kernels.dispatch import has_tf32, is_interpreted, use_triton
from gradwire.kernels.lowrank_triton import dot_precision
from gradwire.kernels.matrix_table import Matrix, MatrixTable
from tests.kernels.support.calls import flatten
from tests.kernels.support.cases import INTERPRETED

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def choose(monkeypatch):
    return lambda choice: monkeypatch.setenv("GRADWIRE_KERNELS", choice)


def test_cpu_tensors_use_triton_only_in_interpreter(monkeypatch, choose):
    monkeypatch.delenv("GRADWIRE_KERNELS", raising=False)
    assert is_interpreted() == INTERPRETED
    assert use_triton(CPU) == INTERPRETED
    choose("auto")
    assert use_triton(CPU) == INTERPRETED


def test_gpu_tensors_use_triton_unless_torch_is_chosen(choose):
    choose("auto")
    assert use_triton(CUDA)
    choose("triton")
    assert use_triton(CUDA)
    choose("torch")
    assert not use_triton(CUDA)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_choice_triton_on_cpu_raises_with_remedy(choose):
    choose("triton")
    remedy = r"GRADWIRE_KERNELS=triton, but the tensors are on cpu: .* TRITON_INTERPRET=1 .* Set GRADWIRE_KERNELS=auto"
    with pytest.raises(RuntimeError, match=remedy):
        flatten([torch.ones(2)], torch.empty(2))


def test_unknown_choice_raises(choose):
    choose("cuda")
    with pytest.raises(ValueError, match=r"GRADWIRE_KERNELS is 'cuda'; expected one of auto, triton, torch"):
        use_triton(CPU)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch
from gradwire.kernels import SegmentTable, flatten_kernels
source, out, gradient = torch.tensor([1.0, 7e4]), torch.empty(2, dtype=torch.float16), torch.empty(2)
table = SegmentTable([source])
flatten_kernels(table).flatten([source], table, out, scale=0.5)
flatten_kernels(table).unflatten(out, [gradient], table, scale=2.0)
assert gradient.tolist() == [1.0, 70016.0], gradient
"""


def test_flatten_and_unflatten_work_without_triton_installed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_import_touches_no_device_and_imports_no_triton():
    probe = "import gradwire, torch, sys; assert not torch.cuda.is_initialized(); assert 'triton' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", probe],
        capture_output=True,
        text=True,
        timeout=240,
        env={"GRADWIRE_KERNELS": "neither", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), True)])
def test_tf32_needs_ampere_on_nvidia(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_tf32.__wrapped__(CUDA) == expected
    assert has_tf32.__wrapped__(CPU), "in the interpreter"


@pytest.mark.parametrize(("name", "expected"), [("gfx942:sramecc+:xnack-", True), ("gfx90a", False), ("gfx950", False)])
def test_tf32_needs_gfx942_on_amd(name, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    assert has_tf32.__wrapped__(CUDA) == expected


@pytest.mark.parametrize(
    ("rank", "precision", "has", "expected"),
    [
        (8, "tf32", True, None),
        (9, "tf32", True, "tf32"),
        (9, "fp32", True, "ieee"),
        (64, "tf32", True, "tf32"),
        (64, "tf32", False, "ieee"),
    ],
)
def test_products_above_rank_8_take_tf32_unless_fp32_is_chosen(rank, precision, has, expected, monkeypatch):
    monkeypatch.setattr(lowrank_triton, "has_tf32", lambda device: has)
    table = MatrixTable([Matrix(64, 64, rank), Matrix(3, 4, 1)], torch.float32, CPU, precision)
    assert dot_precision(table) == expected
