"""Every kernel that `make gpu` checks or times compiles; this needs no GPU.

The launches are those of the lane's own cases, run on the CPU without their checks: no kernel runs.
"""

import sys
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import torch

from gradwire.bench.gpu import case as lane_case
from gradwire.bench.gpu import kernel_checks, timings
from gradwire.bench.gpu.case import Skipped
from gradwire.bench.implementations import GRADWIRE
from gradwire.bench.kernel_cases import CASES
from gradwire.bench.shapes import rotation
from tests.kernels.support.ahead_of_time import intermediate, recorded_launches, variant

TARGET = "sm_90"
CHECKS = ("same", "within", "require", "assert_same", "assert_equal_on_all_ranks")


def of_case(case):
    module = sys.modules[getattr(case, "func", case).__module__]

    def run():
        with suppress(Skipped):
            case(torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
        for place, check in product((module, lane_case), CHECKS):
            patch.setattr(place, check, lambda *_: None, raising=False)
        return recorded_launches(run)


def of_bench(name, mib):
    shapes = rotation(timings.buckets_of(timings.MODEL, mib, torch.device("cuda")), mib)
    cases = []
    recorded_launches(lambda: cases.extend(CASES[name](bucket, torch.device("meta")) for bucket in shapes))
    return recorded_launches(lambda: [case.implementations[GRADWIRE]() for case in cases])


KERNELS = {
    **{name: partial(of_case, case) for name, case in kernel_checks.KERNEL_CHECKS.items()},
    **{
        f"bench {name}": partial(of_bench, *bench.args)
        for name, bench in timings.KERNEL_TIMINGS.items()
        if bench is not timings.copy
    },
}


def check_variants(launches, check, checked):
    """Check the launches, those that share a compiled kernel with an earlier one excepted."""
    for launch in launches:
        key = (launch.name, variant(launch, TARGET))
        if key not in checked:
            check(launch, TARGET)
            checked.add(key)


# One case of nine; the slow lane compiles all of them.
@pytest.mark.parametrize("case", list(KERNELS)[::9])
def test_kernels_of_gpu_lane_pass_front_end_of_triton(case, checked=set()):  # noqa: B006
    launches = KERNELS[case]()
    assert launches, "the case launches no kernel"
    check_variants(launches, intermediate, checked)
