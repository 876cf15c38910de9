"""The numbers that replayed steps read from device memory: addresses of gradients, and the number of the step."""

import pytest
import torch

from gradwire.comm import LocalTransport, Workspace, run_algorithm
from gradwire.compress import (
    LowRankBucket,
    LowRankPolicy,
    Step,
    alternating_all_reduce,
    powersgd,
    powersgd_all_reduce,
)
from gradwire.compress import step as step_module
from gradwire.compress.policy import MatrixShape
from tests.kernels.support.exact import assert_same_bits


def test_refresh_uploads_the_addresses_of_the_step():
    layouts = [torch.empty(6, 4, 5), torch.empty(3)]
    bucket = LowRankBucket(
        layouts, LowRankPolicy(rank=1, min_compression_rate=1, stacks={"0": 3}).matrix_shapes(layouts, ["0", "1"])
    )
    source, target = ([torch.ones_like(each) for each in layouts] for _ in range(2))
    seen, kernels = [], bucket.kernels

    def watched(operands, *rest):
        seen.append(operands.addresses)
        kernels.project(operands, *rest)

    bucket.kernels = kernels._replace(project=watched)
    workspace, transport = Workspace(torch.device("cpu")), LocalTransport()
    run_algorithm(powersgd_all_reduce(Step.of(bucket, source, target, 0, transport, workspace)), transport)
    bucket.refresh(source, target, 1)
    assert len(seen[0]) == 9
    assert seen[0] == bucket.table._uploaded.numbers


# --- the number of the step, in device memory


def test_refresh_sets_a_counter_that_is_behind():
    gradient = [torch.zeros(8, 12)]
    bucket = LowRankBucket(gradient, [MatrixShape(1, 8, 12, 2)], names=["a"])
    bucket.refresh(gradient, gradient, 7)
    assert bucket.counter == 7
    bucket.refresh(gradient, gradient, 8)
    assert bucket.counter == 7, "the kernels of step 7 add 1"
    bucket.refresh(gradient, gradient, 20)
    assert bucket.counter == 20


def factors_after(kind, iterations):
    """The factors after steps with these numbers, of a gradient of zeros, whose columns are all drawn anew."""
    gradient, shapes = [torch.zeros(8, 12)], [MatrixShape(1, 8, 12, 2)]
    bucket = LowRankBucket(gradient, shapes, names=["a"], iteration=10, alternating=kind == "alternating")
    transport, workspace = LocalTransport(), Workspace(torch.device("cpu"))
    for i in iterations:
        step = Step.of(bucket, gradient, gradient, i, transport, workspace)
        if kind == "alternating":
            algorithm = alternating_all_reduce(step)
        else:
            warm_start = kind == "warm"
            algorithm = powersgd_all_reduce(step, warm_start=warm_start)
        run_algorithm(algorithm, transport)
    return bucket.q, bucket.counter.item()


@pytest.mark.parametrize("kind", ["warm", "cold", "alternating"])
def test_recorded_step_continues_from_previous_step(kind, monkeypatch):
    eager, after = factors_after(kind, [10, 11, 12])
    assert after == 13
    for module in (powersgd, step_module):
        monkeypatch.setattr(module, "is_capturing", lambda _: True)
    # A replay repeats the recorded step, with its number; an alternating step has a recording for each side.
    recorded, after = factors_after(kind, [10, 11, 10] if kind == "alternating" else [10, 10, 10])
    assert after == 13
    assert_same_bits(recorded, eager, "the factors of the next step")


def test_eager_step_uses_the_hosts_number():
    first, _ = factors_after("warm", [10, 11, 500])
    second, step = factors_after("warm", [500])
    assert step == 501
    assert_same_bits(first, second, "the random columns of step 501")
