"""The GPU lane's cases of `gradwire.attach`, on CPUs."""

import pytest
import torch

from gradwire.bench.gpu.sharded_checks import SHARDED_CHECKS
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("case", SHARDED_CHECKS)
@on_ranks(2)
def test_case_of_the_lane_holds_on_cpus(case):
    SHARDED_CHECKS[case](torch.device("cpu"))
