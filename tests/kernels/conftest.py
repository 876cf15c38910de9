"""The lanes of the kernel tests: the CPU path, Triton's interpreter (``TRITON_INTERPRET=1``), and a GPU (``-m gpu``).

One body serves all of them: it asks for ``device`` and compares an operation with its reference and an oracle.
"""

from importlib.util import find_spec

import pytest
import torch

pytest.register_assert_rewrite(*(f"tests.kernels.support.{name}" for name in ("exact", "cases", "matrix_cases")))

from gradwire.kernels.dispatch import is_interpreted  # noqa: E402

INTERPRETED = is_interpreted()
collect_ignore_glob = [] if find_spec("hypothesis") and find_spec("numpy") else ["*"]

if INTERPRETED:
    from tests.kernels.support import bounds, interpreter_repair
    from tests.support import fast_interpreter

    fast_interpreter.install()
    interpreter_repair.install()
    bounds.install()


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
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
