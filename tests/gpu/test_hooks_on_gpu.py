"""The cases of `gradwire.bench.gpu.lane` on a GPU: kernels, and hooks with one rank and with two ranks on one GPU."""

import pytest
import torch

from gradwire.bench.gpu.lane import CASES, RANKS
from gradwire.bench.gpu.worker import Crew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),  # the crew has limits of its own, and then says what every rank was doing
]


@pytest.fixture(scope="module")
def crews():
    with Crew(1) as one, Crew(2) as two:
        yield {1: one, 2: two}


@pytest.mark.parametrize("stage, case", [(stage, name) for stage in RANKS for name in CASES[stage]])
def test_gpu_case_passes_over_nccl(stage, case, crews):
    outcome = crews[RANKS[stage]].run(CASES[stage][case])
    if outcome.status == "skipped":
        pytest.skip(outcome.text)
    assert outcome.status == "passed", outcome.text
