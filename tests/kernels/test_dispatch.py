import subprocess
import sys

import pytest
import torch
from cases import INTERPRETED

from gradwire.kernels import dispatch, flatten, unflatten
from gradwire.kernels.dispatch import is_interpreted, use_triton

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


def test_choice_torch_works_on_cpu(choose):
    choose("torch")
    assert not use_triton(CPU)
    out = torch.empty(2, dtype=torch.float16)
    flatten([torch.tensor([1.0, 2.0])], out, scale=2.0)
    assert out.tolist() == [2.0, 4.0]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_choice_triton_on_cpu_raises_with_remedy(choose):
    choose("triton")
    remedy = r"GRADWIRE_KERNELS=triton, but the tensors are on cpu: .* TRITON_INTERPRET=1 .* Set GRADWIRE_KERNELS=auto"
    with pytest.raises(RuntimeError, match=remedy):
        flatten([torch.ones(2)], torch.empty(2))
    with pytest.raises(RuntimeError, match=remedy):
        unflatten(torch.ones(2), [torch.empty(2)])


def test_unknown_choice_raises(choose):
    choose("cuda")
    with pytest.raises(ValueError, match=r"GRADWIRE_KERNELS is 'cuda'; expected one of auto, triton, torch"):
        use_triton(CPU)


@pytest.fixture
def without_triton(monkeypatch):
    is_interpreted.cache_clear()
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    yield
    is_interpreted.cache_clear()


def test_missing_triton_disables_kernels(without_triton, choose):
    choose("auto")
    assert not use_triton(CPU) and not use_triton(CUDA)
    choose("triton")
    with pytest.raises(RuntimeError, match="Triton is not installed"):
        use_triton(CUDA)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch
from gradwire.kernels import flatten, unflatten
out = flatten([torch.tensor([1.0, 7e4])], torch.empty(2, dtype=torch.float16), scale=0.5)
gradient = torch.empty(2)
unflatten(out, [gradient], scale=2.0)
assert gradient.tolist() == [1.0, 70016.0], gradient
"""


def test_flatten_and_unflatten_work_without_triton_installed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_import_reads_no_environment_and_touches_no_device():
    probe = "import gradwire.kernels, torch, sys; assert not torch.cuda.is_initialized()"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", probe],
        capture_output=True,
        text=True,
        timeout=240,
        env={"GRADWIRE_KERNELS": "neither", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
