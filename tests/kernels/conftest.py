"""The lanes of the kernel tests: the CPU path, Triton's interpreter (``TRITON_INTERPRET=1``), and a GPU (``-m gpu``).

One body serves all of them: it asks for ``device`` and compares the public function with its reference and an oracle.
The helper modules of this folder are importable by their own names.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("exact", "cases")

import interpreter_repair  # noqa: E402
from cases import INTERPRETED  # noqa: E402

if INTERPRETED:
    interpreter_repair.install()


def pytest_configure(config):
    # Overflow and NaN are what many of these tests are about; numpy, inside the interpreter, warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


# One value for the whole run: hypothesis runs many examples under one fixture value.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        if INTERPRETED:
            pytest.skip("gpu: the interpreter reads host memory; run without TRITON_INTERPRET")
        if not torch.cuda.is_available():
            pytest.skip("gpu: needs a CUDA device")
    return torch.device(request.param)
